"""How does a filter become SQL?"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Table, and_, false, func, or_, true

from memvault.filters import FIELDS, And, Comparison, Constant, Filter, Or


def compile_where(where: Filter, table: Table) -> ColumnElement[bool]:
    """The filter as a condition on the table's columns of the same names; every value is bound."""
    match where:
        case Constant(value):
            return true() if value else false()
        case And(parts=parts):
            return and_(*(compile_where(part, table) for part in parts))
        case Or(parts=parts):
            return or_(*(compile_where(part, table) for part in parts))
        case Comparison():
            return _compile_comparison(where, table.c[where.field])
        case _:
            raise NotImplementedError(f"a filter of kind {type(where).__name__}")


def _compile_comparison(comparison: Comparison, column: ColumnElement[Any]) -> ColumnElement[bool]:
    value: Any = comparison.value
    condition: ColumnElement[bool]
    match comparison.operator:
        case "==" if value is None:
            return column.is_(None)
        case "!=" if value is None:
            return column.is_not(None)
        case "in" | "not in":
            condition = column.in_(value) if comparison.operator == "in" else column.not_in(value)
        case "==":
            condition = column == value
        case "!=":
            condition = column != value
        case "<":
            condition = column < value
        case "<=":
            condition = column <= value
        case ">":
            condition = column > value
        case ">=":
            condition = column >= value
    if FIELDS[comparison.field].nullable:
        # SQL's third truth value would make a filter and its negation both miss the empty ones.
        missing = true() if comparison.operator in ("!=", "not in") else false()
        return func.coalesce(condition, missing)
    return condition
