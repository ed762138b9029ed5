"""How should the assistant act for a user? Preferences by key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Column, Float, ForeignKey, Index
from sqlmodel import Field

from memvault.database.base import Base, Owned, UtcDateTime, identifier, json_value, table_of, within_unit
from memvault.database.transactions import Transactions
from memvault.database.unit import Unit
from memvault.errors import NotFoundError, StorageError
from memvault.ids import MAX_DRAWS, new_preference_id
from memvault.memory.chunk_table import CHUNKS
from memvault.memory.paging import check_paging, keyset_page
from memvault.text import check_fraction, check_identifier, check_json
from memvault.values import Page, Preference


class ProceduralMemory(Base, Owned, table=True):
    """A preference: one value a user and key. It never enters a vector index."""

    __tablename__ = "procedural_memory"
    __table_args__ = (
        within_unit("confidence"),
        Index("idx_proc_user_key", "user_id", "key", unique=True),
        Index("idx_proc_source_chunk", "source_chunk_id"),
    )

    id: str = Field(sa_column=Column(identifier(), primary_key=True))
    user_id: str = Field(sa_column=Column(identifier(), nullable=False))
    key: str = Field(sa_column=Column(identifier(), nullable=False))
    value: Any = Field(sa_column=Column(json_value(), nullable=False))
    confidence: float = Field(sa_column=Column(Float(53), nullable=False))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    source_chunk_id: str | None = Field(
        sa_column=Column(identifier(), ForeignKey("memory_chunks.id", ondelete="SET NULL"), nullable=True)
    )


PROCEDURAL_MEMORY = table_of(ProceduralMemory)


class ProceduralStore:
    """The preferences of one user."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def set(self, key: str, value: Any, *, confidence: float = 1.0, source_chunk_id: str | None = None) -> Preference:
        """Store a value under a key, in place of an earlier one with its confidence and source.

        ``value`` is any JSON value. ``source_chunk_id`` is the chunk that it was learnt from; it is emptied when that
        chunk is deleted. Raises NotFoundError where this user has no such chunk.
        """
        check_identifier(key, "key")
        values = {
            "value": check_json(value, "value"),
            "confidence": check_fraction(confidence, "confidence"),
            "updated_at": datetime.now(UTC),
            "source_chunk_id": None
            if source_chunk_id is None
            else check_identifier(source_chunk_id, "source_chunk_id"),
        }

        def work(unit: Unit) -> Preference:
            if source_chunk_id is not None:
                _require_chunk(unit, source_chunk_id)
            table = PROCEDURAL_MEMORY
            if unit.execute(unit.update(table).where(table.c.key == key).values(**values)).rowcount == 0:
                _insert(unit, {"key": key, **values})
            stored = _find(unit, key)
            assert stored is not None
            return stored

        return self._transactions.write(work)

    def get(self, key: str) -> Preference | None:
        """The preference, or None where this user has none such."""
        check_identifier(key, "key")
        return self._transactions.read(lambda unit: _find(unit, key))

    def list(self, *, limit: int = 50, after: str | None = None) -> Page[Preference]:
        """The preferences by key."""
        keys = (PROCEDURAL_MEMORY.c.key,)
        check_paging(keys, "created", limit, after)
        return self._transactions.read(
            lambda unit: keyset_page(
                unit,
                unit.select(*PROCEDURAL_MEMORY.c, frm=PROCEDURAL_MEMORY),
                keys,
                _value,
                order="created",
                limit=limit,
                after=after,
            )
        )

    def delete(self, key: str) -> bool:
        """Delete a preference; False where there is none."""
        check_identifier(key, "key")
        table = PROCEDURAL_MEMORY
        return self._transactions.write(
            lambda unit: unit.execute(unit.delete(table).where(table.c.key == key)).rowcount == 1
        )


def _insert(unit: Unit, row: dict[str, Any]) -> None:
    for _ in range(MAX_DRAWS):
        if unit.insert_new(PROCEDURAL_MEMORY, [{"id": new_preference_id(), **row}]):
            return
    raise StorageError(f"no free preference id in {MAX_DRAWS} draws")


def _require_chunk(unit: Unit, chunk_id: str) -> None:
    statement = unit.select(CHUNKS.c.id, frm=CHUNKS, by_key=True).where(CHUNKS.c.id == chunk_id)
    if unit.execute(statement).first() is None:
        raise NotFoundError(f"source_chunk_id: this user has no chunk {chunk_id!r}")


def _find(unit: Unit, key: str) -> Preference | None:
    table = PROCEDURAL_MEMORY
    row = unit.execute(unit.select(*table.c, frm=table).where(table.c.key == key)).one_or_none()
    return None if row is None else _value(row)


def _value(row: Any) -> Preference:
    return Preference.model_construct(**row._mapping)
