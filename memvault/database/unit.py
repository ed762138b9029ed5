"""What is one transaction of one user? The owner guard, the owner's row, and what happens after commit.

Every statement on an owned table is built by `Unit.select`, `update`, `delete` or `insert`, and these alone write the
owner into it: there is no second place where a predicate could be forgotten.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    ColumnElement,
    Connection,
    Delete,
    FromClause,
    Select,
    Table,
    Update,
    bindparam,
    delete,
    select,
    update,
)
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import visitors
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.selectable import AliasedReturnsRows

from memvault.database.base import OWNERS, is_owned
from memvault.database.batches import batches
from memvault.database.bulk import insert_rows, upsert
from memvault.errors import StorageError

EPOCHS_PER_OWNER = 1 << 32
"""Room for changes of one owner in the keys by which vectors are clustered: ``number * EPOCHS_PER_OWNER + epoch``."""


class _Unindexed(ColumnElement[Any]):
    """A column that the planner shall not look up: rows are found by the other condition.

    With ``id IN (…) AND user_id = ?`` SQLite reads the user's whole index; the unary plus keeps it on the ids.
    """

    inherit_cache = True
    __visit_name__ = "memvault_unindexed"
    _traverse_internals = [  # noqa: RUF012 - SQLAlchemy's protocol of cacheable elements
        ("column", visitors.InternalTraversal.dp_clauseelement)
    ]

    def __init__(self, column: ColumnElement[Any]) -> None:
        self.column = column
        self.type = column.type


@compiles(_Unindexed)
def _plain(element: _Unindexed, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(element.column, **kw)


@compiles(_Unindexed, "postgresql")
def _appended(element: _Unindexed, compiler: SQLCompiler, **kw: Any) -> str:
    # Before its first ANALYZE PostgreSQL would read all of the user's rows for each of the ids.
    return f"({compiler.process(element.column, **kw)} || '')"


@compiles(_Unindexed, "sqlite")
def _plus(element: _Unindexed, compiler: SQLCompiler, **kw: Any) -> str:
    return f"+{compiler.process(element.column, **kw)}"


def owner_is(table: Table, user_id: str, *, by_key: bool = False) -> ColumnElement[bool]:
    """The predicate: this table's rows of this user. ``by_key``: another condition finds the rows faster."""
    column: ColumnElement[Any] = _Unindexed(table.c.user_id) if by_key else table.c.user_id
    return column == bindparam("owner", user_id, unique=True)


@dataclass
class LockedOwner:
    """The owner's row while a transaction holds it. Changes reach the database by `Unit.save_owner`."""

    number: int
    incarnation: str
    epoch: int
    removed_epoch: int
    vector_count: int
    default_session_id: str | None

    def next_epochs(self, count: int, *, removing: bool = False) -> range:
        """Raise the epoch by ``count`` and return the epochs that came by."""
        first = self.epoch + 1
        self.epoch += count
        if removing and count:
            self.removed_epoch = self.epoch
        if self.epoch >= EPOCHS_PER_OWNER:
            raise StorageError("this user's memories were changed 4 billion times; export, erase and import the user")
        return range(first, self.epoch + 1)


_CHANGING = ("epoch", "removed_epoch", "vector_count", "default_session_id")
_LOCK_OWNER = (
    select(*(column for column in OWNERS.c if column.name != "user_id"))
    .where(OWNERS.c.user_id == bindparam("owner"))
    .with_for_update()
)
_SAVE_OWNER = (
    update(OWNERS).where(OWNERS.c.user_id == bindparam("owner")).values({name: bindparam(name) for name in _CHANGING})
)


class Unit:
    """One transaction, for one user."""

    def __init__(self, connection: Connection, user_id: str) -> None:
        self.connection = connection
        self.user_id = user_id
        self.owed: set[str] = set()
        """Chunks whose debts this transaction marked; paid after its commit."""
        self.revectored: dict[str, NDArray[np.float32] | None] = {}
        """Chunks' new vectors, None for those that lost theirs, since the index in this database was last told."""
        self.fixed_dimension: int | None = None
        """The vault's dimension, where this transaction brought its first vector."""
        self.is_snapshot = False
        """Whether this transaction sees committed rows alone, as they were at one moment: what it reads may be kept."""
        self.lost = False
        """The database itself rolled this transaction back; what comes after would be committed piece by piece."""
        self._owner: LockedOwner | None = None
        self._saved: LockedOwner | None = None

    # Statements on owned tables.

    def select(self, *columns: Any, frm: FromClause, by_key: bool = False) -> Select[Any]:
        statement = select(*columns).select_from(frm)
        for table in _owned_in(frm):
            statement = statement.where(owner_is(table, self.user_id, by_key=by_key))
        return statement

    def update(self, table: Table, *, by_key: bool = False) -> Update:
        return update(table).where(owner_is(table, self.user_id, by_key=by_key))

    def delete(self, table: Table, *, by_key: bool = False) -> Delete:
        return delete(table).where(owner_is(table, self.user_id, by_key=by_key))

    def insert(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows, all with the same keys, for this user."""
        if rows:
            insert_rows(self.connection, table, rows, user_id=self.user_id)

    def insert_new(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> int:
        """Insert the rows whose keys are free; how many those were. No error aborts the transaction."""
        return insert_rows(self.connection, table, rows, ignoring=True, user_id=self.user_id) if rows else 0

    def execute(self, statement: Any, parameters: Any = None) -> CursorResult[Any]:
        return self.connection.execute(statement, parameters)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """What fails inside leaves the transaction as it was before."""
        owed, revectored, dimension = set(self.owed), dict(self.revectored), self.fixed_dimension
        owner, saved = self._owner, self._saved
        state = dict(vars(owner)) if owner is not None else {}
        nested = self.connection.begin_nested()
        try:
            yield
            nested.commit()
        except BaseException:
            if owner is not None:
                vars(owner).update(state)  # in place: whoever has it at hand goes on with it
            self._owner, self._saved = owner, saved
            self.owed, self.revectored, self.fixed_dimension = owed, revectored, dimension
            if self.connection.invalidated or self._was_rolled_back():
                self.lost = True
            else:
                nested.rollback()
            raise

    def _was_rolled_back(self) -> bool:
        """Whether SQLite ended the transaction by itself, savepoints and all, as it does when the disk is full."""
        driver_connection: Any = self.connection.connection.dbapi_connection
        return self.connection.dialect.name == "sqlite" and not driver_connection.in_transaction

    def owners_of(self, table: Table, ids: Sequence[str]) -> dict[str, str]:
        """Whose rows have these ids: across owners, since a primary key is one for all. Ids nobody has are left out."""
        found: dict[str, str] = {}
        for some in batches(ids):
            statement = select(table.c.id, table.c.user_id).where(table.c.id.in_(some))
            found.update((row.id, row.user_id) for row in self.connection.execute(statement))
        return found

    # The owner's row.

    def lock_owner(self) -> LockedOwner:
        """The first thing that every write does: epoch order is commit order, and no two writes deadlock."""
        if self._owner is None:
            row = self._read_owner()
            while row is None:
                fresh = {
                    "user_id": self.user_id,
                    "incarnation": secrets.token_hex(16),
                    "epoch": 0,
                    "removed_epoch": 0,
                    "vector_count": 0,
                }
                self.connection.execute(upsert(self.connection, OWNERS).values(fresh).on_conflict_do_nothing())
                row = self._read_owner()
            self._owner, self._saved = LockedOwner(**row), LockedOwner(**row)
        return self._owner

    def lock_known_owner(self) -> None:
        """As `lock_owner`, but nothing is made for a user who has never written, or was erased."""
        self.connection.execute(_LOCK_OWNER, {"owner": self.user_id})

    def save_owner(self) -> None:
        owner = self._owner
        if owner is None or owner == self._saved:
            return
        changed = {name: value for name, value in vars(owner).items() if name in _CHANGING}
        self.connection.execute(_SAVE_OWNER, {"owner": self.user_id, **changed})
        self._saved = LockedOwner(**vars(owner))

    def forget_owner(self) -> None:
        """After the row was deleted."""
        self._owner = self._saved = None

    def _read_owner(self) -> dict[str, Any] | None:
        row = self.connection.execute(_LOCK_OWNER, {"owner": self.user_id}).one_or_none()
        return None if row is None else dict(row._mapping)


def _owned_in(frm: FromClause) -> list[Table]:
    tables = []
    for element in visitors.iterate(frm):
        if isinstance(element, AliasedReturnsRows):
            raise NotImplementedError("an alias or a subquery would need a predicate of its own")
        if isinstance(element, Table) and is_owned(element):
            tables.append(element)
    return tables
