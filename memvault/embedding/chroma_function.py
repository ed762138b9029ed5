"""How does one of Chroma's embedding functions serve a vault? By the name and the settings that it gives of itself."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from memvault.embedding.base import Matrix
from memvault.embedding.function import FunctionEmbedder
from memvault.errors import ConfigurationError
from memvault.text import MAX_IDENTIFIER_CHARACTERS, shown

BATCH_SIZE = 96
"""Texts a call: the fewest that one of the services behind Chroma's functions takes in a request (Cohere's)."""

_MODEL = ("model_name", "model", "deployment_id")
_PLACE = ("api_base", "api_url", "url", "embedding_function_class")
_MATTERS = (
    *_MODEL,
    "checkpoint",
    "default_prompt_name",
    "dimension",
    "dimensions",
    "embedding_type",
    "input_type",
    "instruction",
    "instructions",
    "late_chunking",
    "prompts",
    "revision",
    "task",
    "task_type",
    "truncate",
    "truncate_dim",
    "truncation",
)
"""Settings that change vectors. No others are remembered: among them are keys, headers and addresses with passwords."""


def is_chroma_function(value: object) -> bool:
    """Whether this is an embedding function of Chroma's, by descent or by what it has. Loads no chromadb."""
    if any(_is_chroma(base, "EmbeddingFunction") for base in type(value).__mro__):
        return True
    named = callable(value) and callable(getattr(value, "name", None)) and callable(getattr(value, "get_config", None))
    return named and not any(_is_chroma(base, "SparseEmbeddingFunction") for base in type(value).__mro__)


class ChromaFunctionEmbedder(FunctionEmbedder):
    """An embedding function of Chroma's (`chromadb.utils.embedding_functions`, or a class of your own).

    ``model`` None: made of the function's `name()` and those of its settings that change vectors. ``dimension`` None:
    one text is embedded to learn it. Queries go to its `embed_query`, where it has one. Raises ConfigurationError
    where the function does not say which model it is.
    """

    def __init__(
        self, function: Any, *, model: str | None = None, dimension: int | None = None, batch_size: int = BATCH_SIZE
    ) -> None:
        if isinstance(function, type) or not callable(function):
            raise ConfigurationError(f"function must be an embedding function of Chroma's, got {shown(function)}")
        super().__init__(
            function, model=model or _model_of(function), dimension=dimension, batch_size=batch_size
        )
        self._embed_query = getattr(function, "embed_query", function)

    def embed_queries(self, texts: Sequence[str]) -> Matrix:
        answer: Matrix = self._embed_query(list(texts))
        return answer


def _is_chroma(base: type, name: str) -> bool:
    return base.__name__ == name and base.__module__.partition(".")[0] == "chromadb"


def _model_of(function: Any) -> str:
    kind = type(function).__qualname__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of functions from before Chroma asked for names
        try:
            name, config = function.name(), function.get_config()
        except Exception as exc:  # a foreign class: whatever it was, it is chained
            raise _nameless(kind, "its name() or get_config() failed") from exc
    if not isinstance(name, str) or not isinstance(config, Mapping):
        raise _nameless(kind, "it has no name() or no get_config()")
    said = _settings(config)
    models = [said.pop(key) for key in _MODEL if key in said]
    if not models and any(key in config for key in _PLACE):
        raise _nameless(kind, "its settings tell where a model runs, and not which it is")
    rest = "&".join(f"{key}={value}" for key, value in sorted(said.items()))
    model = "/".join(["chroma", name, *models]) + (f"?{rest}" if rest else "")
    if len(model) <= MAX_IDENTIFIER_CHARACTERS:
        return model
    digest = hashlib.sha256(model.encode("utf-8", "replace")).hexdigest()
    return f"{model[: MAX_IDENTIFIER_CHARACTERS - 65]}#{digest}"


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Those that matter; ``kwargs`` are passed on to the model, and are settings, too."""
    kwargs = config.get("kwargs")
    all_of_them = {**(kwargs if isinstance(kwargs, Mapping) else {}), **config}
    return {key: str(all_of_them[key]) for key in _MATTERS if all_of_them.get(key) is not None}


def _nameless(kind: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the embedding function {kind} does not tell its model ({why}); name it, for the vault to remember: "
        'ChromaFunctionEmbedder(function, model="…") of memvault.embedding.chroma_function'
    )
