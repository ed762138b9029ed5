"""How do memories come into a vault from a file? JSON Lines, one record a line: the format of a user's export.

A line is an object with ``"record": "chunk"`` (which may be left out), ``user_id``, ``content`` and any of ``id``,
``session_id``, ``memory_type``, ``importance``, ``created_at`` (ISO 8601 with an offset), ``metadata``, ``embedding``.
Sessions that a line names and its user has not are begun. A line without an id gets one derived from what it says, so
that importing a file twice adds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from memvault.database.batches import batches
from memvault.errors import ConflictError, ValidationError
from memvault.ids import derived_chunk_id
from memvault.memory.chunks import ChunkStore
from memvault.memory.drafts import Drafting, Known
from memvault.memory.insertion import settle_doubles
from memvault.memory.sessions import SessionStore
from memvault.text import check_identifier, shown
from memvault.values import ImportReport, NewChunk

LINES_AT_ONCE = 5000

_CHUNK_KEYS = frozenset(
    {
        "record",
        "user_id",
        "id",
        "session_id",
        "memory_type",
        "content",
        "importance",
        "created_at",
        "metadata",
        "embedding",
    }
)


@dataclass(frozen=True)
class _Line:
    number: int
    user_id: str
    chunk: NewChunk


def import_chunks(
    lines: Iterable[str],
    begin: Callable[[str], AbstractContextManager[tuple[SessionStore, ChunkStore]]],
    drafting: Drafting,
    known: Callable[[str], Known],
    *,
    user_id: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> ImportReport:
    """Import lines in their order; ``begin`` gives a user's sessions and chunks in one transaction, ``known`` the
    vectors that the embedder once made of a user's contents.

    ``user_id`` replaces the lines' own. ``progress`` is called with the number of lines done. Raises ValidationError
    naming the line; what earlier batches of 5,000 lines brought stays, and importing again adds only the rest.
    """
    added = skipped = done = 0
    users: set[str] = set()
    for some in batches(_parse(lines, user_id, drafting), LINES_AT_ONCE):
        by_user: dict[str, list[_Line]] = {}
        for line in some:
            by_user.setdefault(line.user_id, []).append(line)
        for user, theirs in by_user.items():
            try:
                drafts = settle_doubles(drafting.draft([line.chunk for line in theirs]), "skip")
                drafts = drafting.embed_drafts(drafts, known(user))  # before the transaction
                with begin(user) as (sessions, chunks):
                    _begin_sessions([line.chunk for line in theirs], sessions)
                    stored = len(chunks.add_embedded(drafts, "skip"))
            except (ValidationError, ConflictError) as exc:
                raise type(exc)(f"{_place(theirs)} (user {user!r}): {exc}") from exc
            added += stored
            skipped += len(theirs) - stored
        users.update(by_user)
        done += len(some)
        if progress is not None:
            progress(done)
    return ImportReport(added=added, skipped=skipped, users=len(users))


def _begin_sessions(chunks: Iterable[NewChunk], sessions: SessionStore) -> None:
    started: dict[str, datetime | None] = {}
    for chunk in chunks:
        if chunk.session_id is not None:
            started.setdefault(chunk.session_id, chunk.created_at)
    for session_id, began in started.items():
        if sessions.get(session_id) is None:
            sessions.start(id=session_id, started_at=began)


def _place(lines: list[_Line]) -> str:
    first, last = lines[0].number, lines[-1].number
    return f"line {first}" if first == last else f"lines {first} to {last}"


def _parse(lines: Iterable[str], user_id: str | None, drafting: Drafting) -> Iterator[_Line]:
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = _line(number, text, user_id)
            drafting.check(line.chunk)
        except ValidationError as exc:
            raise ValidationError(f"line {number}: {exc}") from exc
        yield line


def _line(number: int, text: str, user_id: str | None) -> _Line:
    try:
        record: Any = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ValidationError(f"not JSON: {exc}") from exc
    if not isinstance(record, dict):
        raise ValidationError(f"a line must be a JSON object, got {shown(record)}")
    if record.get("record", "chunk") != "chunk":
        raise ValidationError(f"record must be 'chunk', got {shown(record['record'])}")
    if unknown := sorted(record.keys() - _CHUNK_KEYS):
        raise ValidationError(f"unknown key {shown(unknown[0])}; a chunk has {', '.join(sorted(_CHUNK_KEYS))}")
    owner = check_identifier(record.get("user_id") if user_id is None else user_id, "user_id")
    created_at = record.get("created_at")
    fields = {key: record[key] for key in record.keys() - {"record", "user_id", "created_at"}}
    fields.setdefault("content", None)
    if fields.get("id") is None:
        parts = (owner, str(fields.get("session_id")), str(fields["content"]), str(created_at))
        fields["id"] = derived_chunk_id(*(part.encode("utf-8", "replace").decode() for part in parts))
    return _Line(number, owner, NewChunk(**fields, created_at=None if created_at is None else _time(created_at)))


def _time(value: object) -> datetime:
    try:
        return datetime.fromisoformat(value)  # type: ignore[arg-type]  # a TypeError is caught below
    except (TypeError, ValueError) as exc:
        raise ValidationError(f"created_at must be an ISO 8601 time, got {shown(value)}") from exc
