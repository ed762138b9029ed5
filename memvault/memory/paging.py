"""How is a list cut into pages that neither repeat nor lose a row while others write?"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, tuple_

from memvault.database.unit import Unit
from memvault.errors import ValidationError
from memvault.text import check_choice, check_integer, shown
from memvault.values import Page

T = TypeVar("T")

ORDERS = ("created", "-created")
"""Oldest first, newest first."""


def check_paging(order: object, limit: object, after: object) -> None:
    check_choice(order, "order", ORDERS)
    check_integer(limit, "limit", minimum=1)
    if after is not None:
        _decode(after)


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
        position = _decode(after)
        if len(position) != len(keys):
            raise _bad_cursor(after)
        here, there = tuple_(*keys), tuple_(*position)
        statement = statement.where(here < there if descending else here > there)
    statement = statement.order_by(*(key.desc() if descending else key.asc() for key in keys)).limit(limit + 1)
    rows = unit.execute(statement).all()
    items = [convert(row) for row in rows[:limit]]
    more = len(rows) > limit
    return Page[T](items=items, next=_encode([rows[limit - 1]._mapping[key] for key in keys]) if more else None)


def _encode(position: Sequence[Any]) -> str:
    parts = [{"t": part.isoformat()} if isinstance(part, datetime) else part for part in position]
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def _decode(cursor: object) -> list[Any]:
    if not isinstance(cursor, str):
        raise _bad_cursor(cursor)
    try:
        parts = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        position = [datetime.fromisoformat(part["t"]) if isinstance(part, dict) else part for part in parts]
    except (ValueError, KeyError, TypeError, binascii.Error) as exc:
        raise _bad_cursor(cursor) from exc
    if not all(isinstance(part, str) or (isinstance(part, datetime) and part.tzinfo is UTC) for part in position):
        raise _bad_cursor(cursor)
    return position


def _bad_cursor(cursor: object) -> ValidationError:
    return ValidationError(f"after must be the .next of an earlier page of the same list, got {shown(cursor)}")
