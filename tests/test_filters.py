"""What may a filter say, and does SQL answer it as Python would?"""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Column, Connection, MetaData, Table, delete, insert, select

from memvault.database.engine import create_engine
from memvault.database.where import compile_where
from memvault.errors import ValidationError
from memvault.filters import (
    EVERYTHING,
    FIELDS,
    MAX_COMPARISONS,
    MAX_LISTED,
    NOTHING,
    And,
    Comparison,
    Constant,
    F,
    Field,
    Filter,
    Or,
    check_filter,
    comparisons,
)
from memvault.memory.chunk_table import CHUNKS
from memvault.values import MEMORY_TYPES, Chunk
from memvault.vectors.base import INDEXED, RecordMetadata, pushdown

Row = dict[str, Any]

LOOSE = Table(
    "loose_chunks",
    MetaData(),
    *(Column(name, CHUNKS.c[name].type, nullable=FIELDS[name].nullable) for name in FIELDS),
)
"""The chunks' columns with the chunks' types, and none of their keys and checks: any row may lie in it."""


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    path: Path = tmp_path_factory.mktemp("filters") / "filters.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as opened, opened.begin() as transaction:
        LOOSE.create(opened)
        yield opened
        transaction.rollback()
    engine.dispose()


# What a filter means, in plain Python: a tree of our own, built into a Filter and evaluated beside it.


@dataclass(frozen=True)
class Leaf:
    field: str
    operator: str
    value: Any


@dataclass(frozen=True)
class Node:
    operator: str
    parts: tuple[Tree, ...]


Tree = Leaf | Node

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ORDERINGS = ("<", "<=", ">", ">=")


def compared(actual: Any, sign: str, value: Any) -> bool:
    if sign == "in":
        return actual in value
    if sign == "not in":
        return actual not in value
    if sign == "between":
        return actual is not None and value[0] <= actual <= value[1]
    if actual is None and sign in ORDERINGS:
        return False
    return bool(COMPARE[sign](actual, value))


def holds(tree: Tree, row: Row) -> bool:
    match tree:
        case Leaf():
            return compared(row[tree.field], tree.operator, tree.value)
        case Node("and", parts):
            return all(holds(part, row) for part in parts)
        case Node("or", parts):
            return any(holds(part, row) for part in parts)
        case Node("not", (part,)):
            return not holds(part, row)
    raise AssertionError(tree)


def built(tree: Tree) -> Filter:
    match tree:
        case Leaf(field, "in", value):
            return Field(field).in_(value)
        case Leaf(field, "between", (low, high)):
            return Field(field).between(low, high)
        case Leaf(field, sign, value):
            made: Filter = COMPARE[sign](Field(field), value)
            return made
        case Node("not", (part,)):
            return ~built(part)
        case Node(sign, parts):
            made = built(parts[0])
            for part in parts[1:]:
                made = made & built(part) if sign == "and" else made | built(part)
            return made
    raise AssertionError(tree)


def admits(where: Filter, row: Row) -> bool:
    """A filter as built, evaluated in Python: what an index that obeys it would do."""
    match where:
        case Constant(value):
            return value
        case And(parts):
            return all(admits(part, row) for part in parts)
        case Or(parts):
            return any(admits(part, row) for part in parts)
        case Comparison():
            return compared(row[where.field], where.operator, where.value)
    raise AssertionError(where)


# Few values a field, chosen to meet each other and to be told apart wrongly by a careless comparison.

TEXTS = st.sampled_from(["a", "A", "ab", "a ", "Ä", "ä", "é", "e\u0301", "🙂", "\uffff", "%", "_", "*", "1", "01", "'"])
TIMES = st.sampled_from(
    [
        datetime(2024, 5, 1, 12, tzinfo=UTC),
        datetime(2024, 5, 1, 21, tzinfo=timezone(timedelta(hours=9))),
        datetime(2024, 5, 1, 12, 0, 0, 1, UTC),
        datetime(2024, 5, 1, 12, 0, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC),
    ]
)
INTEGERS = st.sampled_from([-1, 0, 1, 2, 10, 2**53 + 1, 2**53, 2**63 - 1])
NUMBERS = st.sampled_from([0, 1, 0.1, 0.1 + 0.2, 0.3, 0.5, 5e-324, -0.0, 1e300])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "memory_type": st.sampled_from(MEMORY_TYPES),
    "importance": NUMBERS,
    "token_count": INTEGERS,
    "version": INTEGERS,
    "compressed": st.booleans(),
    "created_at": TIMES,
    "updated_at": TIMES,
}


def values_of(field: str) -> st.SearchStrategy[Any]:
    return VALUES.get(field, TEXTS)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    count = draw(st.integers(1, 6))
    return [
        {
            "id": f"{draw(TEXTS)}{number}",
            **{
                field: draw(st.none() | values_of(field) if kind.nullable else values_of(field))
                for field, kind in FIELDS.items()
                if field != "id"
            },
        }
        for number in range(count)
    ]


@st.composite
def leaves(draw: st.DrawFn) -> Tree:
    field = draw(st.sampled_from(list(FIELDS)))
    signs = ["==", "!=", "in"] if field == "compressed" else ["==", "!=", "in", "between", *ORDERINGS]
    sign = draw(st.sampled_from(signs))
    values = values_of(field)
    if sign == "in":
        return Leaf(field, sign, tuple(draw(st.lists(values, max_size=3))))
    if sign == "between":
        return Leaf(field, sign, (draw(values), draw(values)))
    if FIELDS[field].nullable and sign in ("==", "!="):
        values = st.none() | values
    return Leaf(field, sign, draw(values))


TREES: st.SearchStrategy[Tree] = st.recursive(
    leaves(),
    lambda inner: (
        st.builds(
            Node,
            st.sampled_from(["and", "or"]),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: tuple(parts)),
        )
        | inner.map(lambda part: Node("not", (part,)))
    ),
    max_leaves=8,
)


def store(connection: Connection, some: list[Row]) -> None:
    connection.execute(delete(LOOSE))
    connection.execute(insert(LOOSE), some)


def found(connection: Connection, where: Filter) -> set[str]:
    return set(connection.execute(select(LOOSE.c.id).where(compile_where(where, LOOSE))).scalars())


class TestSqlAgreesWithPython:
    @given(rows(), st.lists(TREES, min_size=1, max_size=4))
    @settings(deadline=None, max_examples=60)
    def test_random_filters(self, connection: Connection, some: list[Row], trees: list[Tree]) -> None:
        store(connection, some)
        everyone = {row["id"] for row in some}
        for tree in trees:
            where = built(tree)
            expected = {row["id"] for row in some if holds(tree, row)}
            assert found(connection, where) == expected
            assert found(connection, ~where) == everyone - expected
            assert found(connection, ~~where) == expected
            assert {row["id"] for row in some if admits(where, row)} == expected

    @given(rows(), st.lists(TREES, min_size=1, max_size=4))
    @settings(deadline=None, max_examples=60)
    def test_pushdown_lets_through_all_that_the_filter_does(self, some: list[Row], trees: list[Tree]) -> None:
        for tree in trees:
            where = built(tree)
            pushed = pushdown(where)
            assert all(admits(pushed, row) for row in some if holds(tree, row))
            assert all(one.operator in INDEXED[one.field] for one in comparisons(pushed))

    @pytest.mark.parametrize("field", [name for name, kind in FIELDS.items() if kind.nullable])
    def test_empty_fields_have_two_truth_values(self, connection: Connection, field: str) -> None:
        blank: Row = {
            "user_id": "u", "session_id": "s", "memory_type": "semantic", "content": "c", "importance": 0.5,
            "token_count": 1, "compressed": False, "compression_source": None, "source_session_id": None,
            "chroma_id": None, "created_at": datetime(2024, 1, 1, tzinfo=UTC),
            "updated_at": datetime(2024, 1, 1, tzinfo=UTC), "version": 1,
        }  # fmt: skip
        store(connection, [{**blank, "id": "empty"}, {**blank, "id": "full", field: "b"}])
        of = Field(field)
        expected: list[tuple[Filter, set[str]]] = [
            (of == None, {"empty"}),  # noqa: E711 - an expression
            (of != None, {"full"}),  # noqa: E711
            (of == "b", {"full"}),
            (of != "b", {"empty"}),
            (of < "c", {"full"}),
            (of >= "c", set()),
            (of.in_(["b"]), {"full"}),
            (of.between("a", "c"), {"full"}),
        ]
        for where, ids in expected:
            assert found(connection, where) == ids
            assert found(connection, ~where) == {"empty", "full"} - ids

    @pytest.mark.parametrize("sign", ORDERINGS)
    @pytest.mark.parametrize("value", [True, False])
    def test_the_order_of_flags_is_refused_or_answered(self, connection: Connection, sign: str, value: bool) -> None:
        try:
            where = COMPARE[sign](F.compressed, value)
        except ValidationError:
            return
        assert isinstance(where, Filter)
        found(connection, where)

    def test_values_are_bound(self) -> None:
        value = "'; DROP TABLE owners; --"
        for where in (F.content == value, F.content.in_([value]), F.chroma_id < value):
            assert value not in str(compile_where(where, LOOSE))

    def test_the_largest_filters_run(self, connection: Connection) -> None:
        chain: Filter = NOTHING
        product: Filter = EVERYTHING
        for number in range(MAX_COMPARISONS):
            chain |= F.chroma_id != str(number)
            product &= F.chroma_id < str(number)
        for where in (chain, product, ~chain, F.id.in_([str(n) for n in range(MAX_LISTED)])):
            found(connection, check_filter(where))

    @pytest.mark.parametrize("levels", [20, 100, 300, 5_000])
    def test_deep_filters_run_or_are_refused(self, connection: Connection, levels: int) -> None:
        where: Filter = F.importance >= 0
        try:
            for level in range(levels):
                part = F.token_count > level
                where = where & part if level % 2 else where | part
            where = check_filter(where)
        except ValidationError:
            assert levels > 20
            return
        found(connection, where)
        found(connection, ~where)


def named(value: object) -> str:
    """A parameter's id: short, whatever the value is."""
    return "huge" if isinstance(value, int) and abs(value) > 2**64 else ascii(value)[:20]


def above(low: float) -> Filter:
    return F.importance > low


class TestFields:
    def test_they_are_those_of_a_chunk_but_for_metadata(self) -> None:
        assert list(FIELDS) == [name for name in Chunk.model_fields if name != "metadata"]
        assert dir(F) == sorted(FIELDS)

    def test_nullable_are_those_that_a_chunk_may_leave_empty(self) -> None:
        assert {name for name, kind in FIELDS.items() if kind.nullable} == {
            name for name, column in CHUNKS.c.items() if column.nullable
        }

    def test_indexed_are_those_of_a_record(self) -> None:
        assert set(INDEXED) == set(inspect.get_annotations(RecordMetadata))
        assert not any(FIELDS[name].nullable for name in INDEXED)

    @pytest.mark.parametrize("name", ["metadata", "topic", "Importance", "", "_x", "x" * 5_000_000], ids=named)
    def test_unknown_is_refused_with_the_known(self, name: str) -> None:
        with pytest.raises(ValidationError) as caught:
            getattr(F, name)
        message = str(caught.value)
        assert name[:20] in message
        assert "memory_type" in message
        assert len(message) < 500

    def test_pythons_own_protocols_are_absent(self) -> None:
        assert not hasattr(F, "__wrapped__")
        assert (copy.copy(F).importance >= 0) == (F.importance >= 0)
        assert repr(F.importance) == "F.importance"

    def test_a_field_alone_is_no_condition(self) -> None:
        with pytest.raises(ValidationError):
            check_filter(F.compressed)
        # `F.compressed and …` would silently be the second alone.
        with pytest.raises(ValidationError):
            bool(F.compressed)


class TestValues:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("content", 1),
            ("content", ""),
            ("content", " "),
            ("content", "\x00"),
            ("id", "\ud800"),
            ("id", None),
            ("session_id", b"s"),
            ("user_id", ["a"]),
            ("memory_type", "Semantic"),
            ("memory_type", "fact"),
            ("memory_type", None),
            ("memory_type", 1),
            ("importance", "0.5"),
            ("importance", True),
            ("importance", None),
            ("importance", math.nan),
            ("importance", math.inf),
            ("importance", Decimal("0.5")),
            ("importance", 10**400),
            ("importance", 10**5_000),
            ("token_count", 1.5),
            ("token_count", True),
            ("token_count", 2**63),
            ("token_count", 10**5_000),
            ("version", "1"),
            ("compressed", 1),
            ("compressed", "true"),
            ("compressed", None),
            ("created_at", "2024-05-01"),
            ("created_at", 1714521600),
            ("created_at", datetime(2024, 5, 1)),  # noqa: DTZ001 - what is refused
            ("updated_at", None),
            ("chroma_id", 1),
            ("content", "x" * 1_048_577),
        ],
        ids=named,
    )
    def test_wrong_values_are_refused(self, field: str, value: object) -> None:
        of = Field(field)
        attempts: list[Callable[[], Filter]] = [
            lambda: of == value,
            lambda: of != value,
            lambda: of < value,
            lambda: of <= value,
            lambda: of > value,
            lambda: of >= value,
            lambda: of.in_([value]),
            lambda: of.between(value, value),
        ]
        for attempt in attempts:
            with pytest.raises(ValidationError) as caught:
                attempt()
            assert f"F.{field}" in str(caught.value)
            assert len(str(caught.value)) < 400

    @pytest.mark.parametrize("field", [name for name, kind in FIELDS.items() if kind.nullable])
    def test_none_has_no_order(self, field: str) -> None:
        for sign in ORDERINGS:
            with pytest.raises(ValidationError):
                COMPARE[sign](Field(field), None)
        with pytest.raises(ValidationError):
            Field(field).between(None, "b")

    @pytest.mark.parametrize("values", ["semantic", b"semantic", 1, None, F], ids=["str", "bytes", "1", "None", "F"])
    def test_in_takes_a_list(self, values: Any) -> None:
        with pytest.raises(ValidationError, match=r"F\.memory_type\.in_ takes a list"):
            F.memory_type.in_(values)

    def test_in_takes_any_iterable_once(self) -> None:
        expected = Comparison("id", "in", ("a", "b"))
        assert F.id.in_(letter for letter in "abab") == expected
        assert F.id.in_({"a": 1, "b": 2}) == expected
        assert F.id.in_(("a", "b")) == expected

    def test_in_takes_so_many_at_most(self) -> None:
        with pytest.raises(ValidationError, match="10,000"):
            F.id.in_(str(number) for number in range(MAX_LISTED + 1))
        assert F.id.in_(["a"] * (MAX_LISTED + 1)) == Comparison("id", "in", ("a",))

    def test_times_are_compared_as_instants(self) -> None:
        there = datetime(2024, 5, 1, 9, tzinfo=timezone(timedelta(hours=9)))
        assert (F.created_at >= there) == (F.created_at >= datetime(2024, 5, 1, tzinfo=UTC))

    def test_values_are_kept_as_given(self) -> None:
        assert (F.content == "é") != (F.content == "e\u0301")
        assert (F.importance >= 1) == Comparison("importance", ">=", 1.0)
        assert F.importance.between(0, 1) == And(
            (Comparison("importance", ">=", 0.0), Comparison("importance", "<=", 1.0))
        )


class TestCombining:
    def test_words_and_chains_are_refused(self) -> None:
        attempts: list[Callable[[], object]] = [
            lambda: above(0.1) and above(0.2),
            lambda: above(0.1) or above(0.2),
            lambda: not above(0.1),
            lambda: 0.2 < F.importance < 0.5,
            lambda: 0.2 <= F.importance <= 0.5,
            lambda: F.importance in [0.5],
            lambda: bool(EVERYTHING),
            lambda: bool(NOTHING),
            lambda: bool(above(0.1) & above(0.2)),
            lambda: bool(above(0.1) | above(0.2)),
        ]
        for attempt in attempts:
            with pytest.raises(ValidationError, match="combine filters by &"):
                attempt()

    @pytest.mark.parametrize("other", [True, None, 1, "F.importance > 0.5", F.importance, F])
    def test_filters_combine_with_filters(self, other: Any) -> None:
        with pytest.raises(ValidationError):
            _ = above(0.1) & other
        with pytest.raises(ValidationError):
            _ = above(0.1) | other

    def test_empty_lists_fold(self) -> None:
        empty, some = F.id.in_([]), above(0.1)
        assert empty is NOTHING
        assert ~empty is EVERYTHING
        assert (some & empty) is NOTHING
        assert (empty & some) is NOTHING
        assert (some | empty) is some
        assert (empty | some) is some
        assert (some & ~empty) is some
        assert (some | ~empty) is EVERYTHING
        assert (empty | F.content.in_([])) is NOTHING
        assert (some & (F.id.in_(iter(())) | (F.content.in_([]) & some))) is NOTHING

    def test_chains_are_flat(self) -> None:
        a, b, c, d = (above(number / 10) for number in range(4))
        assert ((a & b) & (c & d)) == And((a, b, c, d))
        assert (a | (b | (c | d))) == Or((a, b, c, d))
        assert ((a & b) | (c & d)) == Or((And((a, b)), And((c, d))))

    def test_de_morgan(self) -> None:
        a, b, c = F.id == "a", F.importance < 0.5, F.memory_type.in_(["semantic"])
        assert ~(a & b & c) == (~a | ~b | ~c)
        assert ~(a | b | c) == (~a & ~b & ~c)
        assert ~(a & (b | c)) == (~a | (~b & ~c))
        assert ~~(a & (b | c)) == (a & (b | c))

    @pytest.mark.parametrize(
        ("where", "complement"),
        [
            (F.importance == 0.5, F.importance != 0.5),
            (F.importance < 0.5, F.importance >= 0.5),
            (F.importance > 0.5, F.importance <= 0.5),
            (F.id.in_(["a"]), Comparison("id", "not in", ("a",))),
            (F.chroma_id < "a", (F.chroma_id >= "a") | Comparison("chroma_id", "==", None)),
            (Comparison("chroma_id", "==", None), Comparison("chroma_id", "!=", None)),
        ],
    )
    def test_complements(self, where: Filter, complement: Filter) -> None:
        assert ~where == complement

    def test_filters_are_values(self) -> None:
        assert len({above(0.1), above(0.1), above(0.2), above(0.1) & above(0.2), above(0.1) & above(0.2)}) == 3


class TestCheckFilter:
    def test_none_is_everything(self) -> None:
        assert check_filter(None) is EVERYTHING

    @pytest.mark.parametrize("where", [{}, {"importance": 1}, "importance > 0.5", True, False, 0, F, []])
    def test_only_filters(self, where: object) -> None:
        with pytest.raises(ValidationError, match="where must be a filter"):
            check_filter(where)

    def test_argument_is_named(self) -> None:
        with pytest.raises(ValidationError, match="^ids or where must be a filter"):
            check_filter({"x" * 1_000_000: 1}, "ids or where")

    def test_so_many_comparisons_at_most(self) -> None:
        where: Filter = NOTHING
        for number in range(MAX_COMPARISONS):
            where |= F.id == str(number)
        assert check_filter(where) is where
        with pytest.raises(ValidationError, match="501"):
            check_filter(where | (F.id == "one more"))


class TestPushdown:
    @pytest.mark.parametrize(
        ("where", "pushed"),
        [
            (EVERYTHING, EVERYTHING),
            (NOTHING, NOTHING),
            (F.importance > 0.5, F.importance > 0.5),
            (F.content == "a", EVERYTHING),
            (F.memory_type > "semantic", EVERYTHING),
            ((F.importance > 0.5) & (F.content == "a"), F.importance > 0.5),
            ((F.importance > 0.5) | (F.content == "a"), EVERYTHING),
            (
                (F.importance > 0.5) & ((F.session_id == "s") | (F.id == "a")) & (F.user_id == "u"),
                (F.importance > 0.5) & (F.user_id == "u"),
            ),
            (
                ((F.importance > 0.5) & (F.id == "a")) | (F.session_id == "s"),
                (F.importance > 0.5) | (F.session_id == "s"),
            ),
            (~((F.importance > 0.5) | (F.id == "a")), F.importance <= 0.5),
        ],
    )
    def test_the_strongest_that_an_index_can_apply(self, where: Filter, pushed: Filter) -> None:
        assert pushdown(where) == pushed
