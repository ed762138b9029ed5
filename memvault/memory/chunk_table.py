"""How does a chunk lie in the database, and how does it come out again?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Boolean, CheckConstraint, Column, Float, ForeignKey, Index, Integer, Select, String
from sqlmodel import Field

from memvault.database.base import (
    Base,
    Owned,
    UtcDateTime,
    identifier,
    json_value,
    long_text,
    non_negative,
    one_of,
    table_of,
    within_unit,
)
from memvault.database.batches import batches
from memvault.database.prepared import Prepared
from memvault.database.unit import Unit
from memvault.database.where import compile_where
from memvault.filters import EVERYTHING, F, Filter, comparisons
from memvault.values import MEMORY_TYPES, Chunk


class MemoryChunk(Base, Owned, table=True):
    """A memory. The column ``metadata`` is the attribute ``meta``: SQLAlchemy keeps the other name for itself."""

    __tablename__ = "memory_chunks"
    __table_args__ = (
        one_of("memory_type", MEMORY_TYPES, "memory_type"),
        within_unit("importance"),
        non_negative("token_count"),
        CheckConstraint("version >= 1", name="version_from_one"),
        Index("idx_memory_user", "user_id", "created_at", "id"),
        Index("idx_memory_user_type", "user_id", "memory_type"),
        Index("idx_memory_session", "session_id"),
        Index("idx_memory_compressed", "user_id", "compressed"),
    )

    id: str = Field(sa_column=Column(identifier(), primary_key=True))
    user_id: str = Field(sa_column=Column(identifier(), nullable=False))
    session_id: str = Field(sa_column=Column(identifier(), ForeignKey("sessions.id"), nullable=False))
    memory_type: str = Field(sa_column=Column(String(16), nullable=False))
    content: str = Field(sa_column=Column(long_text(), nullable=False))
    importance: float = Field(sa_column=Column(Float(53), nullable=False))
    token_count: int = Field(sa_column=Column(Integer, nullable=False))
    compressed: bool = Field(sa_column=Column(Boolean, nullable=False))
    compression_source: str | None = Field(sa_column=Column(identifier(), nullable=True))
    source_session_id: str | None = Field(sa_column=Column(identifier(), nullable=True))
    chroma_id: str | None = Field(sa_column=Column(identifier(), nullable=True))
    created_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    updated_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    meta: dict[str, Any] = Field(sa_column=Column("metadata", json_value(), nullable=False))
    version: int = Field(sa_column=Column(Integer, nullable=False, server_default="1"))


CHUNKS = table_of(MemoryChunk)
CHUNK_COLUMNS = [CHUNKS.c[name] for name in Chunk.model_fields]


def chunk_value(row: Any) -> Chunk:
    """A row of `CHUNK_COLUMNS` as it crosses the API. The database's own rows need no second validation."""
    return Chunk.of_row(row)


NOT_COMPRESSED: Filter = F.compressed == False  # noqa: E712 - an expression, not a test


def without_compressed(where: Filter) -> Filter:
    """The filter with compressed chunks left out, unless it names ``compressed``: then it decides itself."""
    if any(one.field == "compressed" for one in comparisons(where)):
        return where
    return where & NOT_COMPRESSED


def select_chunks(unit: Unit, where: Filter = EVERYTHING) -> Select[Any]:
    """The user's chunks under a filter."""
    statement = unit.select(*CHUNK_COLUMNS, frm=CHUNKS)
    return statement if where is EVERYTHING else statement.where(compile_where(where, CHUNKS))


def matching_ids(unit: Unit, where: Filter) -> set[str]:
    """The ids of the user's chunks under a filter."""
    return set(unit.execute(unit.select(CHUNKS.c.id, frm=CHUNKS).where(compile_where(where, CHUNKS))).scalars())


def _build_read(unit: Unit, ids: Sequence[str]) -> Select[Any]:
    return unit.select(*CHUNK_COLUMNS, frm=CHUNKS, by_key=True).where(CHUNKS.c.id.in_(ids))


def _build_read_current(unit: Unit, ids: Sequence[str]) -> Select[Any]:
    return _build_read(unit, ids).where(compile_where(NOT_COMPRESSED, CHUNKS))


_READ = Prepared(_build_read)
_READ_CURRENT = Prepared(_build_read_current)

FEW = 64
"""Up to so many ids are read by a statement that is compiled once for each number of them, rounded up."""


def padded(ids: Sequence[str]) -> list[str]:
    """At least one id, so often that few statements have to be compiled; which of them comes twice does not matter."""
    return list(ids) if len(ids) <= 16 else [*ids, *([ids[-1]] * (-len(ids) % 8))]


def read_chunks(unit: Unit, ids: Sequence[str], where: Filter = EVERYTHING) -> dict[str, Chunk]:
    """Those of the chunks with these ids that are the user's and pass the filter: one SELECT a batch."""
    if not ids:
        return {}
    if len(ids) <= FEW and where in (EVERYTHING, NOT_COMPRESSED):
        prepared = _READ if where == EVERYTHING else _READ_CURRENT
        return {row[0]: Chunk.of_row(row) for row in prepared.rows(unit, padded(ids))}
    found: dict[str, Chunk] = {}
    for some in batches(ids):
        statement = unit.select(*CHUNK_COLUMNS, frm=CHUNKS, by_key=True).where(CHUNKS.c.id.in_(some))
        if where is not EVERYTHING:
            statement = statement.where(compile_where(where, CHUNKS))
        found.update((row.id, chunk_value(row)) for row in unit.execute(statement))
    return found
