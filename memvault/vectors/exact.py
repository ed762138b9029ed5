"""How are nearest vectors found without an index? A product with all of the user's, sorted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Select, Table, func, select

from memvault.database.batches import batches
from memvault.database.transactions import Database
from memvault.database.unit import Unit
from memvault.database.where import compile_where
from memvault.embedding.base import Matrix, Vector
from memvault.errors import IndexMismatchError
from memvault.filters import EVERYTHING, Filter
from memvault.vectors.base import DECIMALS, IndexSpec, RecordMetadata, ScannedRecord, VectorMatch, VectorRecord
from memvault.vectors.canonical import CONTENT, VECTORS, load_vectors

_SCALE = 10.0**DECIMALS


def similarities(matrix: Matrix, vector: Vector) -> NDArray[np.float64]:
    """Cosines of the rows of a matrix (n, dimension) with a vector (dimension,), all at unit norm."""
    return np.clip(np.round((matrix @ vector).astype(np.float64), DECIMALS), -1.0, 1.0)


def best(ids: Sequence[str], scores: NDArray[np.float64], count: int) -> list[VectorMatch]:
    """The ``count`` best of the scored ids, best first, ties by id. ``ids`` may go on beyond the scores."""
    if count < len(scores):
        threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
        candidates = np.flatnonzero(scores >= threshold).tolist()
    else:
        candidates = list(range(len(scores)))
    ranked = sorted((-float(scores[place]), ids[place]) for place in candidates)
    return [VectorMatch(chunk_id, -negated) for negated, chunk_id in ranked[:count]]


def nearest(ids: Sequence[str], matrix: Matrix, vector: Vector, count: int) -> list[VectorMatch]:
    """As `best` of `similarities`, in less time: only those are rounded that may be among the best."""
    raw = matrix @ vector
    if count < len(raw):
        last = np.partition(raw, len(raw) - count)[len(raw) - count]
        places = np.flatnonzero(raw >= last - 2 * 10.0**-DECIMALS)
    else:
        places = np.arange(len(raw))
    # In plain Python, for a dozen, with the very operations of `np.round`: 0.02 ms of a search of half a millisecond.
    ranked = sorted(
        (-min(1.0, max(-1.0, round(score * _SCALE) / _SCALE)), ids[place])
        for place, score in zip(places.tolist(), raw[places].tolist(), strict=True)
    )
    return [VectorMatch(chunk_id, -negated) for negated, chunk_id in ranked[:count]]


def search_all(unit: Unit, spec: IndexSpec, chunks: Table, vector: Vector, k: int, where: Filter) -> list[VectorMatch]:
    """The user's ``k`` nearest under the filter, by a product with all of their vectors in SQL."""
    ids, matrix = load_vectors(unit, spec.model, spec.dimension)
    if where is not EVERYTHING:
        statement = unit.select(chunks.c.id, frm=chunks).where(compile_where(where, chunks))
        allowed = set(unit.execute(statement).scalars())
        kept = [place for place, chunk_id in enumerate(ids) if chunk_id in allowed]
        ids, matrix = [ids[place] for place in kept], matrix[kept]
    return best(ids, similarities(matrix, vector), k)


class ExactIndex:
    """No index at all: every query is a product with the user's vectors in SQL. Nothing to build, keep or lose."""

    location = "exact"
    transactional = True

    def __init__(self, database: Database, chunks: Table) -> None:
        """``chunks``: the table whose columns the records' metadata are."""
        self._database = database
        self._chunks = chunks
        self._joined = VECTORS.join(chunks, VECTORS.c.chunk_id == chunks.c.id)
        self._spec: IndexSpec | None = None

    @property
    def spec(self) -> IndexSpec | None:
        return self._spec

    def open(self, spec: IndexSpec) -> bool:
        with self._database.reading() as connection:
            foreign = connection.execute(
                select(VECTORS.c.dimension).where(VECTORS.c.model == spec.model, VECTORS.c.dimension != spec.dimension)
            ).first()
        if foreign is not None:
            raise IndexMismatchError(
                f"the vault holds vectors of dimension {foreign.dimension} for {spec.model!r}, not {spec.dimension}"
            )
        self._spec = spec
        return True

    def create(self) -> None:
        """Nothing to do: the vectors in SQL are the index."""

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        """Nothing to do: who wrote the vectors to SQL has written them here."""

    def delete(self, ids: Sequence[str]) -> None:
        """Nothing to do, as for `upsert`."""

    def query(self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING) -> list[VectorMatch]:
        spec = self._opened()
        with self._database.reading() as connection:
            return search_all(Unit(connection, user_id), spec, self._chunks, vector, k, where)

    def scan(self, batch: int = 1000) -> Iterator[list[ScannedRecord]]:
        last = -1
        while True:
            page = self._records().where(VECTORS.c.id > last).order_by(VECTORS.c.id).limit(batch)
            with self._database.reading() as connection:
                rows = connection.execute(page).all()
            if not rows:
                return
            yield [_scanned(row) for row in rows]
            last = rows[-1].place

    def fetch(self, ids: Sequence[str]) -> list[ScannedRecord]:
        statement = self._records()
        records: list[ScannedRecord] = []
        with self._database.reading() as connection:
            for some in batches(dict.fromkeys(ids)):
                found = connection.execute(statement.where(VECTORS.c.chunk_id.in_(some)))
                records += [_scanned(row) for row in found]
        return records

    def count(self, user_id: str | None = None) -> int:
        spec = self._opened()
        with self._database.reading() as connection:
            statement = select(func.count()).select_from(VECTORS)
            if user_id is not None:
                statement = Unit(connection, user_id).select(func.count(), frm=VECTORS)
            statement = statement.where(VECTORS.c.model == spec.model, VECTORS.c.field == CONTENT)
            return connection.execute(statement).scalar_one()

    def purge(self) -> None:
        """Nothing to do: SQL's vectors are the truth, not a copy."""

    def close(self) -> None:
        """Nothing to do: the engine is the storage layer's."""

    def _records(self) -> Select[Any]:
        spec = self._opened()
        columns = [self._chunks.c[name] for name in RecordMetadata.__dataclass_fields__]
        statement = select(VECTORS.c.id.label("place"), VECTORS.c.chunk_id, VECTORS.c.vector, *columns)
        return statement.select_from(self._joined).where(VECTORS.c.model == spec.model, VECTORS.c.field == CONTENT)

    def _opened(self) -> IndexSpec:
        if self._spec is None:
            raise IndexMismatchError("the exact index was not opened")
        return self._spec


def _scanned(row: Any) -> ScannedRecord:
    metadata = RecordMetadata(**{name: row._mapping[name] for name in RecordMetadata.__dataclass_fields__})
    return ScannedRecord(row.chunk_id, row.user_id, metadata, np.frombuffer(row.vector, dtype="<f4"))
