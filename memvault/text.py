"""Which text, numbers, times and JSON may be stored?

One policy for every entry point: text is a str, not blank, without NUL and lone surrogates, and is stored exactly as
given. Everything here is checked before any I/O and raises `ValidationError` naming the argument, its value and the
rule.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from memvault.errors import ValidationError

MAX_CONTENT_BYTES = 1 << 20
MAX_IDENTIFIER_CHARACTERS = 255
MAX_JSON_DEPTH = 100
MAX_INTEGER = 2**63 - 1

Json = Any
"""dict, list, str, int, float, bool or None, nested: what JSON can say."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200  # longer than what is shown: the cut is made there
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 100

_SURROGATE = re.compile("[\ud800-\udfff]")


def shown(value: object, limit: int = 60) -> str:
    """The value for an error message: its repr, cut to ``limit`` characters."""
    try:
        # Never repr a megabyte to show sixty characters of it.
        text = repr(value[: limit + 1]) if isinstance(value, str | bytes) else _SHORT.repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of too many digits
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= limit else f"{text[:limit]}…"


def check_content(value: object, argument: str = "content") -> str:
    """A memory or a query: at most 1 MiB of UTF-8."""
    text = _check_str(value, argument)
    if not text.strip():
        raise ValidationError(f"{argument} must not be blank, got {shown(text)}")
    if len(text) > MAX_CONTENT_BYTES // 4 and len(text.encode()) > MAX_CONTENT_BYTES:
        raise ValidationError(
            f"{argument} must be at most 1 MiB of UTF-8, got {len(text.encode()):,} bytes: {shown(text)}"
        )
    return text


def check_identifier(value: object, argument: str) -> str:
    """A user id, another id, or a key: at most 255 characters."""
    text = _check_str(value, argument)
    if not text.strip():
        raise ValidationError(f"{argument} must not be blank, got {shown(text)}")
    if len(text) > MAX_IDENTIFIER_CHARACTERS:
        raise ValidationError(
            f"{argument} must have at most {MAX_IDENTIFIER_CHARACTERS} characters, got {len(text)}: {shown(text)}"
        )
    return text


def check_fraction(value: object, argument: str) -> float:
    """A number from 0 to 1, both included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValidationError(f"{argument} must be a number from 0 to 1, got {shown(value)}")
    return float(value)


def check_integer(value: object, argument: str, *, minimum: int | None = None) -> int:
    """A whole number that fits 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INTEGER:
        raise ValidationError(f"{argument} must be a whole number of at most 64 bits, got {shown(value)}")
    if minimum is not None and value < minimum:
        raise ValidationError(f"{argument} must be at least {minimum}, got {value}")
    return int(value)


def check_time(value: object, argument: str) -> datetime:
    """An aware datetime, converted to UTC."""
    if not isinstance(value, datetime):
        raise ValidationError(f"{argument} must be a datetime, got {shown(value)}")
    if value.utcoffset() is None:
        raise ValidationError(f"{argument} must know its time zone, got the naive {value.isoformat()}")
    try:
        return value.astimezone(UTC)
    except OverflowError as exc:
        raise ValidationError(f"{argument} has no equal in UTC within years 1 to 9999: {value.isoformat()}") from exc


def check_choice(value: object, argument: str, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValidationError(f"{argument} must be one of {', '.join(choices)}, got {shown(value)}")
    return choices[choices.index(value)]


def check_metadata(value: object, argument: str = "metadata") -> dict[str, Json]:
    """A JSON object, copied, so that later changes to the caller's dict do not reach into ours."""
    if not isinstance(value, Mapping):
        raise ValidationError(f"{argument} must be a JSON object (a dict), got {shown(value)}")
    copied = check_json(dict(value), argument)
    assert isinstance(copied, dict)
    return copied


def check_json(value: object, argument: str) -> Json:
    """Any JSON value of at most 1 MiB, copied. NaN, infinities and Python's own types are refused."""
    copied = _copy_json(value, argument, depth=0)
    size = len(dump_json(copied).encode())
    if size > MAX_CONTENT_BYTES:
        raise ValidationError(f"{argument} must be at most 1 MiB as JSON, got {size:,} bytes")
    return copied


def dump_json(value: Json) -> str:
    return _dump(value) if value != {} else "{}"  # most metadata: there is none


def load_json(text: str | bytes) -> Json:
    return {} if text == "{}" else json.loads(text)


_dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _check_str(value: object, argument: str) -> str:
    if not isinstance(value, str):
        raise ValidationError(f"{argument} must be a str, got {type(value).__name__}: {shown(value)}")
    if "\x00" in value:
        raise ValidationError(f"{argument} must not contain NUL (U+0000), got {shown(value)}")
    if _SURROGATE.search(value):
        raise ValidationError(f"{argument} must not contain a lone surrogate, got {shown(value)}")
    # A subclass of str (an enum, a markup string) would come back as something else than it went in.
    return str.__str__(value) if type(value) is not str else value


def _copy_json(value: object, path: str, depth: int) -> Json:
    path = path if len(path) <= 100 else f"{path[:100]}…"
    if depth > MAX_JSON_DEPTH:
        raise ValidationError(f"{path} is nested deeper than {MAX_JSON_DEPTH} levels, or contains itself")
    match value:
        case None | bool():
            return value
        case str():
            return _check_str(value, path)
        case int():
            if abs(value) > MAX_INTEGER:
                raise ValidationError(f"{path} must fit 64 bits, got a number of {value.bit_length()} bits")
            return int(value)
        case float():
            if not math.isfinite(value):
                raise ValidationError(f"{path} must be a finite number, got {value}")
            return float(value)
        case list():
            return [_copy_json(item, f"{path}[{place}]", depth + 1) for place, item in enumerate(value)]
        case dict():
            for key in value:
                if not isinstance(key, str):
                    raise ValidationError(f"{path} must have str keys only, got {shown(key)}")
            return {
                _check_str(key, f"a key of {path}"): _copy_json(item, f"{path}[{shown(key, 30)}]", depth + 1)
                for key, item in value.items()
            }
        case _:
            raise ValidationError(f"{path} must be JSON, got {type(value).__name__}: {shown(value)}")
