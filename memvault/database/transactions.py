"""Where does a unit of work run? In a transaction of its own, or in one that somebody else commits."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from memvault import forking
from memvault.database import postgres
from memvault.database.engine import READ_ONLY, in_schema, schema_of
from memvault.database.glancing import GlanceConnections
from memvault.database.prepared import Prepared
from memvault.database.translate import database_errors
from memvault.database.unit import Unit
from memvault.errors import ConfigurationError, StorageError

T = TypeVar("T")

ATTEMPTS = 8
LONGEST_PAUSE_S = 0.5
"""How often a transaction that PostgreSQL undid for another's sake is run again, and the pause before the last time."""

FORK_WAIT_S = 2.0
"""How long a fork waits for the transactions of other threads on a SQLite file."""

Step = Callable[[Unit], None]


class Transactions(Protocol):
    """Where a store's work runs: in transactions of its own, or within one that somebody else commits."""

    user_id: str
    divides: bool
    """Whether a long piece of work may be done in several transactions, each of which stays."""

    def read(self, work: Callable[[Unit], T]) -> T:
        """Run work that only reads, in one snapshot."""
        ...

    def peek(self, work: Callable[[Unit], T]) -> T:
        """Run work that only reads, and begin nothing for its sake: where no transaction is open yet, in one that is
        over when it returns. What this transaction has not committed may be missing."""
        ...

    def glance(self, prepared: Prepared, values: Sequence[Any]) -> list[Any] | None:
        """The rows of one statement by itself; None where a transaction is open, or may be, which sees other rows."""
        ...

    def write(self, work: Callable[[Unit], T]) -> T:
        """Run work that writes: it happens whole or, when it raises, not at all. It may run more than once."""
        ...


class Database:
    """The engine, and the transactions that are begun on it."""

    def __init__(self, engine: Engine, schema_name: str | None = None) -> None:
        """``schema_name``: of our tables, where it is not the engine's (see `memvault.create_engine`)."""
        self.engine = in_schema(engine, schema_name)
        self.schema_name = schema_of(self.engine)
        self.mirror: Step = _nothing
        """What each write does last in its transaction, for an index in the same database."""
        self.closed = False
        self._writing: set[int] = set()
        """Threads that began a write; whoever ends it, on whichever thread, takes them out."""
        self._joined: dict[int, weakref.ref[Session]] = {}
        """Threads that wrote through a Session of theirs, which may still hold the lock of a SQLite file."""
        self._running: list[int] = []
        """The thread of each transaction that is open; those through a caller's Session are not known here."""
        self._admitting = threading.Event()
        self._admitting.set()
        self._glancing = GlanceConnections(self.engine)
        forking.follow(self)

    def close(self) -> None:
        """Begin nothing any more. The engine is whoever's made it."""
        self.closed = True
        self._glancing.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read-only transaction: one snapshot."""
        with self._connection(read_only=True) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that commits at the end and rolls back on any error."""
        thread = threading.get_ident()
        if thread in self._writing:
            raise ConfigurationError(
                "a transaction is open in this thread, and a second one would wait for it for ever: write through the "
                "handle that transaction() gave, or end it first"
            )
        self._refuse_waiting_for_a_session(thread)
        with self._connection(read_only=False) as connection:
            self._writing.add(thread)
            try:
                yield connection
            finally:
                self._writing.discard(thread)

    def joined_by(self, session: Session) -> None:
        """Note that this thread's Session is in a transaction that may write."""
        if self.engine.dialect.name == "sqlite":
            self._joined[threading.get_ident()] = weakref.ref(session)

    def _refuse_waiting_for_a_session(self, thread: int) -> None:
        session = joined() if (joined := self._joined.get(thread)) is not None else None
        if session is not None and session.in_transaction():
            raise ConfigurationError(
                "an sql_session of this thread is in a transaction, and holds the database's write lock; write through "
                "the handle of for_user(…, sql_session=…), or commit or roll it back first"
            )
        self._joined.pop(thread, None)

    def glance(self, prepared: Prepared, user_id: str, values: Sequence[Any]) -> list[Any]:
        """The rows of a statement that is all there is to be read."""
        with self._admitted(), database_errors():
            return prepared.alone(self.engine, self._glancing, user_id, values)

    def read_for(self, user_id: str, work: Callable[[Unit], T]) -> T:
        """Run one user's work that only reads, in a transaction of its own."""
        with self.reading() as connection:
            unit = Unit(connection, user_id)
            unit.is_snapshot = True
            return work(unit)

    @contextmanager
    def _connection(self, *, read_only: bool) -> Iterator[Connection]:
        options: dict[str, Any] = {READ_ONLY: read_only}
        if self.engine.dialect.name == "postgresql":
            options.update(postgres.READING if read_only else postgres.WRITING)
        with (
            self._admitted(),
            database_errors(),
            self.engine.connect().execution_options(**options) as connection,
            connection.begin(),
        ):
            yield connection

    # Around a fork. A SQLite file that is open in the moment of a fork is a danger to both: the child's copy of the
    # library believes that it holds locks which are the parent's, and takes what it shares with later connections for
    # granted. So none is open then. Connections to a server are merely not used by the child.

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self.closed:
            raise StorageError("this StorageLayer is closed; open another")
        thread = threading.get_ident()
        self._running.append(thread)
        while not self._admitting.is_set():
            self._running.remove(thread)
            self._admitting.wait()
            self._running.append(thread)
        try:
            yield
        finally:
            self._running.remove(thread)

    def before_fork(self) -> None:
        self._admitting.clear()
        if self.engine.dialect.name != "sqlite":
            return
        deadline = time.monotonic() + FORK_WAIT_S
        while any(thread != threading.get_ident() for thread in self._running) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.engine.dispose()

    def after_fork_in_parent(self) -> None:
        self._admitting.set()

    def after_fork_in_child(self) -> None:
        self.engine.dispose(close=False)
        self._glancing = GlanceConnections(self.engine)  # those of the parent are not this process's to close
        self._running = [thread for thread in self._running if thread == threading.get_ident()]
        self._writing &= set(self._running)
        self._joined.clear()
        self._admitting = threading.Event()
        self._admitting.set()


class OwnTransactions:
    """Each piece of work in a transaction of its own; ``committed`` is called with it after its commit."""

    divides = True

    def __init__(self, database: Database, user_id: str, committed: Callable[[Unit], None]) -> None:
        self.user_id = user_id
        self._database = database
        self._committed = committed

    def read(self, work: Callable[[Unit], T]) -> T:
        return self._database.read_for(self.user_id, work)

    def peek(self, work: Callable[[Unit], T]) -> T:
        return self.read(work)

    def glance(self, prepared: Prepared, values: Sequence[Any]) -> list[Any] | None:
        return self._database.glance(prepared, self.user_id, values)

    def write(self, work: Callable[[Unit], T]) -> T:
        attempt = 1
        while True:
            try:
                unit, result = self._write(work)
                break
            except StorageError as error:
                if attempt == ATTEMPTS or not postgres.was_rolled_back(error.__cause__):
                    raise
                time.sleep(random.uniform(0, LONGEST_PAUSE_S * 2.0 ** (attempt - ATTEMPTS)))
                attempt += 1
        self._committed(unit)
        return result

    def _write(self, work: Callable[[Unit], T]) -> tuple[Unit, T]:
        with self._database.writing() as connection:
            unit = Unit(connection, self.user_id)
            return unit, done_by(work, unit, self._database)

    @contextmanager
    def joined(self) -> Iterator[JoinedTransaction]:
        """One transaction around everything done with what is yielded. It begins with the first use."""
        joined = JoinedTransaction(self._database, self.user_id)
        try:
            yield joined
        except BaseException as error:
            joined.end(error)
            raise
        if (unit := joined.end(None)) is not None:
            self._committed(unit)


class JoinedTransaction:
    """Several pieces of work in one transaction, each behind a savepoint."""

    divides = False

    def __init__(self, database: Database, user_id: str) -> None:
        self.user_id = user_id
        self._database = database
        self._context: Any = None
        self._unit: Unit | None = None
        self._ended = False

    def read(self, work: Callable[[Unit], T]) -> T:
        with database_errors():
            return work(self._begun())

    def peek(self, work: Callable[[Unit], T]) -> T:
        if self._unit is not None:
            return self.read(work)
        return self._database.read_for(self.user_id, work)

    def glance(self, prepared: Prepared, values: Sequence[Any]) -> list[Any] | None:
        return None

    def write(self, work: Callable[[Unit], T]) -> T:
        unit = self._begun()
        with database_errors(), unit.savepoint():
            return done_by(work, unit, self._database)

    def end(self, error: BaseException | None) -> Unit | None:
        """Commit, or roll back for ``error``. None where nothing was begun."""
        self._ended = True
        if self._unit is None:
            return None
        if error is None and self._unit.lost:
            error = _lost()
            self._context.__exit__(type(error), error, None)
            raise error
        if error is None:
            self._context.__exit__(None, None, None)
        else:
            try:
                self._context.__exit__(type(error), error, error.__traceback__)
            except StorageError as translated:
                if translated.__cause__ is not error:  # else the caller's own error, from a database of the caller's
                    raise
        return self._unit

    def _begun(self) -> Unit:
        if self._ended:
            raise ConfigurationError("this transaction has ended; use the handle that for_user gave")
        if self._unit is None:
            self._context = self._database.writing()
            self._unit = Unit(self._context.__enter__(), self.user_id)
        if self._unit.lost:
            raise _lost()
        return self._unit


def done_by(work: Callable[[Unit], T], unit: Unit, database: Database) -> T:
    """A piece of work that writes, with what belongs before and after it in the same transaction."""
    unit.lock_owner()
    result = work(unit)
    if unit.revectored:
        database.mirror(unit)
        unit.revectored.clear()
    unit.save_owner()
    return result


def _nothing(_: Unit) -> None:
    """A vault whose index lies elsewhere, or needs none."""


def _lost() -> StorageError:
    return StorageError("the database rolled this whole transaction back after an error; begin another")
