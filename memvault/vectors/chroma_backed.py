"""What is the same for embedded Chroma and a server? All that is asked of the collection, once it is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memvault.embedding.base import Vector
from memvault.errors import VectorIndexError
from memvault.filters import EVERYTHING, Filter
from memvault.vectors.base import IndexSpec, ScannedRecord, VectorMatch, VectorRecord
from memvault.vectors.chroma_collection import ChromaCollection


class ChromaBacked:
    """An index that is a collection somewhere; who derives from it finds, makes and removes the collection."""

    transactional = False

    def __init__(self, place: str) -> None:
        """``place``: the directory or server, as errors name it."""
        self._place = place
        self._spec: IndexSpec | None = None
        self._collection: ChromaCollection | None = None

    @property
    def spec(self) -> IndexSpec | None:
        return self._spec

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        self._opened().upsert(records)

    def delete(self, ids: Sequence[str]) -> None:
        self._opened().delete(ids)

    def query(self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING) -> list[VectorMatch]:
        return self._opened().query(user_id, vector, k, where)

    def scan(self, batch: int = 1000) -> Iterator[list[ScannedRecord]]:
        return self._opened().scan(batch)

    def fetch(self, ids: Sequence[str]) -> list[ScannedRecord]:
        return self._opened().fetch(ids)

    def unfindable(self, ids: Sequence[str]) -> list[str]:
        return self._opened().unfindable(ids)

    def count(self, user_id: str | None = None) -> int:
        return self._opened().count(user_id)

    def _bound(self) -> IndexSpec:
        if self._spec is None:
            raise VectorIndexError(f"the Chroma index in {self._place} is not open")
        return self._spec

    def _opened(self) -> ChromaCollection:
        self._bound()
        if (collection := self._collection) is None:
            raise VectorIndexError(f"the Chroma index in {self._place} was not created yet")
        return collection
