"""Is the index true? It is compared with SQL both ways, while others read and write, and what differs is owed to it.

A difference counts only where it cannot be a change under way: SQL is read before and after the index, and must have
said the same both times, and that nothing is owed. What is found is owed to the index, never written by the doctor
itself: the payer, which reads the committed state, cannot lose a race against a writer. An index in the database is
made equal under the owner's lock, as by any write.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, func, select

from memvault.database.batches import batches
from memvault.database.transactions import Database
from memvault.database.unit import Unit
from memvault.indexing.diagnosis import BATCH, Diagnosis, Finding
from memvault.memory.chunk_table import CHUNKS
from memvault.vectors.base import ApproximateIndex, RecordMetadata, ScannedRecord, TransactionalIndex, VectorIndex
from memvault.vectors.canonical import CONTENT, VECTORS
from memvault.vectors.outbox import OUTBOX, LiveIndex, owe

LOOKS = 3
LOOK_PAUSE_S = 0.2
"""How often, and after which pause, what differs is looked at again where it was being written meanwhile. What is
still changing then is owed, or was, and is the payer's business."""

VECTOR_TOLERANCE = 1e-4
"""Between elements of unit vectors: what an index may round; half precision would be off by 5e-4."""

IMPORTANCE_TOLERANCE = 1e-9
"""Chroma gives the last of 16 digits back changed."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _State:
    """What SQL says of a chunk with a vector; ``epoch`` and ``version`` tell a change that was taken back."""

    metadata: RecordMetadata
    content: str
    vector: bytes
    epoch: int
    version: int


_METADATA = [CHUNKS.c[one.name] for one in fields(RecordMetadata)]
_STATES = select(
    CHUNKS.c.id, CHUNKS.c.content, VECTORS.c.vector, VECTORS.c.epoch, CHUNKS.c.version, *_METADATA
).select_from(CHUNKS.join(VECTORS, VECTORS.c.chunk_id == CHUNKS.c.id))


class Doctor:
    """Examines one vault's live index. It holds no transaction open between two batches."""

    def __init__(
        self, database: Database, row: LiveIndex, index: VectorIndex, diagnosis: Diagnosis, *, repair: bool
    ) -> None:
        """``index``: open in this process. ``repair``: owe the index whatever it has not got right."""
        self._database = database
        self._row = row
        self._index = index
        self._repair = repair
        self._seen = _Ids()
        self.diagnosis = diagnosis

    def examine(self, progress: Progress | None = None) -> None:
        """Compare all of it. ``progress`` is called with (done, total) records, SQL's and the index's together.

        Raises VectorIndexError where the index cannot be read.
        """
        with self._database.reading() as connection:
            expected = connection.execute(
                select(func.count()).select_from(VECTORS).where(VECTORS.c.model == self._row.model)
            ).scalar_one()
        total, done = expected + self._index.count(), 0
        for some in self._steps():
            done += some
            if progress is not None:
                progress(done, max(done, total))

    def _steps(self) -> Iterator[int]:
        """First what the index has, then what it has not; yields how many records were looked at."""
        for records in self._index.scan(BATCH):
            self.diagnosis.compared += len(records)
            self._seen.add([record.id for record in records])
            states, _ = self._read([record.id for record in records])
            self._examine_again(
                [
                    *(record.id for record in records if _differs(record, states.get(record.id))),
                    *self._unfindable([record.id for record in records]),
                ]
            )
            yield len(records)
        for ids in self._ids_in_sql():
            self._examine_again(self._seen.lacking(ids))
            yield len(ids)

    def _examine_again(self, ids: Sequence[str]) -> None:
        """Find out what is the matter with these, unless somebody is just changing them."""
        remaining = list(dict.fromkeys(ids))
        for look in range(LOOKS):
            if not remaining:
                return
            if look:
                time.sleep(LOOK_PAUSE_S)
            before, owed = self._read(remaining)
            records = {record.id: record for record in self._index.fetch(remaining)}
            lost = set(self._unfindable(remaining))
            after, owed_since = self._read(remaining)
            unpaid = owed | owed_since | self._without_vector(remaining)
            settled = [id for id in remaining if id not in unpaid and before.get(id) == after.get(id)]
            wrong: dict[str, str] = {}
            for id in settled:
                state, record = after.get(id), records.get(id)
                if (finding := "unfindable" if id in lost and state else _differs(record, state)) is not None:
                    self.diagnosis.note(finding, id)
                    wrong[id] = state.metadata.user_id if state else record.user_id if record else ""
            if wrong and self._repair:
                self._mend(wrong)
            unsettled = set(remaining) - set(settled)
            remaining = [id for id in remaining if id in unsettled]

    def _mend(self, wrong: Mapping[str, str]) -> None:
        """``wrong``: the owner of each chunk, as SQL has it, or the index where SQL has none."""
        if isinstance(self._index, TransactionalIndex):
            by_owner: dict[str, list[str]] = defaultdict(list)
            for id, user_id in wrong.items():
                by_owner[user_id].append(id)
            for user_id, ids in sorted(by_owner.items()):
                with self._database.writing() as connection:
                    self._make_equal(connection, self._index, user_id, ids)
        elif not self._row.transactional:
            with self._database.writing() as connection:
                owe(connection, self._row.id, wrong)
        else:
            return  # SQL itself, which is the index
        self.diagnosis.owed += len(wrong)

    def _make_equal(self, connection: Connection, index: TransactionalIndex, user_id: str, ids: Sequence[str]) -> None:
        unit = Unit(connection, user_id)
        unit.lock_known_owner()  # nobody changes these meanwhile
        states = _states(connection, self._row.model, ids)
        theirs: dict[str, NDArray[np.float32] | None] = {}
        for id in ids:
            if (state := states.get(id)) is None:
                theirs[id] = None
            elif state.metadata.user_id == user_id:
                theirs[id] = np.frombuffer(state.vector, "<f4")
        index.follow(connection, user_id, theirs)

    def _unfindable(self, ids: Sequence[str]) -> list[str]:
        return self._index.unfindable(ids) if isinstance(self._index, ApproximateIndex) else []

    def _read(self, ids: Sequence[str]) -> tuple[dict[str, _State], set[str]]:
        """What SQL says of the chunks, and which of them are owed, at one moment."""
        with self._database.reading() as connection:
            return _states(connection, self._row.model, ids), _owed(connection, self._row.id, ids)

    def _without_vector(self, ids: Sequence[str]) -> set[str]:
        """Chunks whose vector SQL has lost: that is no reason to remove what may be the last copy of it."""
        lost: set[str] = set()
        joined = CHUNKS.outerjoin(VECTORS, (VECTORS.c.chunk_id == CHUNKS.c.id) & (VECTORS.c.model == self._row.model))
        statement = select(CHUNKS.c.id).select_from(joined)
        statement = statement.where(CHUNKS.c.chroma_id.is_not(None), VECTORS.c.id.is_(None))
        with self._database.reading() as connection:
            for some in batches(ids):
                lost.update(connection.execute(statement.where(CHUNKS.c.id.in_(some))).scalars())
        return lost

    def _ids_in_sql(self) -> Iterator[list[str]]:
        last = -1
        statement = select(VECTORS.c.id, VECTORS.c.chunk_id).order_by(VECTORS.c.id).limit(BATCH)
        statement = statement.where(VECTORS.c.model == self._row.model, VECTORS.c.field == CONTENT)
        while True:
            with self._database.reading() as connection:
                rows = connection.execute(statement.where(VECTORS.c.id > last)).all()
            if not rows:
                return
            yield [row.chunk_id for row in rows]
            last = rows[-1].id


class _Ids:
    """A set of ids that takes eight bytes of each: 100,000 of them as str would take ten megabytes.

    Two of a million ids have the same 64 bits with odds of 1 to 37 million; one that is missing would be overlooked.
    """

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int64]] = []
        self._sorted: NDArray[np.int64] | None = None

    def add(self, ids: Sequence[str]) -> None:
        self._parts.append(_digests(ids))
        self._sorted = None

    def lacking(self, ids: Sequence[str]) -> list[str]:
        """Those that were not added."""
        if self._sorted is None:
            self._sorted = np.sort(np.concatenate([np.empty(0, np.int64), *self._parts]))
            self._parts = [self._sorted]
        if self._sorted.size == 0:
            return list(ids)
        digests = _digests(ids)
        places = np.minimum(np.searchsorted(self._sorted, digests), self._sorted.size - 1)
        return [id for id, there in zip(ids, (self._sorted[places] == digests).tolist(), strict=True) if not there]


def _digests(ids: Sequence[str]) -> NDArray[np.int64]:
    # Python's own hash of a str: 64 bits, keyed anew in each process, so that nobody can make two ids collide.
    return np.fromiter(map(hash, ids), np.int64, len(ids))


def _states(connection: Connection, model: str, ids: Sequence[str]) -> dict[str, _State]:
    found: dict[str, _State] = {}
    for some in batches(ids):
        statement = _STATES.where(CHUNKS.c.id.in_(some), VECTORS.c.model == model, VECTORS.c.field == CONTENT)
        for id, content, vector, epoch, version, *metadata in connection.execute(statement):
            found[id] = _State(RecordMetadata(*metadata), content, bytes(vector), epoch, version)
    return found


def _owed(connection: Connection, index_id: int, ids: Sequence[str]) -> set[str]:
    owed: set[str] = set()
    for some in batches(ids):
        statement = select(OUTBOX.c.chunk_id).where(OUTBOX.c.index_id == index_id, OUTBOX.c.chunk_id.in_(some))
        owed.update(connection.execute(statement).scalars())
    return owed


def _differs(record: ScannedRecord | None, state: _State | None) -> Finding | None:
    """What is wrong with a record, if anything."""
    if state is None:
        return None if record is None else "orphaned"
    if record is None:
        return "missing"
    if record.user_id != state.metadata.user_id:
        return "foreign"
    vector = np.frombuffer(state.vector, "<f4")
    if record.vector.shape != vector.shape:
        return "mismatched"
    same_text = record.document in (None, state.content)
    same_vector = bool(np.abs(record.vector - vector).max() <= VECTOR_TOLERANCE)  # NaN is no such
    return None if same_text and same_vector and _same(record.metadata, state.metadata) else "stale"


def _same(there: RecordMetadata | None, here: RecordMetadata) -> bool:
    return (
        there is not None
        and abs(there.importance - here.importance) <= IMPORTANCE_TOLERANCE
        and all(
            getattr(there, one.name) == getattr(here, one.name)
            for one in fields(RecordMetadata)
            if one.name != "importance"
        )
    )
