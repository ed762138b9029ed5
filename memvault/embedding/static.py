"""Which embedder works with nothing but pip? Static word vectors (wordllama), from its own wheel."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from memvault.embedding.base import Matrix
from memvault.errors import MissingDependencyError

PADDED_CHARACTERS = 100_000
"""Of a batch: about 25,000 tokens of 1 kB each."""


class StaticEmbedder:
    """wordllama's l2_supercat at 256 dimensions: token vectors, averaged; 12,000 short texts a second on two cores.

    The weights are in wordllama's wheel: nothing is downloaded, and loading (half a second) waits for the first text.
    """

    model = "wordllama/l2_supercat-256"
    dimension = 256
    batch_size = 5000  # it groups texts of similar length itself, the better the more it has
    cheap = True

    def __init__(self) -> None:
        self._loading = threading.Lock()
        self._model: Any = None

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        model = self._loaded()
        vectors = np.empty((len(texts), self.dimension), np.float32)
        for places in _groups(texts):
            vectors[places] = model.embed([texts[place] for place in places], norm=False)
        normed: Matrix = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return normed

    def embed_queries(self, texts: Sequence[str]) -> Matrix:
        return self.embed_documents(texts)

    def _loaded(self) -> Any:
        with self._loading:
            if self._model is None:
                try:
                    with _root_logger_configured():
                        import wordllama
                except ImportError as exc:  # pragma: no cover - a core dependency, yet it can be uninstalled
                    raise MissingDependencyError("the static embedder needs wordllama: pip install wordllama") from exc
                # The package's own folder as cache is where the wheel's weights lie: no look-up, no download.
                self._model = wordllama.WordLlama.load(
                    cache_dir=Path(wordllama.__file__).parent, dim=self.dimension, disable_download=True
                )
            return self._model


@contextmanager
def _root_logger_configured() -> Iterator[None]:
    """wordllama calls logging.basicConfig as it is imported; where the root logger has a handler, that does nothing."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _groups(texts: Sequence[str]) -> Iterator[list[int]]:
    """Places of texts of similar length: wordllama pads a batch to its longest, which one long text makes gigabytes."""
    group: list[int] = []
    for place in sorted(range(len(texts)), key=lambda place: len(texts[place])):
        if group and len(texts[place]) * (len(group) + 1) > PADDED_CHARACTERS:
            yield group
            group = []
        group.append(place)
    if group:
        yield group
