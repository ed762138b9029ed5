"""How do new chunks get in without ever taking an id that somebody has?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from memvault.database.unit import Unit
from memvault.errors import ConflictError, StorageError
from memvault.ids import MAX_DRAWS, new_chunk_id
from memvault.memory.chunk_table import CHUNKS
from memvault.memory.drafts import Draft
from memvault.memory.sessions import SessionChange, count_in_sessions, default_session, require_sessions
from memvault.text import check_choice
from memvault.values import Chunk
from memvault.vectors import canonical

ON_CONFLICT = ("error", "skip")


class _TakenError(Exception):
    """Some of the ids are in use; rolls the savepoint back."""


def settle_doubles(drafts: Sequence[Draft], on_conflict: str) -> list[Draft]:
    """Drafts without ids given twice in one call: the first of them counts, or a ConflictError is raised."""
    check_choice(on_conflict, "on_conflict", ON_CONFLICT)
    given = {draft.id for draft in drafts if draft.id_given}
    unique: dict[str, Draft] = {}
    for draft in drafts:
        while not draft.id_given and (draft.id in unique or draft.id in given):
            draft = replace(draft, id=new_chunk_id())
        if draft.id not in unique:
            unique[draft.id] = draft
        elif on_conflict == "error":
            raise ConflictError(f"id {draft.id!r} stands twice in one call; nothing was stored")
    return list(unique.values())


def check_references(unit: Unit, drafts: Sequence[Draft], on_conflict: str) -> None:
    """Refuse, before the first of several transactions, what one of them would refuse: sessions and ids."""
    require_sessions(unit, (draft.session_id for draft in drafts if draft.session_id is not None))
    given = [draft for draft in drafts if draft.id_given]
    _free(unit, given, on_conflict, unit.owners_of(CHUNKS, [draft.id for draft in given]))


def insert_drafts(unit: Unit, drafts: Sequence[Draft], on_conflict: str) -> list[Chunk]:
    """Write drafts: chunks, vectors, counts and debts. Returns the chunks stored, in their order."""
    require_sessions(unit, (draft.session_id for draft in drafts if draft.session_id is not None))
    default = default_session(unit) if any(draft.session_id is None for draft in drafts) else ""
    stored, rows = _insert_rows(unit, drafts, default, on_conflict)
    canonical.apply(
        unit,
        put=[
            canonical.ChunkVector(draft.id, draft.content_hash, draft.vector, draft.embedded)
            for draft in stored
            if draft.vector is not None
        ],
        new=True,
        vectorless=sum(draft.vector is None for draft in stored),
    )
    changes: dict[str, SessionChange] = {}
    for draft in stored:
        change = changes.setdefault(draft.session_id or default, SessionChange())
        change.memories += 1
        change.tokens += draft.token_count
        change.latest = max(change.latest or draft.created_at, draft.created_at)
    count_in_sessions(unit, changes)
    names = tuple(Chunk.model_fields)
    return [Chunk.of_row([unit.user_id if name == "user_id" else row[name] for name in names]) for row in rows]


def _insert_rows(
    unit: Unit, drafts: Sequence[Draft], default_session_id: str, on_conflict: str
) -> tuple[list[Draft], list[dict[str, Any]]]:
    """The drafts that got in, and their rows."""
    remaining = list(drafts)
    for _ in range(MAX_DRAWS):
        rows = [_row(draft, default_session_id) for draft in remaining]
        try:
            # One alone is there or not: there is nothing to take back.
            with unit.savepoint() if len(rows) > 1 else nullcontext():
                if unit.insert_new(CHUNKS, rows) < len(remaining):
                    raise _TakenError
        except _TakenError:
            taken = unit.owners_of(CHUNKS, [draft.id for draft in remaining])
            remaining = _free(unit, remaining, on_conflict, taken)
        else:
            return remaining, rows
    raise StorageError(f"no free chunk id in {MAX_DRAWS} draws")


def _free(unit: Unit, drafts: Sequence[Draft], on_conflict: str, taken: dict[str, str]) -> list[Draft]:
    """The drafts whose ids were free or could be drawn anew; the user's own given ones are skipped if asked."""
    free: list[Draft] = []
    for draft in drafts:
        if draft.id not in taken:
            free.append(draft)
        elif not draft.id_given:
            free.append(replace(draft, id=new_chunk_id()))
        elif on_conflict == "error" or taken[draft.id] != unit.user_id:
            # An id of another user is never skipped: the caller would believe that the chunk is there.
            raise ConflictError(f"id {draft.id!r} is taken; nothing was stored. Leave id out to have one generated")
    return free


def _row(draft: Draft, default_session_id: str) -> dict[str, Any]:
    return {
        "id": draft.id,
        "session_id": draft.session_id or default_session_id,
        "memory_type": draft.memory_type,
        "content": draft.content,
        "importance": draft.importance,
        "token_count": draft.token_count,
        "compressed": False,
        "compression_source": None,
        "source_session_id": None,
        "chroma_id": None if draft.vector is None else draft.id,
        "created_at": draft.created_at,
        "updated_at": draft.created_at,
        "metadata": draft.metadata,
        "version": 1,
    }
