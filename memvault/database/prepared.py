"""How is a statement of the hot path run without being built and compiled each time?

To build a SELECT of a handful of rows takes SQLAlchemy longer than to run it. Here it is built once, by the same `Unit`
that writes the owner into every statement, compiled for the database, and run with other values by the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Dialect, Engine, Select, exc
from sqlalchemy.types import TypeEngine

from memvault.database.base import SCHEMA
from memvault.database.engine import schema_of
from memvault.database.glancing import GlanceConnections
from memvault.database.unit import Unit

_OWNER = "\x00owner"
"""Stands for the owner while a statement is built; no user id contains a NUL."""


class Prepared:
    """A SELECT of one user's rows, into which texts and whole numbers are bound."""

    def __init__(self, build: Callable[[Unit, Sequence[Any]], Select[Any]]) -> None:
        """``build`` makes the statement for the values that it is given; with stand-ins of the same types, and so it
        must do nothing with them but to bind them. Other values in it must be none that the driver wants converted."""
        self._build = build
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def rows(self, unit: Unit, values: Sequence[Any] = (), options: Mapping[str, Any] | None = None) -> list[Any]:
        """The rows, as sequences of what SQLAlchemy's types make of the driver's values."""
        connection = unit.connection
        compiled, bound = self._bound(connection.dialect, schema_of(connection), unit.user_id, values)
        result = connection.exec_driver_sql(compiled.sql, bound, execution_options=options and dict(options))
        cursor = result.cursor  # SQLAlchemy would make a Row of each, which of thousands takes longer than the database
        assert cursor is not None
        rows = compiled.fetched(cursor, connection.dialect)
        result.close()
        return rows

    def alone(
        self, engine: Engine, connections: GlanceConnections, user_id: str, values: Sequence[Any] = ()
    ) -> list[Any]:
        """As `rows`, where this one statement is all that is read: it needs no transaction around it."""
        dialect = engine.dialect
        compiled, bound = self._bound(dialect, schema_of(engine), user_id, values)
        if dialect.name != "sqlite":
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                cursor = connection.exec_driver_sql(compiled.sql, bound).cursor
                assert cursor is not None
                return compiled.fetched(cursor, dialect)
        # Past SQLAlchemy's Connection: it would take ten times as long as SQLite.
        with connections.lend() as connection:
            cursor = connection.cursor()
            for listener in engine.dispatch.before_cursor_execute:  # whoever watches statements sees this one, too
                listener(None, cursor, compiled.sql, bound, None, False)
            try:
                cursor.execute(compiled.sql, bound)
                return compiled.fetched(cursor, dialect)
            except dialect.loaded_dbapi.Error as error:
                raise exc.DBAPIError.instance(
                    compiled.sql, None, error, dialect.loaded_dbapi.Error, hide_parameters=True
                ) from error

    def _bound(self, dialect: Dialect, schema: str | None, owner: str, values: Sequence[Any]) -> tuple[_Compiled, Any]:
        compiled = self._compiled(dialect, schema, tuple(map(type, values)))
        if isinstance(compiled.places, dict):
            return compiled, {name: _value(what, owner, values) for name, what in compiled.places.items()}
        return compiled, tuple([_value(what, owner, values) for what in compiled.places])

    def _compile(self, dialect: Dialect, schema: str | None, kinds: Sequence[type]) -> _Compiled:
        stand_ins = [f"\x00{place}" if kind is str else -(2**62) - place for place, kind in enumerate(kinds)]
        # A unit without a connection can build, and nothing else.
        statement = self._build(Unit(None, _OWNER), stand_ins)  # type: ignore[arg-type]
        compiled = statement.compile(
            dialect=dialect,
            schema_translate_map={SCHEMA: schema},
            render_schema_translate=True,
            compile_kwargs={"render_postcompile": True},
        )
        meanings: dict[Any, tuple[str, Any]] = {_OWNER: ("owner", None)}
        meanings.update((stand_in, ("value", place)) for place, stand_in in enumerate(stand_ins))
        named: dict[str, Any] = {name: _meaning(value, meanings) for name, value in compiled.params.items()}
        positions = getattr(compiled, "positiontup", None)
        places = named if positions is None else [named[name] for name in positions]
        return _Compiled(str(compiled), places, [column.type for column in statement.selected_columns])


@dataclass
class _Compiled:
    """A statement as the driver takes it: ``places`` says what is bound to each parameter, by name or by position."""

    sql: str
    places: dict[str, tuple[str, Any]] | list[tuple[str, Any]]
    types: list[TypeEngine[Any]]
    converters: list[tuple[int, Callable[[Any], Any]]] | None = None

    def fetched(self, cursor: Any, dialect: Dialect) -> list[Any]:
        """All rows of a cursor, their values made by SQLAlchemy's types."""
        rows = cursor.fetchall()
        if self.converters is None:  # the database has said once now of which types its columns are
            self.converters = [
                (place, convert)
                for place, (kind, column) in enumerate(zip(self.types, cursor.description, strict=True))
                if (convert := kind.dialect_impl(dialect).result_processor(dialect, column[1])) is not None
            ]
        if not self.converters:
            return list(rows)
        converted = []
        for row in rows:
            cells = list(row)
            for place, converter in self.converters:
                cells[place] = converter(cells[place])
            converted.append(cells)
        return converted


def _meaning(value: Any, meanings: Mapping[Any, tuple[str, Any]]) -> tuple[str, Any]:
    return meanings.get(value, ("constant", value)) if isinstance(value, str | int) else ("constant", value)


def _value(what: tuple[str, Any], owner: str, values: Sequence[Any]) -> Any:
    kind, detail = what
    if kind == "value":
        return values[detail]
    return owner if kind == "owner" else detail
