"""How is a statement of the hot path run without being built and compiled each time?

To build a SELECT of a handful of rows takes SQLAlchemy longer than to run it. Here it is built once, by the same `Unit`
that writes the owner into every statement, compiled for the database, and run with other values by the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Dialect, Select
from sqlalchemy.types import TypeEngine

from memvault.database.base import SCHEMA
from memvault.database.engine import schema_of
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
        compiled = self._compiled(connection.dialect, schema_of(connection), tuple(map(type, values)))
        bound: Any
        if isinstance(compiled.places, dict):
            bound = {name: _value(what, unit.user_id, values) for name, what in compiled.places.items()}
        else:
            bound = tuple([_value(what, unit.user_id, values) for what in compiled.places])
        result = connection.exec_driver_sql(compiled.sql, bound, execution_options=options and dict(options))
        cursor = result.cursor  # SQLAlchemy would make a Row of each, which of thousands takes longer than the database
        assert cursor is not None
        rows = cursor.fetchall()
        converters = compiled.converters_for(connection.dialect, cursor.description)
        result.close()
        if not converters:
            return list(rows)
        converted = []
        for row in rows:
            cells = list(row)
            for place, convert in converters:
                cells[place] = convert(cells[place])
            converted.append(cells)
        return converted

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

    def converters_for(
        self, dialect: Dialect, description: Sequence[Sequence[Any]]
    ) -> list[tuple[int, Callable[[Any], Any]]]:
        """What the values in which column have to go through; the database says once of which types they are."""
        if self.converters is None:
            self.converters = [
                (place, convert)
                for place, (kind, column) in enumerate(zip(self.types, description, strict=True))
                if (convert := kind.dialect_impl(dialect).result_processor(dialect, column[1])) is not None
            ]
        return self.converters


def _meaning(value: Any, meanings: Mapping[Any, tuple[str, Any]]) -> tuple[str, Any]:
    return meanings.get(value, ("constant", value)) if isinstance(value, str | int) else ("constant", value)


def _value(what: tuple[str, Any], owner: str, values: Sequence[Any]) -> Any:
    kind, detail = what
    if kind == "value":
        return values[detail]
    return owner if kind == "owner" else detail
