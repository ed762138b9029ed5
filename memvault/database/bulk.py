"""How are many rows inserted quickly? As tuples, by the driver's own executemany.

SQLAlchemy's Core looks at each row's dictionary anew, which takes longer than SQLite's insert itself. The statement and
the conversion of values are still Core's, made once for each table and set of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Dialect, Table
from sqlalchemy.dialects import postgresql, sqlite

from memvault.database.base import SCHEMA

Converter = Callable[[Any], Any] | None


def upsert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that can say ON CONFLICT, in the database's own dialect."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def insert_rows(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, ignoring: bool = False, **same: Any
) -> int:
    """Insert rows that all have the same keys; ``same`` are values that every row has.

    ``ignoring``: rows whose keys are taken are left out. Returns how many were inserted.
    """
    statement = upsert(connection, table)
    if ignoring:
        statement = statement.on_conflict_do_nothing()
    if connection.dialect.name != "sqlite":
        # SQLAlchemy forgets the count of an INSERT unless told.
        return connection.execute(
            statement, [{**row, **same} for row in rows], execution_options={"preserve_rowcount": True}
        ).rowcount
    sql, names, converters = _compiled(connection.dialect, table, (*rows[0], *same), ignoring)
    columns = [
        _column(rows, name, convert) if name not in same else [_converted(same[name], convert)] * len(rows)
        for name, convert in zip(names, converters, strict=True)
    ]
    return connection.exec_driver_sql(sql, list(zip(*columns, strict=True))).rowcount


def _column(rows: Sequence[Mapping[str, Any]], name: str, convert: Converter) -> list[Any]:
    if convert is None:
        return [row[name] for row in rows]
    return [convert(row[name]) for row in rows]


def _converted(value: Any, convert: Converter) -> Any:
    return value if convert is None else convert(value)


@lru_cache(maxsize=64)
def _compiled(
    dialect: Dialect, table: Table, names: tuple[str, ...], ignoring: bool
) -> tuple[str, tuple[str, ...], tuple[Converter, ...]]:
    """The statement, the columns in the order of its placeholders, and what the driver wants their values to be."""
    statement = sqlite.insert(table)
    if ignoring:
        statement = statement.on_conflict_do_nothing()
    compiled = statement.compile(
        dialect=dialect,
        column_keys=list(names),
        schema_translate_map={SCHEMA: None},
        render_schema_translate=True,
    )
    placed = tuple(compiled.positiontup or ())
    return (
        str(compiled),
        placed,
        tuple(table.c[name].type.dialect_impl(dialect).bind_processor(dialect) for name in placed),
    )
