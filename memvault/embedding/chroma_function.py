"""How is an embedding function of Chroma's an embedder, and what is its model called?"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from memvault.embedding.base import Matrix
from memvault.embedding.function import FunctionEmbedder
from memvault.errors import ConfigurationError
from memvault.text import MAX_IDENTIFIER_CHARACTERS, shown

BATCH_SIZE = 32
"""Texts to one call: what the most modest of Chroma's providers takes in a request, a text-embeddings-inference server
as it comes. Cohere takes 96, OpenAI 2,048."""

_MODEL_KEYS = ("model_name", "model")
_URL_KEYS = ("url", "api_base", "api_url")
"""Name the model of a server that was started with one; where the model is named, they say only where it runs."""

_INDIFFERENT = {
    *("account_id", "api_type", "api_version", "batch_size", "cache_dir", "cache_folder", "cuda", "device"),
    *("device_ids", "gateway_id", "lazy_load", "local_files_only", "location", "max_retries", "normalize_embeddings"),
    *("normalized", "organization_id", "preferred_providers", "project", "project_id", "query_config", "region"),
    *("region_name", "session_args", "threads", "timeout", "vertexai"),
}
"""Settings of Chroma's that say where, how fast or for whom, that are about queries, or that change lengths only.
`preferred_providers` would differ before and after the first use."""

_SECRET = {
    *("accesskey", "apikey", "auth", "authorization", "bearer", "cookie", "cookies", "credential", "credentials"),
    *("header", "headers", "key", "keys", "passwd", "password", "secret", "secrets", "token"),
}
"""Words in the names of secrets, and of variables that hold them."""

_SAYS_NO_MODEL = frozenset({"langchain"})
"""Its config names the class that it wraps, and not which model that was given."""

_LOCAL = frozenset({"InstructorEmbeddingFunction", "SentenceTransformerEmbeddingFunction", "Text2VecEmbeddingFunction"})
_one_at_a_time = threading.Lock()
"""For functions that run a model in this process: tokenizers are not for several threads, and instances share them."""


class ChromaFunctionEmbedder(FunctionEmbedder):
    """Any of `chromadb.utils.embedding_functions`, or a class of one's own with the methods of `EmbeddingFunction`.

    ``model`` None: it is called after the function's `name()` and its `get_config()`, as in
    "chroma/openai/text-embedding-3-small"; whatever else in the config can change vectors adds a short digest, secrets
    and devices do not. Raises ConfigurationError where these tell no model apart: a function of LangChain's, or one
    without a name. ``dimension`` None: one text is embedded to learn it. ``batch_size``: texts to one call.

    Queries go to `embed_query`.
    """

    def __init__(
        self,
        function: Any,
        *,
        model: str | None = None,
        dimension: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        if not is_chroma_function(function):
            raise ConfigurationError(
                "function must be an embedding function of Chroma's, with the methods name and get_config, got "
                f"{_class_of(function)}"
            )
        if any(each.__name__ == "SparseEmbeddingFunction" for each in type(function).__mro__):
            raise ConfigurationError(
                f"{_class_of(function)} makes sparse vectors; a vault needs one vector for each text, of one dimension"
            )
        self._chroma_function = function
        local = any(each.__name__ in _LOCAL for each in type(function).__mro__)
        self._in_turn: AbstractContextManager[Any] = _one_at_a_time if local else nullcontext()
        super().__init__(
            self._call,
            model=model_of(function) if model is None else model,
            dimension=dimension,
            batch_size=batch_size,
        )

    def embed_queries(self, texts: Sequence[str]) -> Matrix:
        embed_query = getattr(self._chroma_function, "embed_query", None)
        if not callable(embed_query):  # Chroma's own base class has had it since 1.1 only
            return self.embed_documents(texts)
        with self._in_turn:
            if callable(getattr(self._chroma_function, "embed_documents", None)):
                # A function that has both is LangChain's, whose embed_query takes one text.
                each: Any = [embed_query(text) for text in texts]
                return each  # type: ignore[no-any-return]  # held against the protocol by whoever calls
            answer: Matrix = embed_query(list(texts))
            return answer

    def _call(self, texts: list[str]) -> Any:
        with self._in_turn:
            return self._chroma_function(texts)


def is_chroma_function(obj: object) -> bool:
    """Whether an object has the methods of Chroma's `EmbeddingFunction`; a class has not. Loads no chromadb."""
    return (
        not isinstance(obj, type)
        and callable(obj)
        and callable(getattr(obj, "name", None))
        and callable(getattr(obj, "get_config", None))
    )


def model_of(function: Any) -> str:
    """The model's name by what a function says of itself. Raises ConfigurationError where that is not enough."""
    try:
        name, config = function.name(), function.get_config()
        if not isinstance(name, str) or not name or not isinstance(config, Mapping) or name in _SAYS_NO_MODEL:
            raise TypeError("name() or get_config() says no model")
        telling = _telling(config)
        which = next((telling.pop(key) for key in _MODEL_KEYS if isinstance(telling.get(key), str)), None)
        urls = [telling.pop(key) for key in _URL_KEYS if key in telling]
        if which is None and not any(key in telling for key in _MODEL_KEYS) and urls:
            which = _without_credentials(str(urls[0]))
        # Shown as a short digest only: a secret under an innocent name shall not come out again.
        said = json.dumps(telling, sort_keys=True)
    except Exception as exc:  # foreign code, which may raise anything
        raise ConfigurationError(
            f"{_class_of(function)} does not say which model it is, by its name() and get_config(); name it: "
            'ChromaFunctionEmbedder(function, model="…")'
        ) from exc
    model = "/".join(["chroma", name] if which is None else ["chroma", name, which])
    if telling:
        model += f"#{hashlib.sha256(said.encode()).hexdigest()[:8]}"
    if len(model) > MAX_IDENTIFIER_CHARACTERS:
        raise ConfigurationError(
            f"{_class_of(function)} has a model's name of {len(model)} characters, {shown(model)}; a vault remembers "
            f'at most {MAX_IDENTIFIER_CHARACTERS}, name it: ChromaFunctionEmbedder(function, model="…")'
        )
    return model


def _telling(value: Any) -> Any:
    """What in a config can change vectors. What is unset counts as absent: a later Chroma may have more of it."""
    if isinstance(value, Mapping):
        kept = {
            key: _telling(item) for key, item in value.items() if key not in _INDIFFERENT and not _secret(key, item)
        }
        return {key: item for key, item in kept.items() if item is not None and item != {}}
    if isinstance(value, list | tuple):
        return [_telling(item) for item in value]
    return value


def _secret(key: object, value: object) -> bool:
    """Whether a setting is one by its name. A number is none: ``max_token`` and its like are limits."""
    words = re.findall("[A-Z]?[a-z]+|[A-Z]+", str(key))
    return not isinstance(value, int | float) and any(word.lower() in _SECRET for word in words)


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def _class_of(function: object) -> str:
    """Not its repr, in which a dataclass would show its key."""
    kind = function if isinstance(function, type) else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"
