"""How is an embedder called? In batches, with a deadline, and its answers held against the protocol."""

from __future__ import annotations

import contextvars
import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from memvault.embedding.base import BATCH_SIZE, Embedder, Matrix, Vector, embed_checked
from memvault.errors import ConfigurationError, EmbeddingError
from memvault.text import shown

T = TypeVar("T")

TIMEOUT_S = 60.0

MAX_HUNG = 8
"""Calls of one embedder that may hang at once. Each keeps a thread for ever; beyond, it is not asked any more."""

Progress = Callable[[int], None]
"""Called with the number of texts embedded so far."""


class EmbedderCalls:
    """Calls one embedder for a vault; raises EmbeddingError whatever goes wrong.

    An embedder that says ``cheap = True`` works in memory and cannot hang: it is called in the caller's own thread.
    """

    def __init__(self, embedder: Embedder, timeout_s: float = TIMEOUT_S) -> None:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ConfigurationError(f"embed_timeout must be a number of seconds above 0, got {shown(timeout_s)}")
        self.embedder = embedder
        self.cheap = getattr(embedder, "cheap", False) is True
        self._timeout_s = timeout_s
        size = getattr(embedder, "batch_size", BATCH_SIZE)
        self._batch_size = size if isinstance(size, int) and size > 0 else BATCH_SIZE
        self._hung: set[threading.Thread] = set()
        self._counting = threading.Lock()

    def documents(self, texts: Sequence[str], progress: Progress | None = None) -> Matrix:
        """(len(texts), dimension) float32 at unit norm."""
        done: list[Matrix] = []
        for first in range(0, len(texts), self._batch_size):
            some = texts[first : first + self._batch_size]
            done.append(embed_checked(self._within_time(self.embedder.embed_documents), some, self.embedder))
            if progress is not None:
                progress(first + len(some))
        if not done:
            return np.empty((0, self.embedder.dimension), np.float32)
        return done[0] if len(done) == 1 else np.concatenate(done)

    def query(self, text: str) -> Vector:
        """(dimension,) float32 at unit norm."""
        vector: Vector = embed_checked(self._within_time(self.embedder.embed_queries), [text], self.embedder)[0]
        return vector

    def dimension(self) -> int:
        """What the embedder says it is, for which it may have to load its model."""
        try:
            loading_s = max(self._timeout_s, getattr(self.embedder, "loading_s", 0.0))
            answer: Any = self._within_time(lambda: self.embedder.dimension, loading_s)()
        except (ConfigurationError, EmbeddingError):
            raise
        except Exception as exc:  # a foreign model may raise anything; whatever it was, it is chained
            raise EmbeddingError(
                f"the embedder {self.embedder.model!r} failed to tell its dimension: {type(exc).__name__}: "
                f"{str(exc)[:200]}"
            ) from exc
        if isinstance(answer, bool) or not isinstance(answer, int | np.integer) or answer < 1:
            raise ConfigurationError(f"the embedder's dimension must be an int of at least 1, got {shown(answer)}")
        return int(answer)

    def _within_time(self, call: Callable[..., T], timeout_s: float | None = None) -> Callable[..., T]:
        """The call, on a thread that can be left behind: nothing else ends one that hangs."""
        if self.cheap:
            return call
        limit = self._timeout_s if timeout_s is None else timeout_s

        def bounded(*arguments: Any) -> T:
            if (hung := self._hanging()) >= MAX_HUNG:
                raise EmbeddingError(
                    f"{hung} calls of the embedder {self.embedder.model!r} hang; it is asked no more until one returns"
                )
            outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
            context = contextvars.copy_context()

            def run() -> None:
                try:
                    outcome.put((True, context.run(call, *arguments)))
                except BaseException as exc:  # noqa: BLE001 - raised where the call is waited for
                    outcome.put((False, exc))

            # A daemon: the interpreter does not wait for it when it exits.
            thread = threading.Thread(target=run, name="memvault-embedder", daemon=True)
            thread.start()
            try:
                succeeded, value = outcome.get(timeout=limit)
            except queue.Empty:
                self._hanging(thread)
                raise EmbeddingError(
                    f"the embedder {self.embedder.model!r} has not answered within {limit:g} s; raise "
                    "embed_timeout, or lower its batch_size"
                ) from None
            if not succeeded:
                raise value
            answer: T = value
            return answer

        return bounded

    def _hanging(self, *more: threading.Thread) -> int:
        """How many calls hang, with these."""
        with self._counting:
            self._hung = {thread for thread in (*self._hung, *more) if thread.is_alive()}
            return len(self._hung)
