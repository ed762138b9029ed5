"""How does a model of sentence-transformers, from the Hugging Face hub or a folder, embed texts?"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from memvault.embedding.base import Matrix
from memvault.errors import ConfigurationError, MissingDependencyError
from memvault.text import MAX_IDENTIFIER_CHARACTERS, shown

LIBRARY = "sentence-transformers"
DOCUMENT_PROMPT = "?document_prompt="
PROBE = "memvault"


class SentenceTransformerEmbedder:
    """A model by its name on the hub, or by the folder that it was saved to.

    A string that begins with "/", "./", "../" or "~", or a Path, is a folder; anything else is a name. One without an
    organisation belongs to "sentence-transformers"; those of others may begin with it, too, and do in `model`:
    "sentence-transformers/BAAI/bge-m3". Whatever is in `model` can be given as ``name_or_path`` again.

    ``query_prompt``, ``document_prompt``: put before each text, instead of the prompts that the model brings along.
    A document prompt changes what is stored, and is part of `model`; a query prompt is not, and has to be given
    whenever the vault is opened. ``device``: "cpu", "cuda:0"; by default the fastest there is. ``batch_size``: texts
    that go through the model at once. ``model``: another name for the vault to remember, such as the hub's for a
    folder with a copy; it must then say whatever distinguishes its vectors.

    Loading, and the download where the model is not in the cache, waits for the first use, which raises
    MissingDependencyError without the extra, and ConfigurationError where the model cannot be loaded.
    """

    loading_s = 600.0  # a download may be part of it

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        device: str | None = None,
        batch_size: int = 32,
        model: str | None = None,
    ) -> None:
        if not isinstance(name_or_path, str | Path) or not str(name_or_path).strip():
            raise ConfigurationError(f"name_or_path must be a model's name or folder, got {shown(name_or_path)}")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigurationError(f"batch_size must be an int of at least 1, got {shown(batch_size)}")
        for argument, value in (("query_prompt", query_prompt), ("document_prompt", document_prompt)):
            if value is not None and not isinstance(value, str):
                raise ConfigurationError(f"{argument} must be a str or None, got {shown(value)}")
        base, remembered = _parsed(name_or_path)
        if remembered is not None and document_prompt not in (None, remembered):
            raise ConfigurationError(
                f"the model's name says the document prompt {shown(remembered)}, and document_prompt= another, "
                f"{shown(document_prompt)}; leave one out"
            )
        self._document_prompt = remembered if document_prompt is None else document_prompt
        self._query_prompt = query_prompt
        self._device = device
        self.batch_size = batch_size
        self._source = _source(base)
        """A folder's absolute path, or organisation/name."""
        self.model = _named(self._source, self._document_prompt) if model is None else model
        self._using = threading.Lock()
        self._encoder: Any = None
        self._dimension: int | None = None

    @property
    def dimension(self) -> int:
        if self._dimension is None:
            # Not every architecture knows it; a vector does.
            self._dimension = self._encoded("encode_document", [PROBE], self._document_prompt).shape[1]
        return self._dimension

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        return self._embedded("encode_document", texts, self._document_prompt)

    def embed_queries(self, texts: Sequence[str]) -> Matrix:
        return self._embedded("encode_query", texts, self._query_prompt)

    def _embedded(self, method: str, texts: Sequence[str], prompt: str | None) -> Matrix:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        return self._encoded(method, texts, prompt)

    def _encoded(self, method: str, texts: Sequence[str], prompt: str | None) -> Matrix:
        # One at a time: the tokenizers keep their padding as state, and fail with "Already borrowed" where two threads
        # set it; a model spreads one call over all cores anyway.
        with self._using:
            if self._encoder is None:
                self._encoder = self._load()
            encode = getattr(self._encoder, method)
            # Without a prompt of the caller's, the one that the model has for this purpose is used.
            vectors = np.asarray(
                encode(list(texts), prompt=prompt, batch_size=self.batch_size, show_progress_bar=False), np.float32
            )
        # Not by the library: at half precision its norms are off by a thousandth. A zero is left to whoever checks.
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: Matrix = (vectors / np.where(norms > 0, norms, 1)).astype(np.float32, copy=False)
        return unit

    def _load(self) -> Any:
        try:
            import sentence_transformers
        except ImportError as exc:
            raise MissingDependencyError(
                f"the embedder {self.model!r} needs the package sentence-transformers ({exc}): "
                "pip install 'memvault[sentence-transformers]'"
            ) from exc
        if os.path.isabs(self._source):
            if not os.path.isdir(self._source):
                raise ConfigurationError(f"there is no sentence-transformers model in {self._source}: no such folder")
        elif os.path.exists(self._source):
            # The library would take the folder, and the vault remember the hub's model.
            raise ConfigurationError(
                f"{self._source!r} is a name on the hub, and a folder in the working directory; write ./{self._source} "
                "for the folder, or go elsewhere for the hub's"
            )
        try:
            return sentence_transformers.SentenceTransformer(self._source, device=self._device)
        except Exception as exc:  # of the hub, of files, of a device: any library below may have raised it
            device = "" if self._device is None else f" on device {self._device!r}"
            raise ConfigurationError(
                f"the sentence-transformers model {self._source!r} cannot be loaded{device}; is its name right, and is "
                f"it in the cache or the hub within reach? {type(exc).__name__}: {str(exc)[:300]}"
            ) from exc


def _parsed(name_or_path: str | Path) -> tuple[str | Path, str | None]:
    """A name as in `model`, or the caller's, and the document prompt that it says, if any."""
    if isinstance(name_or_path, Path):
        return name_or_path, None
    base, says_prompt, quoted = name_or_path.partition(DOCUMENT_PROMPT)
    return base, unquote(quoted) if says_prompt else None


def _source(base: str | Path) -> str:
    if isinstance(base, Path) or os.path.isabs(base) or base.startswith(("./", "../", "~")) or base in (".", ".."):
        # Absolute, as the vault may be opened from elsewhere; links are kept, as their owner means to move them.
        return os.path.abspath(os.path.expanduser(base))
    parts = base.split("/")
    if len(parts) == 3 and parts[0] == LIBRARY:
        parts = parts[1:]
    if len(parts) > 2 or not all(parts):
        raise ConfigurationError(
            f"{base!r} is no model's name on the hub; write sentence-transformers/NAME, ORGANISATION/NAME, or ./{base} "
            "for a folder"
        )
    return "/".join(parts) if len(parts) == 2 else f"{LIBRARY}/{base}"


def _named(source: str, document_prompt: str | None) -> str:
    """What the vault remembers: it can be parsed again."""
    name = source if os.path.isabs(source) or source.startswith(f"{LIBRARY}/") else f"{LIBRARY}/{source}"
    if document_prompt is not None:
        name += DOCUMENT_PROMPT + quote(document_prompt, safe="")
    if len(name) > MAX_IDENTIFIER_CHARACTERS:
        raise ConfigurationError(
            f"the model's name and its document prompt come to {len(name)} characters, {shown(name)}, and a vault "
            f'remembers {MAX_IDENTIFIER_CHARACTERS}; give it a shorter name, model="…"'
        )
    return name
