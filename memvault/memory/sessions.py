"""Which conversations has a user had? Their table, and the counts that follow each chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BindParameter, Boolean, Case, Column, Index, Integer, bindparam, case
from sqlmodel import Field

from memvault.database.base import Base, Owned, UtcDateTime, identifier, non_negative, table_of
from memvault.database.batches import batches
from memvault.database.transactions import Transactions
from memvault.database.unit import Unit
from memvault.errors import ConflictError, NotFoundError, StorageError
from memvault.ids import MAX_DRAWS, new_session_id
from memvault.memory.paging import check_paging, keyset_page
from memvault.text import check_identifier, check_time
from memvault.values import MemorySession, Page


class Session(Base, Owned, table=True):
    """A conversation; named `MemorySession` where it crosses the API, lest it be taken for SQLAlchemy's."""

    __tablename__ = "sessions"
    __table_args__ = (
        non_negative("memory_count"),
        non_negative("total_tokens"),
        Index("idx_sessions_user", "user_id", "started_at", "id"),
    )

    id: str = Field(sa_column=Column(identifier(), primary_key=True))
    user_id: str = Field(sa_column=Column(identifier(), nullable=False))
    started_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    last_activity: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    ended_at: datetime | None = Field(sa_column=Column(UtcDateTime, nullable=True))
    compressed: bool = Field(sa_column=Column(Boolean, nullable=False))
    memory_count: int = Field(sa_column=Column(Integer, nullable=False))
    total_tokens: int = Field(sa_column=Column(Integer, nullable=False))


SESSIONS = table_of(Session)


@dataclass
class SessionChange:
    """How the counts of one session change, and when something last happened in it, if that is new."""

    memories: int = 0
    tokens: int = 0
    latest: datetime | None = None


class SessionStore:
    """The sessions of one user."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def start(self, *, id: str | None = None, started_at: datetime | None = None) -> MemorySession:
        """Begin a session. ``id`` None: one is generated; ``started_at`` None: now.

        Raises ConflictError where the id is taken.
        """
        if id is not None:
            check_identifier(id, "id")
        started = datetime.now(UTC) if started_at is None else check_time(started_at, "started_at")
        return self._transactions.write(lambda unit: create_session(unit, id, started))

    def get(self, id: str) -> MemorySession | None:
        """The session, or None where this user has none such."""
        check_identifier(id, "id")
        return self._transactions.read(lambda unit: _find(unit, id))

    def list(self, *, order: str = "created", limit: int = 50, after: str | None = None) -> Page[MemorySession]:
        """The sessions by their start, oldest first, or newest first with ``order="-created"``."""
        keys = (SESSIONS.c.started_at, SESSIONS.c.id)
        check_paging(keys, order, limit, after)
        return self._transactions.read(
            lambda unit: keyset_page(
                unit,
                unit.select(*SESSIONS.c, frm=SESSIONS),
                keys,
                _value,
                order=order,
                limit=limit,
                after=after,
            )
        )

    def touch(self, id: str) -> MemorySession:
        """Note activity in a session now. Raises NotFoundError."""
        now = bindparam("now", datetime.now(UTC), UtcDateTime())
        return self._change(id, {"last_activity": _later(now)})

    def end(self, id: str) -> MemorySession:
        """End a session; one that has ended keeps its first end. Raises NotFoundError."""
        now = bindparam("now", datetime.now(UTC), UtcDateTime())
        first_end = case((SESSIONS.c.ended_at.is_(None), now), else_=SESSIONS.c.ended_at)
        return self._change(id, {"ended_at": first_end})

    def _change(self, id: str, values: Mapping[str, Any]) -> MemorySession:
        check_identifier(id, "id")

        def work(unit: Unit) -> MemorySession:
            unit.execute(unit.update(SESSIONS, by_key=True).where(SESSIONS.c.id == id).values(**values))
            session = _find(unit, id)
            if session is None:
                raise _no_session([id])
            return session

        return self._transactions.write(work)


def create_session(unit: Unit, id: str | None, started_at: datetime) -> MemorySession:
    for _ in range(MAX_DRAWS):
        row = {
            "id": id or new_session_id(),
            "started_at": started_at,
            "last_activity": started_at,
            "ended_at": None,
            "compressed": False,
            "memory_count": 0,
            "total_tokens": 0,
        }
        if unit.insert_new(SESSIONS, [row]):
            return MemorySession.model_validate({**row, "user_id": unit.user_id})
        if id is not None:
            raise ConflictError(f"the session id {id!r} is taken")
    raise StorageError(f"no free session id in {MAX_DRAWS} draws")


def default_session(unit: Unit) -> str:
    """The id of the session of writes that name none; made at the first of them."""
    owner = unit.lock_owner()
    if owner.default_session_id is None:
        owner.default_session_id = create_session(unit, None, datetime.now(UTC)).id
        unit.save_owner()
    return owner.default_session_id


def require_sessions(unit: Unit, ids: Iterable[str]) -> None:
    """Raise NotFoundError unless all these sessions are the user's."""
    wanted = sorted(set(ids))
    found: set[str] = set()
    for some in batches(wanted):
        statement = unit.select(SESSIONS.c.id, frm=SESSIONS, by_key=True).where(SESSIONS.c.id.in_(some))
        found.update(unit.execute(statement).scalars())
    if missing := [id for id in wanted if id not in found]:
        raise _no_session(missing)


def count_in_sessions(unit: Unit, changes: Mapping[str, SessionChange]) -> None:
    """Add to the counts of sessions, in the transaction of the chunks that are counted."""
    if not changes:
        return
    statement = (
        unit.update(SESSIONS, by_key=True)
        .where(SESSIONS.c.id == bindparam("session"))
        .values(
            memory_count=SESSIONS.c.memory_count + bindparam("memories"),
            total_tokens=SESSIONS.c.total_tokens + bindparam("tokens"),
            last_activity=_later(bindparam("latest", type_=UtcDateTime())),
        )
    )
    parameters = [
        {"session": id, "memories": change.memories, "tokens": change.tokens, "latest": change.latest}
        for id, change in sorted(changes.items())
    ]
    unit.execute(statement, parameters)


def _later(than: BindParameter[datetime]) -> Case[Any]:
    """The session's last activity, or a time that is later; NULL never is."""
    return case((SESSIONS.c.last_activity < than, than), else_=SESSIONS.c.last_activity)


def _find(unit: Unit, id: str) -> MemorySession | None:
    row = unit.execute(unit.select(*SESSIONS.c, frm=SESSIONS, by_key=True).where(SESSIONS.c.id == id)).one_or_none()
    return None if row is None else _value(row)


def _value(row: Any) -> MemorySession:
    return MemorySession.model_construct(**row._mapping)


def _no_session(ids: list[str]) -> NotFoundError:
    shown = ", ".join(repr(id) for id in ids[:3]) + (" …" if len(ids) > 3 else "")
    return NotFoundError(f"session_id: this user has no session {shown}; sessions.start() begins one")
