"""How is any function from texts to vectors an embedder?"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memvault.embedding.base import BATCH_SIZE, Matrix
from memvault.errors import ConfigurationError, EmbeddingError
from memvault.text import shown

PROBE = "memvault"


class FunctionEmbedder:
    """A function that takes a list of texts and returns their vectors, as an array or lists of numbers.

    ``model`` names what it computes, for the vault to remember. ``dimension`` None: one text is embedded to learn it,
    whenever a vault is opened. ``batch_size``: texts that it gets at once.
    """

    def __init__(
        self,
        function: Callable[[list[str]], Any],
        *,
        model: str,
        dimension: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigurationError(f"function must be a plain one from a list of texts, got {shown(function)}")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigurationError(f"batch_size must be an int of at least 1, got {shown(batch_size)}")
        self.model = model
        self.batch_size = batch_size
        self._function = function
        self._dimension = dimension
        self._probing = threading.Lock()

    @property
    def dimension(self) -> int:
        if self._dimension is None:
            with self._probing:
                if self._dimension is None:
                    self._dimension = self._probe()
        return self._dimension

    def _probe(self) -> int:
        answer = np.asarray(self._function([PROBE]))
        if answer.ndim != 2 or len(answer) != 1:
            raise EmbeddingError(
                f"the embedder {self.model!r} must answer one vector for each text; for one text it answered shape "
                f"{answer.shape}"
            )
        return int(answer.shape[1])

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        answer: Matrix = self._function(list(texts))  # held against the protocol by whoever calls
        return answer

    def embed_queries(self, texts: Sequence[str]) -> Matrix:
        return self.embed_documents(texts)


def name_of(function: Callable[..., Any]) -> str:
    """The name that a function can be found by again. Raises ConfigurationError where it has none of its own."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    # A method's name does not say of which object it is, and with it of which model.
    bound = inspect.ismethod(function) and not inspect.isclass(function.__self__)
    if not module or not name or "<" in name or module == "__main__" or bound:
        raise ConfigurationError(
            f"embedder={shown(function)} has no name that a vault could remember it by; give it one: "
            'FunctionEmbedder(function, model="…") of memvault.embedding.function'
        )
    return f"{module}.{name}"
