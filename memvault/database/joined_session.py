"""How does memvault take part in a transaction that the caller commits? Through the caller's SQLAlchemy Session.

Nothing is remembered between two calls: the caller may commit, roll back or return to a savepoint at any time, and the
owner's row is locked and read anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from memvault.database.base import Owner
from memvault.database.engine import READ_ONLY, is_ours, translate_on
from memvault.database.prepared import Prepared
from memvault.database.transactions import Database, done_by
from memvault.database.translate import database_errors
from memvault.database.unit import Unit
from memvault.errors import ConfigurationError
from memvault.text import shown

T = TypeVar("T")


class SessionTransactions:
    """One user's work in whatever transaction the caller's Session is in; each write behind a savepoint.

    What is written becomes visible with the caller's commit. What it owes to an index stays owed until then, and is
    paid by whoever pays next: SQLAlchemy tells of a commit while an outer transaction may still be open.
    """

    divides = False

    def __init__(self, database: Database, user_id: str, session: Session | scoped_session[Session]) -> None:
        """Raises ConfigurationError where the Session is bound to another database. No I/O."""
        self.user_id = user_id
        self._database = database
        if not isinstance(session, Session | scoped_session):
            raise ConfigurationError(
                f"sql_session must be a SQLAlchemy or SQLModel Session, got {shown(session)}; of an AsyncSession, pass "
                "the session that run_sync gives"
            )
        self._given = session
        self._require_bound()

    def read(self, work: Callable[[Unit], T]) -> T:
        unit = self._unit()
        with database_errors():
            return work(unit)

    def peek(self, work: Callable[[Unit], T]) -> T:
        if self._session.in_transaction():
            return self.read(work)
        return self._database.read_for(self.user_id, work)

    def glance(self, prepared: Prepared, values: Sequence[Any]) -> list[Any] | None:
        return None

    def write(self, work: Callable[[Unit], T]) -> T:
        unit = self._unit()
        if unit.connection.get_execution_options().get(READ_ONLY):
            raise ConfigurationError(
                f"this sql_session is bound to an engine with execution option {READ_ONLY}=True, and a write was asked"
            )
        with database_errors(), unit.savepoint():
            return done_by(work, unit, self._database)

    @property
    def _session(self) -> Session:
        """A scoped_session stands for another Session in each thread."""
        return self._given() if isinstance(self._given, scoped_session) else self._given

    def _unit(self) -> Unit:
        self._require_bound()
        session = self._session
        session.flush()  # what the caller added and memvault is asked about; its errors are the caller's
        with database_errors():
            connection = session.connection(bind_arguments={"mapper": Owner})
        translate_on(connection, self._database.schema_name)
        if not connection.get_execution_options().get(READ_ONLY):
            self._database.joined_by(session)
        return Unit(connection, self.user_id)

    def _require_bound(self) -> None:
        try:
            bind = self._session.get_bind(mapper=Owner)
        except UnboundExecutionError as exc:
            raise ConfigurationError("sql_session is bound to no engine; bind it to storage.engine") from exc
        engine = bind.engine if isinstance(bind, Connection) else bind
        if not _leads_to(engine, self._database.engine):
            raise ConfigurationError(
                f"sql_session is bound to {engine!r}, which is not this vault's engine; bind it to storage.engine, or "
                "to one that memvault.create_engine makes for the same database"
            )


def _leads_to(engine: Engine, ours: Engine) -> bool:
    """Whether a Session on this engine writes to our database, with all that our transactions need."""
    return engine.dialect is ours.dialect or (is_ours(engine) and engine.url == ours.url)
