"""How does one migration keep all others out, and commit whole or not at all?

On SQLite the transaction begins IMMEDIATE: the file's write lock is held before the revision is read. On PostgreSQL an
advisory lock, one for each schema, is held on a connection of its own for as long as the migration takes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, exc, func, inspect, select, text
from sqlalchemy.schema import CreateSchema

from memvault.database.base import table_names
from memvault.database.engine import schema_of
from memvault.database.postgres import INSUFFICIENT_PRIVILEGE, forget_values, sqlstate
from memvault.errors import SchemaError, StorageError

log = logging.getLogger("memvault.migrate")

POLL_S = 0.1
PATIENCE_S = 600.0
"""How long a migration waits for another one. Longer ones exist, but a deploy that hangs tells nobody why."""


@contextmanager
def exclusive(connection: Connection) -> Iterator[None]:
    """A transaction that no other migration of the same vault runs beside."""
    if connection.dialect.name == "sqlite":
        with _on_sqlite(connection):
            yield
    else:
        with _on_postgres(connection):
            yield


@contextmanager
def _on_sqlite(connection: Connection) -> Iterator[None]:
    """Foreign keys are checked at the end instead of on the way: batch migrations drop and rename parent tables."""
    _foreign_keys(connection, "OFF")
    try:
        with connection.begin():
            yield
            if broken := _orphans(connection):
                raise SchemaError(
                    f"the migration would leave {len(broken)} rows without their parent, e.g. {broken[0]}"
                )
    finally:
        _foreign_keys(connection, "ON")


def _foreign_keys(connection: Connection, state: str) -> None:
    # Inside a transaction the pragma does nothing, and SQLAlchemy would begin one: hence on the driver's connection.
    driver_connection: Any = connection.connection.dbapi_connection
    driver_connection.execute(f"PRAGMA foreign_keys = {state}")


def _orphans(connection: Connection) -> list[Any]:
    """Rows without their parent, where either is ours: a host may keep its own as it likes."""
    ours = table_names()
    rows = connection.exec_driver_sql("PRAGMA foreign_key_check")
    return [row for row in rows if row[0] in ours or row[2] in ours]


@contextmanager
def _on_postgres(connection: Connection) -> Iterator[None]:
    schema = schema_of(connection)
    try:
        with _advisory_lock(connection, schema), connection.begin():
            if schema is not None:
                _enter_schema(connection, schema)
            yield
    except exc.DBAPIError as error:
        if sqlstate(error) != INSUFFICIENT_PRIVILEGE:
            raise
        forget_values(error)
        role, default = _who_and_where(connection)
        raise SchemaError(
            f"the role {role} may not change the schema: {error.orig}. An administrator can run: "
            f"GRANT USAGE, CREATE ON SCHEMA {quoted(schema or default)} TO {role}"
        ) from error


def _enter_schema(connection: Connection, schema: str) -> None:
    """Make the schema, if need be, and let the revisions, which name none, go there: for this transaction only."""
    there = connection.execute(text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": schema}).first()
    if there is None:
        try:
            connection.execute(CreateSchema(schema))
        except exc.DBAPIError as error:
            if sqlstate(error) != INSUFFICIENT_PRIVILEGE:
                raise
            role, _ = _who_and_where(connection)
            raise SchemaError(
                f"there is no schema {schema!r} in this database, and the role {role} may not make it. An "
                f"administrator can run: CREATE SCHEMA {quoted(schema)} AUTHORIZATION {role}"
            ) from error
    connection.execute(select(func.set_config("search_path", quoted(schema), True)))


def relations(connection: Connection) -> set[str]:
    """What has a name that a table of ours could not have beside it, in the schema that the migration is for."""
    if connection.dialect.name == "sqlite":
        inspector = inspect(connection)
        names = {*inspector.get_table_names(), *inspector.get_view_names()}
        return {name.lower() for name in names}  # SQLite's names differ in more than case, or not at all
    # Views, sequences, indexes and foreign tables share one namespace with tables; an inspector tells of some.
    statement = (
        "SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace "
        "WHERE nspname = current_schema()"
    )
    return set(connection.execute(text(statement)).scalars())


def _who_and_where(connection: Connection) -> tuple[str, str]:
    """The role, quoted, and the schema of tables that name none; asked on a connection that still answers."""
    with connection.engine.connect() as other:
        row = other.execute(text("SELECT quote_ident(current_user), coalesce(current_schema(), 'public')")).one()
    return row[0], row[1]


def quoted(name: str) -> str:
    """As PostgreSQL reads it. SQLAlchemy's own would also double a %, for statements with parameters."""
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def _advisory_lock(connection: Connection, schema: str | None) -> Iterator[None]:
    """Polled, on a connection without a transaction: one that waits in a statement would hold up CREATE INDEX
    CONCURRENTLY, which waits for every older snapshot."""
    digest = hashlib.sha256(f"memvault migrations {schema or ''}".encode()).digest()
    key = int.from_bytes(digest[:8], "big", signed=True)
    with connection.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as side:
        deadline = time.monotonic() + PATIENCE_S
        waited = False
        while not side.execute(select(func.pg_try_advisory_lock(key))).scalar_one():
            if not waited:
                log.info("another process migrates this database; waiting for it")
                waited = True
            if time.monotonic() > deadline:
                raise StorageError(
                    f"another migration of this database has not ended within {PATIENCE_S:.0f} s; look for its process",
                    retryable=True,
                )
            time.sleep(POLL_S)
        try:
            yield
        finally:
            side.execute(select(func.pg_advisory_unlock(key)))
