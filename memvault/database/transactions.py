"""Where does a unit of work run? In a transaction of its own, or in one that somebody else commits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine

from memvault.database.engine import READ_ONLY
from memvault.database.translate import database_errors
from memvault.database.unit import Unit
from memvault.errors import ConfigurationError, StorageError

T = TypeVar("T")


class Transactions(Protocol):
    """Where a store's work runs: in transactions of its own, or within one that somebody else commits."""

    user_id: str
    divides: bool
    """Whether a long piece of work may be done in several transactions, each of which stays."""

    def read(self, work: Callable[[Unit], T]) -> T:
        """Run work that only reads, in one snapshot."""
        ...

    def write(self, work: Callable[[Unit], T]) -> T:
        """Run work that writes: it happens whole or, when it raises, not at all."""
        ...


class Database:
    """The engine, and the transactions that are begun on it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        self._writing: set[int] = set()
        """Threads that began a write; whoever ends it, on whichever thread, takes them out."""

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
        with self._connection(read_only=False) as connection:
            self._writing.add(thread)
            try:
                yield connection
            finally:
                self._writing.discard(thread)

    @contextmanager
    def _connection(self, *, read_only: bool) -> Iterator[Connection]:
        if self.closed:
            raise StorageError("this StorageLayer is closed; open another")
        options: dict[str, Any] = {READ_ONLY: read_only}
        with (
            database_errors(),
            self.engine.connect().execution_options(**options) as connection,
            connection.begin(),
        ):
            yield connection


class OwnTransactions:
    """Each piece of work in a transaction of its own; ``committed`` is called with it after its commit."""

    divides = True

    def __init__(self, database: Database, user_id: str, committed: Callable[[Unit], None]) -> None:
        self.user_id = user_id
        self._database = database
        self._committed = committed

    def read(self, work: Callable[[Unit], T]) -> T:
        with self._database.reading() as connection:
            return work(Unit(connection, self.user_id))

    def write(self, work: Callable[[Unit], T]) -> T:
        with self._database.writing() as connection:
            unit = Unit(connection, self.user_id)
            unit.lock_owner()
            result = work(unit)
            unit.save_owner()
        self._committed(unit)
        return result

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

    def write(self, work: Callable[[Unit], T]) -> T:
        unit = self._begun()
        with database_errors(), unit.savepoint():
            unit.lock_owner()
            result = work(unit)
            unit.save_owner()
        return result

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


def _lost() -> StorageError:
    return StorageError("the database rolled this whole transaction back after an error; begin another")
