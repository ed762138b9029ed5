"""What may a search or a list be narrowed by?

``F.importance >= 0.5`` and the like build an expression tree; the backends compile it (`database.where`, each vector
index). Its logic has two values: a field that is empty equals nothing but None, is before and after nothing, and
``~`` always gives the exact complement. Negation is pushed down to the comparisons as the tree is built, and what can
match nothing at all becomes `NOTHING`, so that no backend is asked about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from memvault.errors import ValidationError
from memvault.text import check_choice, check_content, check_integer, check_time, shown
from memvault.values import MEMORY_TYPES

Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"]
Scalar = str | int | float | bool | datetime | None

MAX_COMPARISONS = 500
"""SQLite parses expressions of at most 1,000 levels, and a chain of ORs is one level a link."""

MAX_DEPTH = 50
"""Far below where recursion over the tree would end."""

MAX_LISTED = 10_000
"""SQLite binds at most 32,766 values a statement."""

_COMPLEMENT: dict[Operator, Operator] = {
    "==": "!=",
    "!=": "==",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
    "in": "not in",
    "not in": "in",
}
_ORDERING = ("<", "<=", ">", ">=")


class Filter:
    """A condition on chunks; combine with ``&``, ``|`` and ``~``."""

    def __and__(self, other: Filter) -> Filter:
        return _join(And, (self, _checked(other)), absorbing=NOTHING, neutral=EVERYTHING)

    def __or__(self, other: Filter) -> Filter:
        return _join(Or, (self, _checked(other)), absorbing=EVERYTHING, neutral=NOTHING)

    def __invert__(self) -> Filter:
        raise NotImplementedError  # pragma: no cover - every kind of filter says how it is negated

    def __bool__(self) -> bool:
        raise ValidationError(
            "a filter has no truth value of its own: combine filters by &, | and ~ (not and, or, not), each comparison "
            "in parentheses, and write a range as F.field.between(low, high)"
        )


@dataclass(frozen=True)
class Constant(Filter):
    """Every chunk, or none."""

    value: bool

    def __invert__(self) -> Filter:
        return NOTHING if self.value else EVERYTHING

    __bool__ = Filter.__bool__


EVERYTHING = Constant(True)
NOTHING = Constant(False)


@dataclass(frozen=True)
class Comparison(Filter):
    """``field operator value``; for "in" and "not in" the value is a tuple without doubles, never empty."""

    field: str
    operator: Operator
    value: Scalar | tuple[Scalar, ...]

    def __invert__(self) -> Filter:
        complement = Comparison(self.field, _COMPLEMENT[self.operator], self.value)
        if self.operator in _ORDERING and FIELDS[self.field].nullable:
            return complement | Comparison(self.field, "==", None)
        return complement

    __bool__ = Filter.__bool__


@dataclass(frozen=True)
class And(Filter):
    """All of the parts hold; two parts or more, none of them an And or a constant. ``depth``: levels below."""

    parts: tuple[Filter, ...]
    depth: int = field(default=1, compare=False, repr=False)

    def __invert__(self) -> Filter:
        return _join(Or, tuple(~part for part in self.parts), absorbing=EVERYTHING, neutral=NOTHING)

    __bool__ = Filter.__bool__


@dataclass(frozen=True)
class Or(Filter):
    """One of the parts holds, or several do; two parts or more, none of them an Or or a constant."""

    parts: tuple[Filter, ...]
    depth: int = field(default=1, compare=False, repr=False)

    def __invert__(self) -> Filter:
        return _join(And, tuple(~part for part in self.parts), absorbing=NOTHING, neutral=EVERYTHING)

    __bool__ = Filter.__bool__


def _checked(other: object) -> Filter:
    if not isinstance(other, Filter):
        raise ValidationError(f"a filter combines with filters only, got {shown(other)}")
    return other


def _depth(where: Filter) -> int:
    return where.depth if isinstance(where, And | Or) else 0


def _join(kind: type[And] | type[Or], parts: Iterable[Filter], *, absorbing: Filter, neutral: Filter) -> Filter:
    flat: list[Filter] = []
    for part in parts:
        if part is absorbing:
            return absorbing
        if part is not neutral:
            flat.extend(part.parts if isinstance(part, kind) else (part,))
    if len(flat) < 2:
        return flat[0] if flat else neutral
    depth = 1 + max(_depth(part) for part in flat)
    if depth > MAX_DEPTH:
        raise ValidationError(f"a filter must alternate between & and | at most {MAX_DEPTH} times, got {depth}")
    return kind(tuple(flat), depth)


@dataclass(frozen=True)
class FieldKind:
    """How a field's values are checked, whether the field may be empty, and whether its values have an order."""

    check: Callable[[object, str], Scalar]
    nullable: bool = False
    ordered: bool = True


def _check_number(value: object, argument: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not math.isfinite(number):
        raise ValidationError(f"{argument} must be compared with a finite number, got {shown(value)}")
    return number


def _check_flag(value: object, argument: str) -> bool:
    if not isinstance(value, bool):
        raise ValidationError(f"{argument} must be compared with True or False, got {shown(value)}")
    return value


def _check_memory_type(value: object, argument: str) -> str:
    return check_choice(value, argument, MEMORY_TYPES)


_TEXT = FieldKind(check_content)
_OPTIONAL_TEXT = FieldKind(check_content, nullable=True)
_INTEGER = FieldKind(check_integer)
_TIME = FieldKind(check_time)

FIELDS: dict[str, FieldKind] = {
    "id": _TEXT,
    "user_id": _TEXT,
    "session_id": _TEXT,
    "memory_type": FieldKind(_check_memory_type),
    "content": _TEXT,
    "importance": FieldKind(_check_number),
    "token_count": _INTEGER,
    "compressed": FieldKind(_check_flag, ordered=False),
    "compression_source": _OPTIONAL_TEXT,
    "source_session_id": _OPTIONAL_TEXT,
    "chroma_id": _OPTIONAL_TEXT,
    "created_at": _TIME,
    "updated_at": _TIME,
    "version": _INTEGER,
}
"""The fields of a chunk that a filter may name, spelled as on `Chunk`."""


class Field:
    """One field of a chunk, to be compared with a value."""

    __hash__ = object.__hash__

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"F.{self._name}"

    def __bool__(self) -> bool:
        raise ValidationError(f"{self!r} is no condition by itself; compare it with a value")

    def __eq__(self, value: object) -> Filter:  # type: ignore[override]  # builds an expression, as SQLAlchemy does
        return self._compare("==", value)

    def __ne__(self, value: object) -> Filter:  # type: ignore[override]
        return self._compare("!=", value)

    def __lt__(self, value: Any) -> Filter:
        return self._compare("<", value)

    def __le__(self, value: Any) -> Filter:
        return self._compare("<=", value)

    def __gt__(self, value: Any) -> Filter:
        return self._compare(">", value)

    def __ge__(self, value: Any) -> Filter:
        return self._compare(">=", value)

    def in_(self, values: Iterable[Any]) -> Filter:
        """The field equals one of the values; an empty list matches nothing."""
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise ValidationError(f"{self!r}.in_ takes a list of values, got {shown(values)}")
        checked = tuple(dict.fromkeys(self._check(value) for value in values))
        if len(checked) > MAX_LISTED:
            raise ValidationError(
                f"{self!r}.in_ takes at most {MAX_LISTED:,} values, got {len(checked):,}; ask in parts"
            )
        return Comparison(self._name, "in", checked) if checked else NOTHING

    def between(self, low: Any, high: Any) -> Filter:
        """The field lies between two values, both included."""
        return self._compare(">=", low) & self._compare("<=", high)

    def _compare(self, operator: Operator, value: object) -> Filter:
        if value is None and FIELDS[self._name].nullable and operator in ("==", "!="):
            return Comparison(self._name, operator, None)
        if operator in _ORDERING and not FIELDS[self._name].ordered:
            raise ValidationError(f"{self!r} has no order; compare it by == or !=")
        return Comparison(self._name, operator, self._check(value))

    def _check(self, value: object) -> Scalar:
        checked: Scalar = FIELDS[self._name].check(value, repr(self))
        return checked


class _Fields:
    """``F.importance``, ``F.created_at`` …: the fields of a chunk by name."""

    def __getattr__(self, name: str) -> Field:
        if name.startswith("__"):  # protocols of Python's own (copy, pickle, inspect) ask for absent names
            raise AttributeError(name)
        if name not in FIELDS:
            raise ValidationError(f"unknown filter field {shown(name)}; the fields are {', '.join(FIELDS)}")
        return Field(name)

    def __dir__(self) -> list[str]:
        return list(FIELDS)


F = _Fields()


def check_filter(where: object, argument: str = "where") -> Filter:
    """None (everything) or a filter."""
    if where is None:
        return EVERYTHING
    if not isinstance(where, Filter):
        raise ValidationError(f"{argument} must be a filter such as F.importance >= 0.5, got {shown(where)}")
    if (size := len(list(comparisons(where)))) > MAX_COMPARISONS:
        raise ValidationError(f"{argument} must have at most {MAX_COMPARISONS} comparisons, got {size:,}; use .in_")
    listed = sum(len(one.value) for one in comparisons(where) if isinstance(one.value, tuple))
    if listed > MAX_LISTED:
        raise ValidationError(f"{argument} may list {MAX_LISTED:,} values in all, got {listed:,}; ask in parts")
    return where


def comparisons(where: Filter) -> Iterator[Comparison]:
    """Every comparison in a filter, from left to right."""
    if isinstance(where, Comparison):
        yield where
    elif isinstance(where, And | Or):
        for part in where.parts:
            yield from comparisons(part)
