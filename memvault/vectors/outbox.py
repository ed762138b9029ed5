"""Which indexes has the vault, and what do they still owe?

A debt says that a chunk's state is not in an index yet, not what happened to it: paying is making the index equal to
the committed state. A mark raises the debt's generation, so that a payment of what was before does not settle it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import BigInteger, Boolean, Column, Connection, Index, Integer, String, Text, func, select, text, update
from sqlmodel import Field

from memvault.database.base import Base, UtcDateTime, identifier, non_negative, one_of, table_of
from memvault.database.batches import batches
from memvault.database.bulk import insert_rows, upsert
from memvault.database.unit import Unit


class VectorIndexRow(Base, table=True):
    """An index that this vault has: one live, at most one being built, retired ones until they are purged.

    ``dimension`` is NULL until the first vector in a vault without an embedder fixes it.
    """

    __tablename__ = "vector_indexes"
    __table_args__ = (
        one_of("state", ("live", "building", "retired"), "state"),
        Index(
            "uq_vector_indexes_live",
            "state",
            unique=True,
            sqlite_where=text("state = 'live'"),
            postgresql_where=text("state = 'live'"),
        ),
    )

    id: int = Field(sa_column=Column(Integer, primary_key=True))
    spec: str = Field(sa_column=Column(Text, nullable=False))
    model: str = Field(sa_column=Column(identifier(), nullable=False))
    dimension: int | None = Field(sa_column=Column(Integer, nullable=True))
    transactional: bool = Field(sa_column=Column(Boolean, nullable=False))
    state: str = Field(sa_column=Column(String(16), nullable=False))
    created_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))


class IndexDebt(Base, table=True):
    """A chunk whose state an index does not show yet. No foreign key: a deletion's debt outlives the chunk."""

    __tablename__ = "index_outbox"
    __table_args__ = (
        Index("idx_outbox_user", "index_id", "user_id"),
        non_negative("attempts"),
    )

    index_id: int = Field(sa_column=Column(Integer, primary_key=True, autoincrement=False))
    chunk_id: str = Field(sa_column=Column(identifier(), primary_key=True))
    user_id: str = Field(sa_column=Column(identifier(), nullable=False))
    generation: int = Field(sa_column=Column(BigInteger, nullable=False))
    lease_token: str | None = Field(sa_column=Column(String(32), nullable=True))
    leased_until: datetime | None = Field(sa_column=Column(UtcDateTime, nullable=True))
    attempts: int = Field(sa_column=Column(Integer, nullable=False))
    last_error: str | None = Field(sa_column=Column(Text, nullable=True))
    not_before: datetime | None = Field(sa_column=Column(UtcDateTime, nullable=True))
    marked_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))


INDEXES = table_of(VectorIndexRow)
OUTBOX = table_of(IndexDebt)


@dataclass(frozen=True)
class LiveIndex:
    """The row of the index that answers, as it stands."""

    id: int
    spec: str
    model: str
    dimension: int | None
    transactional: bool


def live_index(connection: Connection) -> LiveIndex | None:
    """The vault's live index; None in a vault that has none yet."""
    columns = (INDEXES.c.id, INDEXES.c.spec, INDEXES.c.model, INDEXES.c.dimension, INDEXES.c.transactional)
    row = connection.execute(select(*columns).where(INDEXES.c.state == "live")).one_or_none()
    return None if row is None else LiveIndex(**row._mapping)


def mark(connection: Connection, index_id: int, user_id: str, chunk_ids: Sequence[str]) -> None:
    """Record that an index owes these chunks of a user. A chunk that is owed already gets a new generation."""
    if not chunk_ids:
        return
    if connection.dialect.name != "sqlite":
        _mark_at_once(connection, index_id, user_id, chunk_ids)
        return
    # In two steps, of which the second is hardly ever needed: nobody else writes to a SQLite file between them.
    new = insert_rows(
        connection,
        OUTBOX,
        [{"chunk_id": chunk_id} for chunk_id in chunk_ids],
        ignoring=True,
        index_id=index_id,
        user_id=user_id,
        generation=1,
        attempts=0,
        marked_at=datetime.now(UTC),
    )
    if new == len(chunk_ids):
        return
    for some in batches(chunk_ids):  # those just inserted, too: which they are is not told, and it does no harm
        connection.execute(
            update(OUTBOX)
            .where(OUTBOX.c.index_id == index_id, OUTBOX.c.chunk_id.in_(some))
            .values(generation=OUTBOX.c.generation + 1, user_id=user_id, not_before=None)
        )


def _mark_at_once(connection: Connection, index_id: int, user_id: str, chunk_ids: Sequence[str]) -> None:
    """In one statement: where others write meanwhile, a payer could settle a debt between two."""
    statement = upsert(connection, OUTBOX)
    statement = statement.on_conflict_do_update(
        index_elements=["index_id", "chunk_id"],
        set_={"generation": OUTBOX.c.generation + 1, "user_id": statement.excluded.user_id, "not_before": None},
    )
    marked = {"index_id": index_id, "user_id": user_id, "generation": 1, "attempts": 0, "marked_at": datetime.now(UTC)}
    # In the order of their keys: two writers, or a writer and a payer, then wait for each other in one direction.
    connection.execute(statement, [{"chunk_id": chunk_id, **marked} for chunk_id in sorted(set(chunk_ids))])


def owe(connection: Connection, index_id: int, owners: Mapping[str, str]) -> None:
    """Record that an index owes these chunks, each of an owner. One that is owed already stays as it is: its debt is
    of the same state, and knows its owner better."""
    rows = [{"chunk_id": chunk_id, "user_id": user_id} for chunk_id, user_id in sorted(owners.items())]
    if rows:
        now = datetime.now(UTC)
        insert_rows(connection, OUTBOX, rows, ignoring=True, index_id=index_id, generation=1, attempts=0, marked_at=now)


def owed_ids(unit: Unit, index_id: int) -> list[str]:
    """The user's chunks that the index does not show as they are."""
    statement = select(OUTBOX.c.chunk_id).where(OUTBOX.c.index_id == index_id, OUTBOX.c.user_id == unit.user_id)
    return list(unit.execute(statement).scalars())


def count_owed(connection: Connection, index_id: int | None = None, user_id: str | None = None) -> int:
    statement = select(func.count()).select_from(OUTBOX)
    if index_id is not None:
        statement = statement.where(OUTBOX.c.index_id == index_id)
    if user_id is not None:
        statement = statement.where(OUTBOX.c.user_id == user_id)
    return connection.execute(statement).scalar_one()
