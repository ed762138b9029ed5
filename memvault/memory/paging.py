"""How is a list cut into pages that neither repeat nor lose a row while others write?"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, tuple_

from memvault.database.base import UtcDateTime
from memvault.database.unit import Unit
from memvault.errors import ValidationError
from memvault.text import MAX_INTEGER, check_choice, check_identifier, check_integer, check_time, shown
from memvault.values import Page

T = TypeVar("T")

ORDERS = ("created", "-created")
"""Oldest first, newest first."""


def check_paging(keys: Sequence[ColumnElement[Any]], order: object, limit: object, after: object) -> None:
    """Check a list's arguments; ``keys`` are the columns it is ordered by."""
    check_choice(order, "order", ORDERS)
    check_integer(limit, "limit", minimum=1)
    if after is not None:
        _decode(after, keys)


def keyset_page(
    unit: Unit,
    statement: Select[Any],
    keys: Sequence[ColumnElement[Any]],
    convert: Callable[[Any], T],
    *,
    order: str,
    limit: int,
    after: str | None,
) -> Page[T]:
    """One page of a statement, ordered by ``keys``, whose last is unique; they are among its columns.

    A cursor holds the last row's keys, so rows that come or go meanwhile shift nothing.
    """
    descending = order.startswith("-")
    if after is not None:
        position = _decode(after, keys)
        here, there = tuple_(*keys), tuple_(*position)
        statement = statement.where(here < there if descending else here > there)
    statement = statement.order_by(*(key.desc() if descending else key.asc() for key in keys)).limit(
        min(limit, MAX_INTEGER - 1) + 1
    )
    rows = unit.execute(statement).all()
    items = [convert(row) for row in rows[:limit]]
    more = len(rows) > limit
    return Page[T](items=items, next=_encode([rows[limit - 1]._mapping[key] for key in keys]) if more else None)


def _encode(position: Sequence[Any]) -> str:
    parts = [{"t": part.isoformat()} if isinstance(part, datetime) else part for part in position]
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def _decode(cursor: object, keys: Sequence[ColumnElement[Any]]) -> list[Any]:
    if not isinstance(cursor, str):
        raise _bad_cursor(cursor)
    try:
        parts = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not isinstance(parts, list):
            raise _bad_cursor(cursor)
        return [_position(part, key) for part, key in zip(parts, keys, strict=True)]
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as exc:
        raise _bad_cursor(cursor) from exc


def _position(part: Any, key: ColumnElement[Any]) -> Any:
    if isinstance(key.type, UtcDateTime):
        return check_time(datetime.fromisoformat(part["t"]), "after")
    return check_identifier(part, "after")


def _bad_cursor(cursor: object) -> ValidationError:
    return ValidationError(f"after must be the .next of an earlier page of the same list, got {shown(cursor)}")
