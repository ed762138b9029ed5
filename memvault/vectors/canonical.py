"""Which vectors does SQL hold, and what follows when a chunk changes?

`apply` is the one function that changes a chunk's vector or state: it writes the vectors, raises the owner's epoch and
records the debts, together, in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Select,
    String,
    UniqueConstraint,
    bindparam,
    false,
    select,
    text,
    update,
)
from sqlmodel import Field

from memvault.database.base import (
    OWNERS,
    Base,
    Owned,
    UtcDateTime,
    big_key,
    identifier,
    table_of,
)
from memvault.database.batches import batches
from memvault.database.bulk import upsert
from memvault.database.postgres import BINARY
from memvault.database.prepared import Prepared
from memvault.database.unit import EPOCHS_PER_OWNER, Unit
from memvault.embedding.base import Matrix, Vector
from memvault.errors import ValidationError
from memvault.vectors.outbox import INDEXES, OUTBOX, LiveIndex, mark

CONTENT = "content"
"""The field of a chunk that a vector was made from; others may follow."""


class MemoryVector(Base, Owned, table=True):
    """An embedding as SQL holds it: little-endian float32 at unit norm, clustered by owner and epoch.

    ``embedded``: the vault's embedder made it of the content alone, so that it serves any equal content of this user.
    """

    __tablename__ = "memory_vectors"
    __table_args__ = (
        UniqueConstraint("chunk_id", "field", "model", name="uq_memory_vectors_chunk"),
        Index("idx_memory_vectors_owner", "user_id", "epoch"),
        Index(
            "idx_memory_vectors_embedded",
            "user_id",
            "content_hash",
            sqlite_where=text("embedded = 1"),
            postgresql_where=text("embedded"),
        ),
    )

    id: int = Field(sa_column=Column(big_key(), primary_key=True, autoincrement=False))
    user_id: str = Field(sa_column=Column(identifier(), nullable=False))
    chunk_id: str = Field(
        sa_column=Column(identifier(), ForeignKey("memory_chunks.id", ondelete="CASCADE"), nullable=False)
    )
    field: str = Field(sa_column=Column(String(32), nullable=False))
    model: str = Field(sa_column=Column(identifier(), nullable=False))
    dimension: int = Field(sa_column=Column(Integer, nullable=False))
    content_hash: str = Field(sa_column=Column(String(64), nullable=False))
    epoch: int = Field(sa_column=Column(BigInteger, nullable=False))
    vector: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    embedded: bool = Field(sa_column=Column(Boolean, nullable=False, server_default=false()))


VECTORS = table_of(MemoryVector)


@dataclass(frozen=True)
class ChunkVector:
    """A chunk's vector to be stored: float32 of unit norm, and the SHA-256 (hex) of the content it was made from."""

    chunk_id: str
    content_hash: str
    vector: Vector
    embedded: bool = False


_IN_USE = select(INDEXES.c.id, INDEXES.c.model, INDEXES.c.dimension, INDEXES.c.transactional, INDEXES.c.state).where(
    INDEXES.c.state != "retired"
)


def apply(
    unit: Unit,
    *,
    put: Sequence[ChunkVector] = (),
    changed: Sequence[str] = (),
    dropped: Sequence[str] = (),
    vectorless: int = 0,
    new: bool = False,
) -> None:
    """Make SQL's vectors follow a change of chunks, and let the indexes know.

    ``put``: chunks with a new vector, whether they had one or not. ``changed``: chunks whose vector stays, but whose
    other indexed columns do not. ``dropped``: chunks that lose their vector. No chunk stands in two of them.
    ``new``: the chunks in ``put`` were inserted in this transaction, and can have no vector yet.
    ``vectorless``: how many chunks changed in nothing that a vector or an index holds: they raise the epoch, too.

    Raises ValidationError where a vector has another dimension than the vault's first one fixed.
    """
    owner = unit.lock_owner()
    owner.next_epochs(vectorless + len(changed))
    indexes = unit.execute(_IN_USE).all()
    live = next(row for row in indexes if row.state == "live")

    replaced = _delete_vectors(unit, [*dropped, *(() if new else (item.chunk_id for item in put))])
    owner.vector_count -= replaced
    owner.next_epochs(replaced, removing=True)
    if put:
        dimension = put[0].vector.size if live.dimension is None else live.dimension
        for item in put:
            if item.vector.size != dimension:
                raise ValidationError(
                    f"embedding must have the vault's dimension {dimension}, got {item.vector.size} "
                    f"(chunk {item.chunk_id!r})"
                )
        if live.dimension is None:
            unit.execute(update(INDEXES).where(INDEXES.c.id == live.id).values(dimension=dimension))
            unit.fixed_dimension = dimension
        unit.insert(
            VECTORS,
            [
                {
                    "id": owner.number * EPOCHS_PER_OWNER + epoch,
                    "chunk_id": item.chunk_id,
                    "field": CONTENT,
                    "model": live.model,
                    "dimension": dimension,
                    "content_hash": item.content_hash,
                    "epoch": epoch,
                    "embedded": item.embedded,
                    "vector": np.asarray(item.vector, "<f4").tobytes(),
                }
                for item, epoch in zip(put, owner.next_epochs(len(put)), strict=True)
            ],
        )
        owner.vector_count += len(put)

    ids = [item.chunk_id for item in put] + list(changed) + list(dropped)
    for row in indexes:
        if row.transactional:
            unit.revectored.update(dict.fromkeys(dropped))
            unit.revectored.update((item.chunk_id, item.vector) for item in put)
        elif put or row.dimension is not None:  # without one it cannot hold anything
            mark(unit.connection, row.id, unit.user_id, ids)
            unit.owed.update(ids)


def mark_all(connection: Connection, index: LiveIndex) -> None:
    """Owe the index every vector of the vault: it is new, or it was lost."""
    source = select(
        bindparam("index_id", index.id, type_=Integer),
        VECTORS.c.chunk_id,
        VECTORS.c.user_id,
        bindparam("generation", 1, type_=BigInteger),
        bindparam("attempts", 0, type_=Integer),
        bindparam("marked_at", datetime.now(UTC), type_=UtcDateTime()),
    ).where(VECTORS.c.model == index.model, VECTORS.c.field == CONTENT)
    columns = ["index_id", "chunk_id", "user_id", "generation", "attempts", "marked_at"]
    statement = upsert(connection, OUTBOX).from_select(columns, source)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["index_id", "chunk_id"],
            set_={"generation": OUTBOX.c.generation + 1, "not_before": None},
        )
    )


@dataclass(frozen=True)
class OwnerState:
    """What a user's vectors are, as one transaction sees them: two that are equal stand for the same vectors."""

    number: int
    incarnation: str
    epoch: int
    removed_epoch: int
    vector_count: int


@dataclass(frozen=True)
class StoredVectors:
    """Vectors as they lie in SQL, in the order in which they were stored: ``keys`` rise, ``blobs`` are float32."""

    keys: list[int]
    ids: list[str]
    blobs: list[bytes]

    def matrix(self, dimension: int) -> Matrix:
        """(n, dimension)"""
        return np.frombuffer(b"".join(self.blobs), dtype="<f4").reshape(len(self.blobs), dimension)


def _build_state(unit: Unit, _: Sequence[Any]) -> Select[Any]:
    columns = [OWNERS.c[name] for name in OwnerState.__dataclass_fields__]
    return select(*columns).where(OWNERS.c.user_id == bindparam("owner", unit.user_id))


def _build_range(unit: Unit, values: Sequence[Any]) -> Select[Any]:
    *where, limit = values
    return _by_key(unit, where, VECTORS.c.id, VECTORS.c.chunk_id, VECTORS.c.vector).order_by(VECTORS.c.id).limit(limit)


def _build_keys(unit: Unit, values: Sequence[Any]) -> Select[Any]:
    return _by_key(unit, values, VECTORS.c.id)


def _by_key(unit: Unit, values: Sequence[Any], *columns: ColumnElement[Any]) -> Select[Any]:
    """By the clustered key, not by the user's index."""
    model, first, last = values
    return unit.select(*columns, frm=VECTORS, by_key=True).where(
        VECTORS.c.id.between(first, last), VECTORS.c.model == model, VECTORS.c.field == CONTENT
    )


_STATE = Prepared(_build_state)
_RANGE = Prepared(_build_range)
_KEYS = Prepared(_build_keys)
_NO_LIMIT = 2**62


def owner_state(unit: Unit) -> OwnerState | None:
    """None for a user who has never written, or was erased: one indexed read."""
    rows = _STATE.rows(unit)
    return OwnerState(*rows[0]) if rows else None


def stored_vectors(
    unit: Unit, state: OwnerState, model: str, *, after: int | None = None, limit: int = _NO_LIMIT
) -> StoredVectors:
    """The user's vectors by a model; those with keys above ``after``, and ``limit`` of them at most."""
    first, last = key_range(state)
    rows = _RANGE.rows(unit, (model, first if after is None else after + 1, last, limit), {BINARY: True})
    return StoredVectors([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def stored_keys(unit: Unit, state: OwnerState, model: str) -> list[int]:
    """The keys of the user's vectors by a model."""
    return [row[0] for row in _KEYS.rows(unit, (model, *key_range(state)))]


def key_range(state: OwnerState) -> tuple[int, int]:
    """The least and the greatest key that a vector of the user can have."""
    first = state.number * EPOCHS_PER_OWNER
    return first, first + EPOCHS_PER_OWNER - 1


def load_vectors(unit: Unit, model: str, dimension: int, ids: Sequence[str] | None = None) -> tuple[list[str], Matrix]:
    """The user's vectors: chunk ids and a matrix of shape (n, dimension), in the order they were stored.

    ``ids``: these chunks only, those of them that have a vector.
    """
    if ids is None:
        state = owner_state(unit)
        stored = StoredVectors([], [], []) if state is None else stored_vectors(unit, state, model)
        return stored.ids, stored.matrix(dimension)
    rows: list[Any] = []
    for some in batches(ids):
        statement = unit.select(VECTORS.c.chunk_id, VECTORS.c.vector, frm=VECTORS, by_key=True).where(
            VECTORS.c.chunk_id.in_(some), VECTORS.c.model == model, VECTORS.c.field == CONTENT
        )
        rows += unit.execute(statement.execution_options(**{BINARY: True})).all()
    matrix = np.frombuffer(b"".join(row.vector for row in rows), dtype="<f4").reshape(len(rows), dimension)
    return [row.chunk_id for row in rows], matrix


def embedded_vectors(unit: Unit, model: str, content_hashes: Sequence[str]) -> dict[str, Vector]:
    """The vectors that the embedder made of this user's contents, by the contents' hashes."""
    found: dict[str, Vector] = {}
    for some in batches(content_hashes):
        statement = unit.select(VECTORS.c.content_hash, VECTORS.c.vector, frm=VECTORS).where(
            VECTORS.c.embedded, VECTORS.c.content_hash.in_(some), VECTORS.c.model == model, VECTORS.c.field == CONTENT
        )
        rows = unit.execute(statement.execution_options(**{BINARY: True})).all()
        found.update((row.content_hash, np.frombuffer(row.vector, "<f4")) for row in rows)
    return found


def _delete_vectors(unit: Unit, chunk_ids: Sequence[str]) -> int:
    deleted = 0
    if unit.lock_owner().vector_count == 0:
        return 0
    for some in batches(chunk_ids):
        deleted += unit.execute(unit.delete(VECTORS, by_key=True).where(VECTORS.c.chunk_id.in_(some))).rowcount
    return deleted
