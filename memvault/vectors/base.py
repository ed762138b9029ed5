"""What must a vector index do?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol, runtime_checkable

from sqlalchemy import Connection

from memvault.embedding.base import Vector
from memvault.filters import EVERYTHING, And, Comparison, Filter, Operator, Or

EQUALITY: tuple[Operator, ...] = ("==", "!=", "in", "not in")
ANY_ORDER: tuple[Operator, ...] = (*EQUALITY, "<", "<=", ">", ">=")

INDEXED: dict[str, tuple[Operator, ...]] = {
    "user_id": EQUALITY,
    "session_id": EQUALITY,
    "memory_type": EQUALITY,
    "importance": ANY_ORDER,
    "compressed": EQUALITY,
    "created_at": ANY_ORDER,
}
"""What every index answers itself: the fields of a record's metadata, and the comparisons on each."""

DECIMALS = 6
"""Similarities that agree to so many decimals are ties, broken by id: float32 sums differ in the seventh by the order
in which they are added, and an answer must not change its order from one call, or one index, to the next."""


@dataclass(frozen=True)
class IndexSpec:
    """Which vault's index this is: what `VectorIndex.open` verifies."""

    vault_id: str
    model: str
    dimension: int


@dataclass(frozen=True)
class RecordMetadata:
    """What an index knows of a chunk beside its vector. Always all of it, and nothing else."""

    user_id: str
    session_id: str
    memory_type: str
    importance: float
    compressed: bool
    created_at: datetime


@dataclass(frozen=True)
class VectorRecord:
    """One chunk as an index holds it: ``vector`` is float32 of shape (dimension,) and unit norm."""

    id: str
    vector: Vector
    document: str
    metadata: RecordMetadata


class VectorMatch(NamedTuple):
    """One answer of a query; ``similarity`` is the cosine, in [-1, 1]."""

    id: str
    similarity: float


@dataclass(frozen=True)
class ScannedRecord:
    """One record as `VectorIndex.scan` found it. ``metadata`` None: it is not what memvault writes.

    Importance may differ from what was written in the last of its 16 digits: Chroma reads it back by way of text.
    """

    id: str
    user_id: str
    metadata: RecordMetadata | None
    vector: Vector
    document: str | None = None
    """The text, in an index that keeps one."""


@runtime_checkable
class VectorIndex(Protocol):
    """Finds the nearest of one user's vectors. It is derived from SQL, never the only copy, and may be dropped.

    Every method may be called by several threads at once. Failures are VectorIndexErrors, chained to the cause:
    IndexMismatchError where the index is not this vault's, IndexOwnershipError where another process owns it.
    """

    @property
    def location(self) -> str:
        """What a vault remembers the index by, and finds it by again: a URL or a name, without secrets."""
        ...

    @property
    def transactional(self) -> bool:
        """Whether writes join the SQL transaction. If so, nothing is ever owed to the index."""
        ...

    @property
    def spec(self) -> IndexSpec | None:
        """As given to `open`; None before."""
        ...

    def open(self, spec: IndexSpec) -> bool:
        """Bind the index to a vault and verify that what is there is cosine, of this vault, model and dimension.

        Never creates anything. False: nothing is there yet, and only `create` may follow. Raises IndexMismatchError.
        """
        ...

    def create(self) -> None:
        """Make the index, empty, for the spec given to `open`. Where it is already there and this vault's: no-op."""
        ...

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        """Make the index hold exactly these records under their ids, whatever was there; batched as it needs."""
        ...

    def delete(self, ids: Sequence[str]) -> None:
        """Remove the records with these ids; those that are absent are no error, an empty sequence is a no-op."""
        ...

    def query(self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING) -> list[VectorMatch]:
        """The user's ``k`` nearest records under the filter, nearest first; fewer where there are fewer.

        ``where`` names only what `INDEXED` lists (see `pushdown`) and holds for every match. Never another user's.
        An approximate index may miss records; it never returns one twice.
        """
        ...

    def scan(self, batch: int = 1000) -> Iterator[list[ScannedRecord]]:
        """Every record of this vault, whoever's, in lists of at most ``batch``; vectors may differ by rounding."""
        ...

    def fetch(self, ids: Sequence[str]) -> list[ScannedRecord]:
        """The records with these ids, whoever's, in any order; those that are absent are left out."""
        ...

    def count(self, user_id: str | None = None) -> int:
        """How many records the vault has in the index, or one user has."""
        ...

    def purge(self) -> None:
        """Remove the index and everything in it; `create` may follow. An absent one is no error."""
        ...

    def close(self) -> None:
        """Release files, locks and connections. Idempotent; nothing else may be called afterwards but `open`."""
        ...


@runtime_checkable
class TransactionalIndex(VectorIndex, Protocol):
    """An index inside the vault's own database, written in the very transactions that change the chunks.

    Nothing is ever owed to it. It keeps vectors alone: filters are answered, within its query, by the chunks' own
    table, so that every filter holds and a change of metadata is none of its business. What is given a ``connection``
    runs in the transaction of the caller, who commits; all else in one of its own.

    `create` also fills it with every vector that SQL holds, while no write is under way: until then writes leave it
    out, and searches are exact.
    """

    def exists(self, connection: Connection) -> bool:
        """Whether it was created, as this transaction sees it. Asked in every write; a fraction of a millisecond."""
        ...

    def follow(self, connection: Connection, user_id: str, vectors: Mapping[str, Vector | None]) -> None:
        """Make the index hold these vectors of one user's chunks, and nothing of the chunks whose vector is None."""
        ...

    def query(
        self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING, connection: Connection | None = None
    ) -> list[VectorMatch]: ...


@dataclass(frozen=True)
class Doubt:
    """What an index holds that may lack what it was given: the ids ``listed``, and those of them that a query does
    not find."""

    listed: Sequence[str]
    unfindable: Sequence[str]


@runtime_checkable
class ApproximateIndex(VectorIndex, Protocol):
    """An index that can hold a record and yet not lead a search to it."""

    def unfindable(self, ids: Sequence[str]) -> list[str]:
        """Those of the records that are there, but cannot be read, or are not found by a search for just them."""
        ...


@runtime_checkable
class SizedIndex(VectorIndex, Protocol):
    """An index in files of its own, which keep what was deleted until they are made anew."""

    def size(self) -> int:
        """Of the files, in bytes."""
        ...


@runtime_checkable
class DoubtfulIndex(VectorIndex, Protocol):
    """An index that a crash of whoever had it open can leave incomplete."""

    doubt: Doubt | None
    """Set by `open` where it found such an end. Whoever has compared it with SQL sets it to None."""


def is_exclusive(index: VectorIndex) -> bool:
    """Whether no other process can write to the index while this one has it open; an index says so by ``exclusive``.

    Of any other, a debt is claimed before it is paid.
    """
    return bool(getattr(index, "exclusive", False))


def pushdown(where: Filter) -> Filter:
    """The strongest filter that every index can apply and that lets all through that ``where`` lets through."""
    if isinstance(where, Comparison):
        allowed = INDEXED.get(where.field, ())
        return where if where.operator in allowed else EVERYTHING
    if isinstance(where, And):
        strongest: Filter = EVERYTHING
        for part in where.parts:
            strongest = strongest & pushdown(part)
        return strongest
    if isinstance(where, Or):
        pushed = [pushdown(part) for part in where.parts]
        if any(part is EVERYTHING for part in pushed):
            return EVERYTHING
        weakest = pushed[0]
        for part in pushed[1:]:
            weakest = weakest | part
        return weakest
    return where
