"""How is any function from texts to vectors an embedder?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memvault.embedding.base import Matrix
from memvault.errors import ConfigurationError

PROBE = "memvault"


class FunctionEmbedder:
    """A function that takes a list of texts and returns their vectors, as an array or lists of numbers.

    ``model`` names what it computes, for the vault to remember. ``dimension`` None: one text is embedded to learn it.
    """

    def __init__(self, function: Callable[[list[str]], Any], *, model: str, dimension: int | None = None) -> None:
        if not callable(function):
            raise ConfigurationError(f"function must be callable with a list of texts, got {function!r}")
        self.model = model
        self._function = function
        self._dimension = dimension
        self._probing = threading.Lock()

    @property
    def dimension(self) -> int:
        with self._probing:
            if self._dimension is None:
                answer = np.asarray(self._function([PROBE]))
                if answer.ndim != 2 or len(answer) != 1:
                    raise ConfigurationError(
                        f"the embedder {self.model!r} must answer one vector for each text; for one text it answered "
                        f"shape {answer.shape}"
                    )
                self._dimension = answer.shape[1]
            return self._dimension

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        answer: Matrix = self._function(list(texts))  # held against the protocol by whoever calls
        return answer

    def embed_queries(self, texts: Sequence[str]) -> Matrix:
        return self.embed_documents(texts)


def name_of(function: Callable[..., Any]) -> str:
    """The name that a function can be found by again. Raises ConfigurationError where it has none of its own."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or "<" in name or module == "__main__":
        raise ConfigurationError(
            f"embedder={function!r} has no name that a vault could remember it by; give it one: "
            'FunctionEmbedder(function, model="…")'
        )
    return f"{module}.{name}"
