"""What stands around an index under test? What it needs there, and the tests' own record of what it holds."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, Table, insert

from memvault.database.bulk import upsert
from memvault.database.transactions import Database
from memvault.database.unit import Unit
from memvault.embedding.base import Vector
from memvault.filters import EVERYTHING, Filter
from memvault.memory.chunk_table import CHUNKS
from memvault.memory.drafts import hash_content
from memvault.memory.sessions import SESSIONS
from memvault.vectors import canonical
from memvault.vectors.base import IndexSpec, RecordMetadata, VectorIndex, VectorMatch, VectorRecord
from memvault.vectors.chroma import ChromaIndex
from memvault.vectors.chroma_server import ChromaServerIndex
from memvault.vectors.outbox import INDEXES
from tests.support import TOLERANCE, passes, unit_vectors

DIMENSION = 16
SPEC = IndexSpec(vault_id="8c1f4e5b2a97", model="tests/random-16", dimension=DIMENSION)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class IndexWorld(ABC):
    """An index under test. Tests write by `put` and `remove`, and compare its answers with ``records``."""

    index: VectorIndex
    slowness = 1
    """Of thousands of records, how many times fewer a test writes: a server takes a millisecond and more for each."""

    def __init__(self) -> None:
        self.records: dict[str, VectorRecord] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def fresh(self) -> VectorIndex:
        """Another index object for the same place, as a later process would make it: not opened."""

    @abstractmethod
    def before_put(self, records: Sequence[VectorRecord]) -> None:
        """Write to SQL what a transactional index wants there before it is told of records."""

    @abstractmethod
    def before_remove(self, ids: Sequence[str]) -> None:
        """Delete from SQL what a transactional index wants gone before it is told so."""

    def put(self, records: Sequence[VectorRecord]) -> None:
        self.before_put(records)
        self.index.upsert(records)
        with self._lock:
            self.records.update((record.id, record) for record in records)

    def fill(self, records: Sequence[VectorRecord]) -> None:
        """As `put`, into an empty index, and many records."""
        self.put(records)

    def remove(self, ids: Sequence[str]) -> None:
        self.before_remove(ids)
        self.index.delete(ids)
        with self._lock:
            for id in ids:
                self.records.pop(id, None)

    def reopen(self) -> None:
        self.index.close()
        self.index = self.fresh()
        assert self.index.open(SPEC)

    def purge(self) -> None:
        self.before_remove(list(self.records))
        self.index.purge()
        self.records.clear()

    def close(self) -> None:
        self.index.close()

    def of_user(self, user_id: str, where: Filter = EVERYTHING) -> list[VectorRecord]:
        """By the record alone: the user's records that pass a filter."""
        theirs = (record for record in self.records.values() if record.metadata.user_id == user_id)
        return [record for record in theirs if passes(where, vars(record.metadata))]

    def check(
        self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING, *, recall: float = 1.0
    ) -> list[VectorMatch]:
        """Ask the index, and hold its answer against brute force over the record. ``recall``: the least allowed."""
        matches = self.index.query(user_id, vector, k, where)
        theirs = self.of_user(user_id, where)
        true = dict(zip((record.id for record in theirs), similarities(theirs, vector), strict=True))
        ids = [match.id for match in matches]
        assert len(ids) == len(set(ids)) == min(k, len(true)), where
        assert set(ids) <= set(true), where
        for match in matches:
            assert -1 <= match.similarity <= 1
            assert abs(match.similarity - true[match.id]) < TOLERANCE, where
        assert matches == sorted(matches, key=lambda match: (-match.similarity, match.id))
        if ids:
            last = np.sort(np.array(list(true.values())))[::-1][: len(ids)][-1]
            nearest = {id for id, similarity in true.items() if similarity > last + TOLERANCE}
            assert len(nearest & set(ids)) >= recall * len(nearest), where
            good = sum(true[id] > last - TOLERANCE for id in ids)
            assert good >= recall * len(ids), where
        return matches


def similarities(records: Sequence[VectorRecord], vector: Vector) -> NDArray[np.float64]:
    matrix = np.array([record.vector for record in records], np.float64).reshape(len(records), vector.size)
    cosines: NDArray[np.float64] = matrix @ vector / (np.linalg.norm(matrix, axis=1) * np.linalg.norm(vector))
    return cosines


class ChromaWorld(IndexWorld):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.index: VectorIndex = self.fresh()
        assert not self.index.open(SPEC)
        self.index.create()

    def fresh(self) -> ChromaIndex:
        return ChromaIndex(self.directory)

    def before_put(self, records: Sequence[VectorRecord]) -> None:
        pass

    def before_remove(self, ids: Sequence[str]) -> None:
        pass


class ChromaServerWorld(IndexWorld):
    """A Chroma database of its own, on a server that tests share."""

    slowness = 4

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.index: VectorIndex = self.fresh()
        assert not self.index.open(SPEC)
        self.index.create()

    def fresh(self) -> ChromaServerIndex:
        return ChromaServerIndex(self.url)

    def before_put(self, records: Sequence[VectorRecord]) -> None:
        pass

    def before_remove(self, ids: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        self.index.open(SPEC)
        self.index.purge()  # the server would keep it, in memory too, for all tests to come
        super().close()


class SqlWorld(IndexWorld):
    """An index in the database: chunks and vectors are written there first, by the function that the stores use."""

    def __init__(
        self, engine: Engine, make: Callable[[Database, Table], VectorIndex], *, spec: IndexSpec = SPEC
    ) -> None:
        super().__init__()
        self.engine = engine
        self.database = Database(engine)
        self._make = make
        if engine.dialect.name == "postgresql":
            self.slowness = 3
        with self.database.writing() as connection:
            connection.execute(
                insert(INDEXES).values(
                    spec="tests", model=spec.model, dimension=spec.dimension, transactional=True, state="live",
                    created_at=NOON,
                )
            )  # fmt: skip
        self.index: VectorIndex = self.fresh()
        self.index.open(spec)
        self.index.create()

    def fill(self, records: Sequence[VectorRecord]) -> None:
        self.index.purge()
        self.before_put(records)
        self.index.create()
        self.records.update((record.id, record) for record in records)

    def fresh(self) -> VectorIndex:
        return self._make(self.database, CHUNKS)

    def close(self) -> None:
        super().close()
        self.engine.dispose()

    def before_put(self, records: Sequence[VectorRecord]) -> None:
        for user_id, theirs in by_user(records):
            with self.database.writing() as connection:
                unit = Unit(connection, user_id)
                unit.lock_owner()
                self.write(unit, theirs)

    def write(self, unit: Unit, records: Sequence[VectorRecord]) -> None:
        """Write chunks and vectors of the unit's user, and no index."""
        unit.insert_new(SESSIONS, [_session(id) for id in {record.metadata.session_id for record in records}])
        _upsert_chunks(unit.connection, records)
        vectors = [canonical.ChunkVector(record.id, hash_content(record.document), record.vector) for record in records]
        canonical.apply(unit, put=vectors)
        unit.save_owner()

    def before_remove(self, ids: Sequence[str]) -> None:
        for user_id, theirs in by_user(self.records[id] for id in set(ids) & set(self.records)):
            with self.database.writing() as connection:
                unit = Unit(connection, user_id)
                unit.lock_owner()
                canonical.apply(unit, dropped=[record.id for record in theirs])
                for record in theirs:
                    connection.execute(CHUNKS.delete().where(CHUNKS.c.id == record.id))
                unit.save_owner()


def by_user(records: Iterable[VectorRecord]) -> list[tuple[str, list[VectorRecord]]]:
    def owner(record: VectorRecord) -> str:
        return record.metadata.user_id

    return [(user_id, list(theirs)) for user_id, theirs in groupby(sorted(records, key=owner), owner)]


def _session(id: str) -> dict[str, object]:
    return {
        "id": id, "started_at": NOON, "last_activity": NOON, "ended_at": None, "compressed": False,
        "memory_count": 0, "total_tokens": 0,
    }  # fmt: skip


def _upsert_chunks(connection: Connection, records: Sequence[VectorRecord]) -> None:
    statement = upsert(connection, CHUNKS)
    names = ["user_id", "session_id", "memory_type", "importance", "compressed", "created_at", "content"]
    statement = statement.on_conflict_do_update(
        index_elements=["id"], set_={name: statement.excluded[name] for name in names}
    )
    rows = [
        {
            "id": record.id, "content": record.document, "token_count": 1, "updated_at": NOON, "metadata": {},
            "version": 1, **vars(record.metadata),
        }
        for record in records
    ]  # fmt: skip
    connection.execute(statement, rows)


def make_record(
    id: str,
    vector: Vector,
    user_id: str = "user_alice",
    *,
    document: str = "a memory",
    session_id: str = "sess_1",
    memory_type: str = "episodic",
    importance: float = 0.5,
    compressed: bool = False,
    created_at: datetime = NOON,
) -> VectorRecord:
    metadata = RecordMetadata(user_id, session_id, memory_type, importance, compressed, created_at)
    return VectorRecord(id, vector, document, metadata)


def make_records(count: int, user_id: str = "user_alice", *, prefix: str = "mem", seed: int = 1) -> list[VectorRecord]:
    """Records in random directions, alike but for their ids."""
    return [
        make_record(f"{prefix}_{place}", vector, user_id, document=f"{user_id} remembers {place}")
        for place, vector in enumerate(unit_vectors(count, DIMENSION, seed))
    ]


def direction(seed: int = 99) -> Vector:
    vector: Vector = unit_vectors(1, DIMENSION, seed)[0]
    return vector
