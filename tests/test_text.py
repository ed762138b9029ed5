"""Which text, numbers, times and JSON are let in, and what does a refusal say?"""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memvault.errors import MemvaultError, ValidationError
from memvault.text import (
    MAX_CONTENT_BYTES,
    MAX_INTEGER,
    MAX_JSON_DEPTH,
    check_choice,
    check_content,
    check_fraction,
    check_identifier,
    check_integer,
    check_json,
    check_metadata,
    check_time,
    dump_json,
    shown,
)

LONGEST_MESSAGE = 400

Check = Callable[[object, str], object]


def refusal(check: Check, value: object, argument: str = "the_argument") -> str:
    """The message of the refusal, which always names the argument and never repeats a megabyte."""
    with pytest.raises(ValidationError) as caught:
        check(value, argument)
    message = str(caught.value)
    assert argument in message
    assert len(message) < LONGEST_MESSAGE
    return message


def named(value: object) -> str:
    """A parameter's id: short, whatever the value is."""
    return ascii(value)[:20]


class Markup(str):
    """A str that says something else when it is printed."""

    __slots__ = ()

    def __str__(self) -> str:
        return "<b>"

    def __repr__(self) -> str:
        return "Markup" * 1000


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Nowhere(tzinfo):
    """A time zone that does not know its offset: times in it are naive all the same."""

    def utcoffset(self, _when: datetime | None) -> timedelta | None:
        return None

    def dst(self, _when: datetime | None) -> timedelta | None:
        return None

    def tzname(self, _when: datetime | None) -> str | None:
        return None


TEXT_CHECKS = [pytest.param(check_content, id="content"), pytest.param(check_identifier, id="identifier")]

ODD_BUT_FINE = [
    "a",
    " a ",
    "\ta\n",
    "🙂",
    "👩\u200d👩\u200d👧",
    "ü",
    "u\u0308",
    "\u202eabc\u202c",
    "\u200fאב\u200e",
    "\ufeffbom",
    "\ufffe\uffff",
    "\U0010ffff",
    "\x01\x1b[31m\x7f",
    "line\r\nline",
    "%",
    "*",
    'u"1',
    "'; DROP TABLE owners; --",
    "\\",
    "a\u2028b",
    "Ä",
    "ä",
    "ﬁ",
    "İ",
]


class TestText:
    @pytest.mark.parametrize("check", TEXT_CHECKS)
    @pytest.mark.parametrize("text", ODD_BUT_FINE, ids=ascii)
    def test_odd_text_is_returned_as_given(self, check: Check, text: str) -> None:
        assert check(text, "x") == text

    @pytest.mark.parametrize("check", TEXT_CHECKS)
    def test_composed_and_decomposed_stay_apart(self, check: Check) -> None:
        composed, decomposed = check("Zoë", "x"), check("Zoe\u0308", "x")
        assert composed != decomposed
        assert (composed, decomposed) == ("Zoë", "Zoe\u0308")

    @pytest.mark.parametrize("check", TEXT_CHECKS)
    @pytest.mark.parametrize(
        "text",
        ["", " ", "\t", "\n\r\n", "\u2003", "\u00a0", "\u3000", "\u2028\u2029", "\x1c\x1f", "\x85"],
        ids=ascii,
    )
    def test_blank_is_refused(self, check: Check, text: str) -> None:
        assert "blank" in refusal(check, text)

    @pytest.mark.parametrize("check", TEXT_CHECKS)
    @pytest.mark.parametrize("text", ["\u200b", "\ufeff", "\u2060", "\u00ad"], ids=ascii)
    def test_invisible_is_not_blank(self, check: Check, text: str) -> None:
        # Unicode calls none of these white space: they are format characters, and part of ordinary text.
        assert check(text, "x") == text

    @pytest.mark.parametrize("check", [*TEXT_CHECKS, pytest.param(check_json, id="json")])
    @pytest.mark.parametrize("text", ["\x00", "a\x00", "\x00a", "a" * 250 + "\x00"], ids=ascii)
    def test_nul_is_refused(self, check: Check, text: str) -> None:
        assert "NUL" in refusal(check, text)

    @pytest.mark.parametrize("check", [*TEXT_CHECKS, pytest.param(check_json, id="json")])
    @pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\udc80tail", "\ude00\ud83d"], ids=ascii)
    def test_lone_surrogate_is_refused(self, check: Check, text: str) -> None:
        message = refusal(check, text)
        assert "surrogate" in message
        message.encode()  # a message that cannot be logged would hide the error

    @pytest.mark.parametrize("check", TEXT_CHECKS)
    @pytest.mark.parametrize(
        "value", [None, b"bytes", 3, 3.5, True, ["a"], {"a": 1}, object, bytearray(b"a")], ids=ascii
    )
    def test_other_types_are_refused_by_name(self, check: Check, value: object) -> None:
        message = refusal(check, value)
        assert type(value).__name__ in message
        assert repr(value)[:20] in message

    @pytest.mark.parametrize("check", TEXT_CHECKS)
    @pytest.mark.parametrize("text", [Markup("plain"), Colour.RED], ids=["Markup", "Colour"])
    def test_subclass_becomes_plain(self, check: Check, text: str) -> None:
        checked = check(text, "x")
        assert type(checked) is str
        assert checked == text

    @pytest.mark.parametrize("check", TEXT_CHECKS)
    @pytest.mark.parametrize("text", [Markup(""), Markup(" "), Markup("\x00"), Markup("\ud800")], ids=ascii)
    def test_subclass_obeys_the_policy(self, check: Check, text: str) -> None:
        refusal(check, text)

    @pytest.mark.parametrize(
        ("character", "size"), [("a", 1), ("é", 2), ("東", 3), ("🙂", 4)], ids=["1", "2", "3", "4"]
    )
    def test_content_of_exactly_one_mebibyte(self, character: str, size: int) -> None:
        whole, rest = divmod(MAX_CONTENT_BYTES, size)
        text = character * whole + "a" * rest
        assert check_content(text) is text
        message = refusal(check_content, text + "a")
        assert "1 MiB" in message
        assert "1,048,577" in message

    @pytest.mark.parametrize("character", ["a", "é", "🙂"])
    def test_identifier_counts_characters(self, character: str) -> None:
        assert check_identifier(character * 255, "x") == character * 255
        message = refusal(check_identifier, character * 256)
        assert "255" in message
        assert "256" in message

    @pytest.mark.parametrize("check", TEXT_CHECKS)
    @pytest.mark.parametrize(
        "value",
        [
            " " * 5_000_000,
            "\x00" * 5_000_000,
            "a" * 5_000_000 + "\udfff",
            "a" * 5_000_000,
            b"a" * 5_000_000,
            ["a" * 5_000_000],
            {"a" * 5_000_000: 1},
            Markup("\x00" * 5_000_000),
        ],
        ids=["blank", "nul", "surrogate", "long", "bytes", "list", "dict", "subclass"],
    )
    def test_no_message_repeats_a_megabyte(self, check: Check, value: object) -> None:
        refusal(check, value)

    @pytest.mark.parametrize("check", TEXT_CHECKS)
    def test_what_has_no_repr_is_refused_too(self, check: Check) -> None:
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        refusal(check, deep)
        refusal(check, 10**5_000)
        refusal(check, [10**5_000])

    def test_default_argument_is_named(self) -> None:
        with pytest.raises(ValidationError, match="^content must not be blank"):
            check_content("")

    def test_a_refusal_is_a_value_error_and_ours(self) -> None:
        assert issubclass(ValidationError, ValueError)
        assert issubclass(ValidationError, MemvaultError)

    @given(st.text(max_size=12) | st.text("a🙂 ", min_size=250, max_size=260))
    @settings(deadline=None, max_examples=60)
    def test_either_refused_or_unchanged(self, text: str) -> None:
        fine = bool(text.strip()) and "\x00" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
        if fine:
            assert check_content(text) == text
        else:
            refusal(check_content, text)
        if fine and len(text) <= 255:
            assert check_identifier(text, "x") == text
        else:
            refusal(check_identifier, text)


class TestShown:
    def test_short_values_are_whole(self) -> None:
        assert shown("a'b") == '"a\'b"'
        assert shown(None) == "None"

    def test_long_values_are_cut_at_the_limit(self) -> None:
        assert shown("x" * 100, limit=10) == "'xxxxxxxxx…"
        assert len(shown(list(range(1000)))) == 61


class TestFraction:
    @pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, 0.72, 5e-324, np.float64(0.25)])
    def test_from_zero_to_one(self, value: float) -> None:
        checked = check_fraction(value, "x")
        assert type(checked) is float
        assert checked == value

    @pytest.mark.parametrize(
        "value",
        [
            -5e-324,
            1.0000000000000002,
            2,
            -1,
            math.nan,
            math.inf,
            -math.inf,
            True,
            False,
            "0.5",
            None,
            [0.5],
            0.5 + 0j,
            Decimal("0.5"),
            Fraction(1, 2),
            10**400,
            -(10**400),
        ],
        ids=named,
    )
    def test_everything_else_is_refused(self, value: object) -> None:
        assert repr(value)[:50] in refusal(check_fraction, value)

    def test_a_number_too_long_for_its_repr(self) -> None:
        refusal(check_fraction, 10**5_000)


class TestInteger:
    @pytest.mark.parametrize("value", [0, -1, MAX_INTEGER, -MAX_INTEGER])
    def test_64_bits(self, value: int) -> None:
        assert check_integer(value, "x") == value

    @pytest.mark.parametrize(
        "value",
        [MAX_INTEGER + 1, -MAX_INTEGER - 1, 10**400, True, False, 1.0, "1", None, math.nan, np.float64(1)],
        ids=named,
    )
    def test_everything_else_is_refused(self, value: object) -> None:
        assert repr(value)[:50] in refusal(check_integer, value)

    def test_a_number_too_long_for_its_repr(self) -> None:
        refusal(check_integer, 10**5_000)
        refusal(check_integer, -(10**5_000))

    def test_minimum(self) -> None:
        assert check_integer(1, "k", minimum=1) == 1
        with pytest.raises(ValidationError, match=r"^k must be at least 1, got 0$"):
            check_integer(0, "k", minimum=1)

    def test_subclass_becomes_plain(self) -> None:
        assert type(check_integer(Level.HIGH, "x")) is int


class TestTime:
    @pytest.mark.parametrize(
        ("given_time", "expected"),
        [
            (datetime(2024, 5, 1, 9, tzinfo=timezone(timedelta(hours=9))), datetime(2024, 5, 1, tzinfo=UTC)),
            (datetime(2024, 5, 1, tzinfo=UTC), datetime(2024, 5, 1, tzinfo=UTC)),
            (datetime(2024, 5, 1, 1, 2, 3, 0, tzinfo=UTC), datetime(2024, 5, 1, 1, 2, 3, tzinfo=UTC)),
            (datetime(1969, 7, 20, 20, 17, 40, 1, UTC), datetime(1969, 7, 20, 20, 17, 40, 1, UTC)),
            (datetime.min.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)),
            (datetime.max.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)),
            (
                datetime(2024, 1, 1, tzinfo=timezone(timedelta(microseconds=1))),
                datetime(2023, 12, 31, 23, 59, 59, 999_999, UTC),
            ),
        ],
        ids=["+09:00", "utc", "microsecond 0", "1969", "min", "max", "odd offset"],
    )
    def test_the_same_instant_in_utc(self, given_time: datetime, expected: datetime) -> None:
        checked = check_time(given_time, "x")
        assert checked == expected
        assert checked.replace(tzinfo=None) == expected.replace(tzinfo=None)
        assert checked.tzinfo is UTC

    @pytest.mark.parametrize(
        "naive",
        [datetime(2024, 5, 1), datetime(2024, 5, 1, tzinfo=Nowhere())],  # noqa: DTZ001 - what is refused
        ids=["none", "no offset"],
    )
    def test_naive_is_refused(self, naive: datetime) -> None:
        message = refusal(check_time, naive)
        assert "naive" in message
        assert "2024-05-01" in message

    @pytest.mark.parametrize(
        "beyond",
        [
            datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
            datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
        ],
        ids=["after 9999", "before 1"],
    )
    def test_no_equal_in_utc_is_refused(self, beyond: datetime) -> None:
        assert beyond.isoformat() in refusal(check_time, beyond)

    @pytest.mark.parametrize(
        "value", [None, 0, 1714521600.0, "2024-05-01T00:00:00Z", date(2024, 5, 1), "x" * 1_000_000], ids=named
    )
    def test_other_types_are_refused(self, value: object) -> None:
        assert repr(value)[:20] in refusal(check_time, value)

    @given(
        st.datetimes(min_value=datetime(2, 1, 1), max_value=datetime(9998, 12, 31)),  # noqa: DTZ001 - made aware
        st.integers(-1439, 1439),
    )
    @settings(deadline=None)
    def test_any_offset(self, when: datetime, minutes: int) -> None:
        aware = when.replace(tzinfo=timezone(timedelta(minutes=minutes)))
        checked = check_time(aware, "x")
        assert checked == aware
        assert checked.utcoffset() == timedelta(0)


class TestChoice:
    def test_one_of_the_choices(self) -> None:
        assert check_choice("red", "x", ("red", "green")) == "red"

    def test_subclass_becomes_plain(self) -> None:
        assert type(check_choice(Colour.RED, "x", ("red", "green"))) is str

    @pytest.mark.parametrize("value", ["Red", "red ", "", None, 1, ["red"], b"red", "x" * 1_000_000], ids=named)
    def test_everything_else_is_refused_with_the_choices(self, value: object) -> None:
        message = refusal(lambda value, argument: check_choice(value, argument, ("red", "green")), value)
        assert "red, green" in message
        assert repr(value)[:20] in message


JSON_TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)
JSON_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | JSON_TEXT
)
JSON_VALUES = st.recursive(
    JSON_SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(JSON_TEXT, inner, max_size=4),
    max_leaves=20,
)


def nested(levels: int, *, in_dicts: bool = False) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if in_dicts else [value]
    return value


class TestMetadata:
    @pytest.mark.parametrize(
        "value",
        [
            {},
            {"a": None, "b": [], "c": {"d": 1}, "e": "ü"},
            {"": "", " ": " "},
            {"user_id": "B", "chroma:document": "x", "$and": []},
            {"NFC é": 1, "NFC e\u0301": 2},
            {"n": MAX_INTEGER, "f": 1e308, "tiny": 5e-324, "minus": -0.0, "true": True},
            {"deep": [[[{"a": [{}]}]]]},
        ],
        ids=["empty", "case", "blank", "keys", "forms", "numbers", "deep"],
    )
    def test_comes_back_equal(self, value: dict[str, Any]) -> None:
        assert check_metadata(value) == value
        assert repr(json.loads(dump_json(check_metadata(value)))) == repr(value)

    @given(st.dictionaries(JSON_TEXT, JSON_VALUES, max_size=5))
    @settings(deadline=None)
    def test_round_trip(self, value: dict[str, Any]) -> None:
        checked = check_metadata(value)
        # By repr, since True == 1 == 1.0 and -0.0 == 0.0.
        assert repr(checked) == repr(value)
        assert repr(json.loads(dump_json(checked))) == repr(value)

    def test_the_copy_is_deep(self) -> None:
        value: dict[str, Any] = {"list": [1, {"inner": [2]}], "dict": {"a": {"b": []}}}
        checked = check_metadata(value)
        value["list"][1]["inner"].append(3)
        value["dict"]["a"]["b"].append(4)
        value["new"] = 5
        assert checked == {"list": [1, {"inner": [2]}], "dict": {"a": {"b": []}}}

    @pytest.mark.parametrize("value", [UserDict(a=1), OrderedDict(a=1)], ids=["UserDict", "OrderedDict"])
    def test_any_mapping_becomes_a_dict(self, value: Mapping[str, int]) -> None:
        checked = check_metadata(value)
        assert checked == {"a": 1}
        assert type(checked) is dict

    def test_subclasses_become_plain(self) -> None:
        checked = check_metadata({Colour.RED: Colour.RED, "level": Level.HIGH, "float": np.float64(0.5)})
        assert checked == {"red": "red", "level": 3, "float": 0.5}
        assert [type(value) for value in checked.values()] == [str, int, float]
        assert all(type(key) is str for key in checked)

    @pytest.mark.parametrize("value", [None, [], [("a", 1)], "a", 1, True, {1, 2}, "x" * 5_000_000], ids=named)
    def test_only_objects(self, value: object) -> None:
        assert repr(value)[:20] in refusal(check_metadata, value)

    @pytest.mark.parametrize(
        "value",
        [
            (1, 2),
            {1, 2},
            frozenset(),
            b"bytes",
            datetime(2024, 1, 1, tzinfo=UTC),
            date(2024, 1, 1),
            Decimal(1),
            1j,
            object(),
            np.int64(1),
            np.float32(1),
            np.array([1.0]),
            UserDict(a=1),
            ValueError,
            (character for character in "a"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_pythons_own_types_are_refused(self, value: object) -> None:
        for wrapped in ({"a": value}, {"a": [value]}, {"a": {"b": value}}):
            assert type(value).__name__ in refusal(check_metadata, wrapped)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_not_finite_is_refused(self, value: float) -> None:
        assert f"got {value}" in refusal(check_metadata, {"a": [value]})

    def test_huge_integers_are_refused(self) -> None:
        for value in (MAX_INTEGER + 1, -MAX_INTEGER - 1, 10**5_000):
            assert "64 bits" in refusal(check_metadata, {"a": value})

    @pytest.mark.parametrize("key", [1, None, True, 1.5, b"a", (), Level.HIGH], ids=repr)
    def test_other_keys_are_refused(self, key: object) -> None:
        assert repr(key) in refusal(check_metadata, {key: 1})
        assert repr(key) in refusal(check_metadata, {"a": [{key: 1}]})

    @pytest.mark.parametrize("text", ["\x00", "a\ud800"], ids=ascii)
    def test_texts_and_keys_obey_the_policy(self, text: str) -> None:
        refusal(check_metadata, {"a": text})
        refusal(check_metadata, {text: 1})
        refusal(check_metadata, {"a": [{"b": {text: 1}}]}).encode()

    def test_the_refusal_says_where(self) -> None:
        assert "meta['a'][2]['b']" in refusal(check_metadata, {"a": [1, 2, {"b": math.nan}]}, "meta")

    @pytest.mark.parametrize("in_dicts", [False, True], ids=["lists", "dicts"])
    def test_depth(self, in_dicts: bool) -> None:
        deepest = nested(MAX_JSON_DEPTH, in_dicts=in_dicts)
        assert repr(check_json(deepest, "x")) == repr(deepest)
        refusal(check_json, nested(MAX_JSON_DEPTH + 1, in_dicts=in_dicts))
        refusal(check_json, nested(100_000, in_dicts=in_dicts))

    def test_circular_is_refused(self) -> None:
        ring: dict[str, Any] = {}
        ring["self"] = ring
        refusal(check_metadata, ring)
        rope: list[Any] = []
        rope.extend([rope, rope])
        refusal(check_metadata, {"rope": rope})

    def test_shared_is_not_circular(self) -> None:
        part = [1]
        checked = check_metadata({"a": part, "b": part})
        assert checked == {"a": [1], "b": [1]}
        assert checked["a"] is not checked["b"]

    def test_exactly_one_mebibyte(self) -> None:
        room = MAX_CONTENT_BYTES - len('{"a":""}')
        for fits in ("x" * room, "é" * (room // 2)):
            assert check_metadata({"a": fits}) == {"a": fits}
        assert "1,048,577" in refusal(check_metadata, {"a": "x" * (room + 1)})

    @pytest.mark.parametrize(
        "value",
        [
            {"a": "x" * 5_000_000},
            {"x" * 5_000_000: 1},
            {"x" * 5_000_000: math.nan},
            {"x" * 5_000_000: {1}},
            {"x" * 5_000_000: {1: 1}},
            {"x" * 5_000_000: {"y" * 5_000_000 + "\x00": 1}},
            {"x" * 5_000_000 + "\x00": 1},
            {"a": b"x" * 5_000_000},
            {"a": (tuple(range(1_000_000)),)},
            {b"x" * 5_000_000: 1},
            {"a": (nested(100_000),)},
        ],
        ids=["text", "key", "nan", "set", "inner key", "inner nul", "nul", "bytes", "tuple", "bytes key", "deep"],
    )
    def test_no_message_repeats_a_megabyte(self, value: object) -> None:
        refusal(check_metadata, value)


class TestJson:
    @given(JSON_VALUES)
    @settings(deadline=None)
    def test_any_value_round_trips(self, value: Any) -> None:
        assert repr(json.loads(dump_json(check_json(value, "value")))) == repr(value)

    def test_dump_is_compact_and_readable(self) -> None:
        assert dump_json({"é": [1, None, True]}) == '{"é":[1,null,true]}'

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_dump_refuses_what_json_cannot_say(self, value: float) -> None:
        with pytest.raises(ValueError, match="JSON"):
            dump_json(value)
