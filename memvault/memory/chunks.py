"""What did the assistant remember? All that may be done with the chunks of one user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import func

from memvault.database.batches import batches
from memvault.database.transactions import Transactions
from memvault.database.unit import Unit
from memvault.database.where import compile_where
from memvault.embedding.base import Vector
from memvault.errors import ConflictError, NotFoundError, ValidationError
from memvault.filters import NOTHING, F, Filter, check_filter
from memvault.memory.chunk_table import (
    CHUNK_COLUMNS,
    CHUNKS,
    chunk_value,
    matching_ids,
    read_chunks,
    select_chunks,
    without_compressed,
)
from memvault.memory.drafts import PROCEDURAL, Draft, Drafting, hash_content
from memvault.memory.insertion import check_references, insert_drafts, settle_doubles
from memvault.memory.paging import check_paging, keyset_page
from memvault.memory.sessions import SessionChange, count_in_sessions
from memvault.text import (
    check_choice,
    check_content,
    check_fraction,
    check_identifier,
    check_integer,
    check_metadata,
    shown,
)
from memvault.values import MEMORY_TYPES, Chunk, NewChunk, Page
from memvault.vectors import canonical

TRANSACTION_SIZE = 5000
"""Chunks that add_many writes in one transaction: long enough to be fast, short enough to let other writers in."""

Progress = Callable[[int, int], None]
"""Called with (done, total): after each transaction, and in between while texts are embedded."""


class ChunkStore:
    """The chunks of one user."""

    def __init__(self, transactions: Transactions, drafting: Drafting) -> None:
        self._transactions = transactions
        self._drafting = drafting

    def add(
        self,
        content: str,
        *,
        id: str | None = None,
        session_id: str | None = None,
        memory_type: str = "episodic",
        importance: float = 0.5,
        metadata: dict[str, Any] | None = None,
        embedding: Any = None,
        created_at: datetime | None = None,
    ) -> Chunk:
        """Store one memory; the arguments are `NewChunk`'s.

        Raises ValidationError, NotFoundError (no such session of this user), ConflictError (the id is taken),
        EmbeddingError; nothing is stored then.
        """
        new = NewChunk(content, id, session_id, memory_type, importance, metadata, embedding, created_at)
        return self.add_many([new])[0]

    def add_many(
        self, chunks: Iterable[NewChunk], *, on_conflict: str = "error", progress: Progress | None = None
    ) -> list[Chunk]:
        """Store memories; returns those stored, in their order.

        ``on_conflict="skip"`` leaves out those whose id this user has already; an id of another user is a
        ConflictError either way. All are checked before the first is written. A text that the user has already is not
        embedded again. ``progress`` is called with (done, total) as texts are embedded, and after each transaction.

        More than 5,000 are written in several transactions: should the database or the embedder fail in the middle,
        those of the earlier ones stay. Within `UserMemory.transaction` they are one piece, however many.
        """
        if isinstance(chunks, str | bytes | NewChunk) or not isinstance(chunks, Iterable):
            raise ValidationError(f"chunks must be a list of NewChunk, got {shown(chunks)}")
        drafts = settle_doubles(self._drafting.draft(list(chunks)), on_conflict)
        size = TRANSACTION_SIZE if self._transactions.divides else max(1, len(drafts))
        if len(drafts) > size:
            self._transactions.read(lambda unit: check_references(unit, drafts, on_conflict))
        stored: list[Chunk] = []
        done = 0
        for some in batches(drafts, size):
            told = None if progress is None else partial(_tell, progress, done, len(drafts))
            stored += self._add(some, on_conflict, told)
            done += len(some)
            if progress is not None:
                progress(done, len(drafts))
        return stored

    def _add(self, drafts: Sequence[Draft], on_conflict: str, told: Callable[[int], None] | None) -> list[Chunk]:
        # Before the transaction: others write meanwhile.
        return self.add_embedded(self._drafting.embed_drafts(drafts, self.known_vectors, told), on_conflict)

    def add_embedded(self, drafts: Sequence[Draft], on_conflict: str) -> list[Chunk]:
        """Store drafts that have their vectors, in one transaction: for whoever embeds elsewhere."""
        return self._transactions.write(lambda unit: insert_drafts(unit, drafts, on_conflict))

    def known_vectors(self, content_hashes: Sequence[str]) -> dict[str, Vector]:
        """What the embedder once made of this user's contents, by their hashes; what was never embedded is left out."""
        return self._transactions.peek(
            lambda unit: canonical.embedded_vectors(unit, self._drafting.model, content_hashes)
        )

    def get(self, id: str) -> Chunk | None:
        """The chunk, or None where this user has none such."""
        found = self.get_many([id])
        return found[0] if found else None

    def get_many(self, ids: Iterable[str]) -> list[Chunk]:
        """Those of the chunks that this user has, in the order of ``ids``, each once."""
        wanted = _checked_ids(ids)
        if not wanted:
            return []
        found = self._transactions.read(lambda unit: read_chunks(unit, wanted))
        return [found[id] for id in wanted if id in found]

    def count(self, where: Filter | None = None) -> int:
        """How many chunks this user has under the filter, compressed ones included."""
        condition = check_filter(where)
        if condition is NOTHING:
            return 0

        def work(unit: Unit) -> int:
            statement = unit.select(func.count(), frm=CHUNKS).where(compile_where(condition, CHUNKS))
            return int(unit.execute(statement).scalar_one())

        return self._transactions.read(work)

    def list(
        self,
        where: Filter | None = None,
        *,
        memory_type: str | None = None,
        session_id: str | None = None,
        include_compressed: bool = False,
        order: str = "created",
        limit: int = 50,
        after: str | None = None,
    ) -> Page[Chunk]:
        """The chunks under the filter, oldest first, or newest first with ``order="-created"``.

        Compressed ones are left out unless ``include_compressed`` is true or the filter itself names ``compressed``.
        """
        condition = check_filter(where)
        keys = (CHUNKS.c.created_at, CHUNKS.c.id)
        check_paging(keys, order, limit, after)
        if memory_type is not None:
            condition = condition & (F.memory_type == check_choice(memory_type, "memory_type", MEMORY_TYPES))
        if session_id is not None:
            condition = condition & (F.session_id == check_identifier(session_id, "session_id"))
        if not include_compressed:
            condition = without_compressed(condition)
        if condition is NOTHING:
            return Page[Chunk](items=[])
        return self._transactions.read(
            lambda unit: keyset_page(
                unit,
                select_chunks(unit, condition),
                keys,
                chunk_value,
                order=order,
                limit=limit,
                after=after,
            )
        )

    def update(
        self,
        id: str,
        *,
        content: str | None = None,
        importance: float | None = None,
        metadata: dict[str, Any] | None = None,
        embedding: Any = None,
        expected_version: int | None = None,
    ) -> Chunk:
        """Change what is given (``metadata`` is replaced whole) and return the chunk, its version raised.

        ``embedding`` is the new content's vector; without it the embedder is asked. Where there is no embedder, a
        chunk whose content changes loses its vector: the old one would be found by what is no longer there.
        Raises NotFoundError, and ConflictError where ``expected_version`` is no longer the version.
        """
        check_identifier(id, "id")
        values: dict[str, Any] = {}
        if content is not None:
            values["content"] = check_content(content)
            values["token_count"] = self._drafting.count_tokens(content)
        if importance is not None:
            values["importance"] = check_fraction(importance, "importance")
        if metadata is not None:
            values["metadata"] = check_metadata(metadata)
        if expected_version is not None:
            check_integer(expected_version, "expected_version", minimum=1)
        if not values and embedding is None:
            raise ValidationError("update needs one of content, importance, metadata and embedding")
        current = self.get(id)
        if current is None:
            raise _no_chunk(id)
        vector = self._drafting.check_embedding(embedding, current.memory_type)
        has_vector = current.memory_type != PROCEDURAL
        embedded = vector is None
        if vector is None and content is not None and has_vector:
            vector = self._drafting.embed_content(content, self.known_vectors)

        given = values

        def work(unit: Unit) -> Chunk:
            values = dict(given)  # the work may be run again
            before = _require(unit, id)
            if expected_version is not None and before.version != expected_version:
                raise ConflictError(f"chunk {id!r} is at version {before.version}, expected {expected_version}")
            if vector is not None:
                text = before.content if content is None else content
                values["chroma_id"] = id
                canonical.apply(unit, put=[canonical.ChunkVector(id, hash_content(text), vector, embedded)])
            elif before.chroma_id is None:
                canonical.apply(unit, vectorless=1)
            elif content is not None and content != before.content:
                values["chroma_id"] = None
                canonical.apply(unit, dropped=[id])
            elif importance is not None:
                canonical.apply(unit, changed=[id])
            else:
                canonical.apply(unit, vectorless=1)  # metadata alone: no index holds it
            values["updated_at"] = datetime.now(UTC)
            values["version"] = before.version + 1
            unit.execute(unit.update(CHUNKS, by_key=True).where(CHUNKS.c.id == id).values(values))
            after = _require(unit, id)
            if after.token_count != before.token_count:
                change = SessionChange(tokens=after.token_count - before.token_count)
                count_in_sessions(unit, {before.session_id: change})
            return after

        return self._transactions.write(work)

    def delete(self, id: str) -> bool:
        """Delete a chunk; False where this user has none such."""
        return self.delete_many([id]) == 1

    def delete_many(self, ids_or_where: Iterable[str] | Filter) -> int:
        """Delete chunks by their ids, or all under a filter, in one transaction; returns how many there were."""
        where: Filter = NOTHING
        ids: list[str] = []
        if isinstance(ids_or_where, Filter):
            where = check_filter(ids_or_where)
        else:
            ids = _checked_ids(ids_or_where)
        if where is NOTHING and not ids:
            return 0

        def work(unit: Unit) -> int:
            doomed = ids
            if where is not NOTHING:
                doomed = sorted(matching_ids(unit, where))
            return sum(_delete(unit, some) for some in batches(doomed))

        return self._transactions.write(work)


def _delete(unit: Unit, ids: Sequence[str]) -> int:
    columns = (CHUNKS.c.id, CHUNKS.c.session_id, CHUNKS.c.token_count, CHUNKS.c.chroma_id)
    rows = unit.execute(unit.select(*columns, frm=CHUNKS, by_key=True).where(CHUNKS.c.id.in_(ids))).all()
    changes: dict[str, SessionChange] = {}
    for row in rows:
        change = changes.setdefault(row.session_id, SessionChange())
        change.memories -= 1
        change.tokens -= row.token_count
    indexed = [row.id for row in rows if row.chroma_id is not None]
    canonical.apply(unit, dropped=indexed, vectorless=len(rows) - len(indexed))
    found = [row.id for row in rows]
    unit.execute(unit.delete(CHUNKS, by_key=True).where(CHUNKS.c.id.in_(found)))
    count_in_sessions(unit, changes)
    return len(rows)


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _require(unit: Unit, id: str) -> Chunk:
    statement = unit.select(*CHUNK_COLUMNS, frm=CHUNKS, by_key=True).where(CHUNKS.c.id == id)
    row = unit.execute(statement).one_or_none()
    if row is None:
        raise _no_chunk(id)
    return chunk_value(row)


def _no_chunk(id: str) -> NotFoundError:
    return NotFoundError(f"id: this user has no chunk {id!r}")


def _checked_ids(ids: object) -> list[str]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ValidationError(f"ids must be a list of ids, got {shown(ids)}")
    return list(dict.fromkeys(check_identifier(id, "id") for id in ids))
