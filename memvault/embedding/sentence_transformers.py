"""How does a sentence-transformers model embed? Documents and queries each with the prompt that it was trained with."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from memvault.embedding.base import Matrix
from memvault.errors import ConfigurationError, EmbeddingError, MissingDependencyError
from memvault.text import shown

ORGANISATION = "sentence-transformers/"
"""What the models of the hub are remembered under, whoever made them: of one with two slashes it is no part."""

_PROMPT = "?document_prompt="


def is_folder(name: str | Path) -> bool:
    """Whether this is written as the path of a folder, not as the name of a model on the hub."""
    return isinstance(name, Path) or name.startswith(("/", "./", "../", "~"))


class SentenceTransformerEmbedder:
    """A model of sentence-transformers: from the Hugging Face hub by its name, or from a local folder.

    ``name`` is a hub's name ("sentence-transformers/all-MiniLM-L6-v2", "BAAI/bge-small-en-v1.5"), or a path: a Path, or
    a text that starts with "/", "./", "../" or "~". The prompts are put before each query or document; None: the
    model's own, where it has some. ``device``: torch's name of it; None: the best there is. ``batch_size``: texts that
    go through the model at once.

    ``model`` is what a vault remembers: the name or the absolute path, and ``document_prompt`` where one is given, so
    that ``embedder=None`` finds all of it again. (Not ``query_prompt``, which changes no stored vector: give it each
    time.) Name it yourself where a folder stands for a model of the hub, or may be moved.

    The model is loaded once, as soon as its dimension is asked for; one of the hub is downloaded if it is not in the
    cache. Raises MissingDependencyError where sentence-transformers is not installed.
    """

    loading_s = 600.0

    def __init__(
        self,
        name: str | Path,
        *,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        device: str | None = None,
        batch_size: int = 32,
        model: str | None = None,
    ) -> None:
        for argument, value in (("query_prompt", query_prompt), ("document_prompt", document_prompt)):
            if value is not None and not isinstance(value, str):
                raise ConfigurationError(f"{argument} must be a str, got {shown(value)}")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigurationError(f"batch_size must be an int of at least 1, got {shown(batch_size)}")
        self._name, named = _resolved(name)
        self.model = model or (named if document_prompt is None else f"{named}{_PROMPT}{quote(document_prompt)}")
        self.batch_size = batch_size
        self._query_prompt = query_prompt
        self._document_prompt = document_prompt
        self._device = device
        self._one_at_a_time = threading.Lock()
        """Tokenizers keep a call's truncation and padding as their own state, and raise where two threads meet."""
        self._loaded: tuple[Any, int] | None = None

    @classmethod
    def remembered(cls, model: str | Path) -> SentenceTransformerEmbedder:
        """The embedder whose ``model`` this is, or which has this name."""
        name, separator, prompt = str(model).partition(_PROMPT)
        if not separator:
            return cls(model)
        return cls(name, document_prompt=unquote(prompt))

    @property
    def dimension(self) -> int:
        return self._model()[1]

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        return self._encode(self._model()[0].encode_document, texts, self._document_prompt)

    def embed_queries(self, texts: Sequence[str]) -> Matrix:
        return self._encode(self._model()[0].encode_query, texts, self._query_prompt)

    def _encode(self, encode: Any, texts: Sequence[str], prompt: str | None) -> Matrix:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        with self._one_at_a_time:
            answer: Matrix = encode(
                list(texts),
                prompt=prompt,  # None: the one that the model has for this purpose
                batch_size=self.batch_size,
                show_progress_bar=False,
                normalize_embeddings=True,
            )
        return answer.astype(np.float32, copy=False)

    def _model(self) -> tuple[Any, int]:
        if self._loaded is None:
            with self._one_at_a_time:
                if self._loaded is None:
                    self._loaded = self._load()
        return self._loaded

    def _load(self) -> tuple[Any, int]:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as exc:
            raise MissingDependencyError(
                f"the embedder {self.model!r} needs sentence-transformers ({exc}): "
                "pip install 'memvault[sentence-transformers]'"
            ) from exc
        try:
            model = SentenceTransformer(self._name, device=self._device)
            # What it says of its dimension may be None.
            dimension = model.encode_document(["memvault"], show_progress_bar=False).shape[1]
        except Exception as exc:  # of torch, transformers, the hub or a file: whatever it was, it is chained
            raise EmbeddingError(
                f"the model {self._name!r} of sentence-transformers cannot be loaded: {type(exc).__name__}: "
                f"{str(exc)[:300]}"
            ) from exc
        return model, int(dimension)


def _resolved(name: str | Path) -> tuple[str, str]:
    """What sentence-transformers calls the model, and what a vault does."""
    if not isinstance(name, str | Path) or not str(name).strip():
        raise ConfigurationError(f"name must be the name or the path of a model, got {shown(name)}")
    if is_folder(name):
        folder = os.path.abspath(os.path.expanduser(name))
        if not os.path.isdir(folder):
            raise ConfigurationError(f"there is no folder {folder} with a sentence-transformers model")
        return folder, folder
    bare = str(name).removeprefix(ORGANISATION)
    return (bare if "/" in bare else f"{ORGANISATION}{bare}"), f"{ORGANISATION}{bare}"
