"""Does every index do what `VectorIndex` says? Its answers are held against brute force over the tests' own record."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from sqlalchemy import Connection

from memvault.errors import IndexMismatchError, VectorIndexError
from memvault.filters import EVERYTHING, NOTHING, F, Filter
from memvault.vectors.base import INDEXED, ScannedRecord, TransactionalIndex, VectorIndex, pushdown
from tests.support import TOLERANCE, unit_vectors
from tests.vectors.conftest import WORLDS
from tests.vectors.worlds import DIMENSION, NOON, SPEC, IndexWorld, SqlWorld, direction, make_record, make_records

INSIDE = [name for name in WORLDS if name.startswith(("sqlite-vec", "pgvector"))]
"""The indexes that take part in the database's transactions."""

ODD_NAMES = [
    "john_doe", "john-doe", "johnXdoe", "a", "ab", "abc", "A", "%", "*", "_", "a%", 'u"1', "u'1", "u\\1", "Ä", "ä",
    "a\u0308", "u 1", " u", "u ", "1", "1.0", "true", "None", "$eq", "\U0001f600", "\U0001f601", "e\u0301", "\u00e9",
    "日本", "\ufb01", "fi", "\u202eabc", "\ttab", "x" * 254, "x" * 255, "é" * 255,
]  # fmt: skip
"""Names that a careless comparison would take for one another, or for a pattern."""


def test_is_a_vector_index(index_world: IndexWorld) -> None:
    assert isinstance(index_world.index, VectorIndex)
    assert index_world.index.location
    assert index_world.index.spec == SPEC


def test_an_empty_index_answers(index_world: IndexWorld) -> None:
    assert index_world.index.query("user_alice", direction(), 10) == []
    assert list(index_world.index.scan()) == []
    assert index_world.index.count() == index_world.index.count("user_alice") == 0


def test_nothing_is_asked_of_an_index_that_was_not_opened(index_world: IndexWorld) -> None:
    unopened = index_world.fresh()
    assert unopened.spec is None
    for call in (
        lambda: unopened.count(),
        lambda: unopened.query("user_alice", direction(), 1),
        lambda: list(unopened.scan()),
    ):
        with pytest.raises(VectorIndexError):
            call()
    unopened.close()


def test_finds_what_was_written(index_world: IndexWorld) -> None:
    index_world.put(make_records(300))
    for seed in range(20):
        index_world.check("user_alice", direction(seed), 10)
    record = index_world.records["mem_7"]
    [match] = index_world.index.query("user_alice", record.vector, 1)
    assert match.id == "mem_7"
    assert match.similarity == pytest.approx(1, abs=TOLERANCE)
    assert index_world.check("user_alice", -record.vector, 300)[-1].similarity == pytest.approx(-1, abs=TOLERANCE)


def test_a_single_record_can_be_written(index_world: IndexWorld) -> None:
    index_world.put(make_records(1))
    index_world.put([])
    index_world.check("user_alice", direction(), 10)


def test_an_overwrite_leaves_nothing_of_what_was(index_world: IndexWorld) -> None:
    index_world.put(make_records(120))
    changed = [
        replace(
            record,
            vector=vector,
            document=f"changed {record.id}",
            metadata=replace(
                record.metadata, importance=0.9, compressed=True, memory_type="semantic", session_id="sess_2",
                created_at=NOON + timedelta(days=1),
            ),
        )
        for record, vector in zip(list(index_world.records.values())[::2], unit_vectors(60, DIMENSION, 5), strict=True)
    ]  # fmt: skip
    index_world.put(changed)
    assert index_world.index.count() == 120
    for where in (
        EVERYTHING,
        F.compressed == True,  # noqa: E712
        F.compressed == False,  # noqa: E712
        F.importance < 0.6,
        F.session_id == "sess_1",
        F.memory_type == "semantic",
        F.created_at > NOON,
    ):
        index_world.check("user_alice", direction(), 120, where)
        index_world.check("user_alice", changed[3].vector, 5, where)
    check_scan(index_world, 50)


def test_the_same_record_may_be_written_again_and_again(index_world: IndexWorld) -> None:
    for _ in range(3):
        index_world.put(make_records(50))
    assert index_world.index.count() == 50
    index_world.check("user_alice", direction(), 100)


def test_what_was_deleted_is_gone_and_may_come_back(index_world: IndexWorld) -> None:
    records = make_records(200)
    index_world.put(records)
    index_world.remove([record.id for record in records[:80]])
    assert index_world.index.count() == index_world.index.count("user_alice") == 120
    index_world.check("user_alice", records[3].vector, 200)
    check_scan(index_world, 70)
    index_world.put(records[:40])
    index_world.check("user_alice", records[3].vector, 200)
    index_world.remove(list(index_world.records))
    assert index_world.index.count() == 0
    index_world.check("user_alice", direction(), 5)


def test_deleting_what_is_absent_is_no_error(index_world: IndexWorld) -> None:
    index_world.put(make_records(10))
    index_world.remove([])
    index_world.remove(["absent"])
    index_world.remove(["mem_1", "absent", "mem_2", "mem_1"])
    assert index_world.index.count() == 8
    index_world.check("user_alice", direction(), 10)


def test_names_are_compared_exactly(index_world: IndexWorld) -> None:
    vectors = unit_vectors(len(ODD_NAMES), DIMENSION, 3)
    index_world.put(
        [
            make_record(name, vector, ODD_NAMES[-1 - place], session_id=name)
            for place, (name, vector) in enumerate(zip(ODD_NAMES, vectors, strict=True))
        ]
    )
    for place, name in enumerate(ODD_NAMES):
        [match] = index_world.check(name, vectors[place], 100)
        assert match.id == ODD_NAMES[-1 - place]
        assert index_world.index.count(name) == 1
        for session in ODD_NAMES[::6]:
            index_world.check(name, vectors[place], 100, F.session_id == session)
            index_world.check(name, vectors[place], 100, F.session_id != session)
            index_world.check(name, vectors[place], 100, F.user_id == session)
    assert index_world.index.count("j") == index_world.index.count("john") == 0
    check_scan(index_world, 7)
    index_world.remove(ODD_NAMES[::2])
    check_scan(index_world, 7)


def test_users_are_apart(index_world: IndexWorld) -> None:
    same = unit_vectors(40, DIMENSION, 3)
    users = ["user_1", "user_10", "user_1_0", "user_"]
    index_world.put(
        [
            make_record(f"{'m' * place}em_{number}", vector, user_id, session_id=f"sess_{user_id}")
            for place, user_id in enumerate(users)
            for number, vector in enumerate(same)
        ]
    )
    for user_id in users:
        index_world.check(user_id, same[0], 10)
        assert len(index_world.check(user_id, same[0], 1000)) == 40
        index_world.check(user_id, same[0], 1000, F.user_id.in_(users))
        index_world.check(user_id, same[0], 1000, F.user_id != user_id)
        index_world.check(user_id, same[0], 1000, (F.user_id == "user_10") | (F.importance >= 0))
    index_world.remove([record.id for record in index_world.of_user("user_1")])
    assert [index_world.index.count(user_id) for user_id in users] == [0, 40, 40, 40]
    assert index_world.index.count("nobody") == 0
    assert index_world.index.query("nobody", same[0], 10) == []


def test_counts_by_user(index_world: IndexWorld) -> None:
    for place, user_id in enumerate(("user_a", "user_b", "user_c"), start=1):
        index_world.put(make_records(place * 20, user_id, prefix=user_id))
    assert index_world.index.count() == 120
    assert [index_world.index.count(user_id) for user_id in ("user_a", "user_b", "user_c")] == [20, 40, 60]


def varied(index_world: IndexWorld, seed: int = 11) -> np.random.Generator:
    """Fill the world with 400 records of two users that differ in every field."""
    rng = np.random.default_rng(seed)
    importances = [0.0, 1.0, 0.1, 0.3, 0.1 + 0.2, 1 / 3, 5e-324, *rng.random(40).tolist()]
    index_world.put(
        [
            make_record(
                f"mem_{place}",
                vector,
                "user_bob" if place % 4 == 0 else "user_alice",
                document=f"memory {place}",
                session_id=f"sess_{rng.integers(6)}",
                memory_type=["episodic", "semantic", "working"][rng.integers(3)],
                importance=importances[rng.integers(len(importances))],
                compressed=bool(rng.integers(2)),
                created_at=NOON + timedelta(microseconds=int(rng.integers(-3, 4)), days=int(rng.integers(-2, 3))),
            )
            for place, vector in enumerate(unit_vectors(400, DIMENSION, seed))
        ]
    )
    return rng


def test_filters_hold_for_every_match_and_lose_none(index_world: IndexWorld) -> None:
    varied(index_world)
    day = timedelta(days=1)
    moment = timedelta(microseconds=1)
    tuesday = F.created_at.between(NOON - day, NOON - day + moment)
    compressed = F.compressed == True  # noqa: E712
    filters: list[Filter] = [
        EVERYTHING,
        NOTHING,
        compressed,
        ~compressed,
        F.compressed != True,  # noqa: E712
        F.compressed.in_([True, False]),
        ~F.compressed.in_([True]),
        F.importance == 0.1 + 0.2,
        F.importance == 0.3,
        F.importance != 0.3,
        F.importance == 0,
        F.importance.in_([0, 1, 0.1]),
        ~F.importance.in_([0, 1, 0.1]),
        F.importance > 0.3,
        F.importance >= 0.3,
        F.importance < 0.1,
        F.importance <= 0.1,
        F.importance > 0,
        F.importance > 1,
        F.importance.between(0.1, 0.3),
        F.importance.between(0.3, 0.1),
        F.memory_type == "semantic",
        F.memory_type != "semantic",
        F.memory_type.in_(["semantic", "working"]),
        F.memory_type == "procedural",
        F.session_id == "sess_1",
        F.session_id.in_([f"sess_{number}" for number in range(3, 2000)]),
        ~F.session_id.in_(["sess_1", "sess_2", "absent"]),
        F.user_id == "user_bob",
        F.created_at == NOON,
        F.created_at != NOON,
        F.created_at > NOON,
        F.created_at >= NOON,
        F.created_at < NOON,
        F.created_at <= NOON,
        F.created_at.in_([NOON, NOON + moment, NOON + day]),
        ~F.created_at.in_([NOON, NOON + moment]),
        tuesday,
        ~tuesday,
        compressed & (F.importance >= 0.3),
        compressed & (F.importance >= 0.3) & (F.memory_type == "semantic"),
        compressed | (F.importance >= 0.9),
        compressed & ~compressed,
        compressed | ~compressed,
        (compressed & tuesday) | (F.session_id == "sess_0") | ~(F.importance > 0.2),
        ~((compressed | tuesday) & (F.session_id != "sess_0")),
        ~(~(F.importance < 0.5) | ((F.memory_type == "working") & ~(tuesday | (F.session_id == "sess_4")))),
    ]
    for place, where in enumerate(filters):
        assert pushdown(where) == where
        for user_id in ("user_alice", "user_bob"):
            index_world.check(user_id, direction(place), 8, where)
            index_world.check(user_id, direction(place), 500, where)


def test_any_filter_of_indexed_fields_agrees_with_brute_force(index_world: IndexWorld) -> None:
    rng = varied(index_world)
    records = list(index_world.records.values())

    def comparison() -> Filter:
        name = str(rng.choice(list(INDEXED)))
        field = getattr(F, name)
        one, other = (getattr(records[rng.integers(len(records))].metadata, name) for _ in range(2))
        match str(rng.choice(list(INDEXED[name]))):
            case "==":
                made = field == one
            case "!=":
                made = field != one
            case "<":
                made = field < one
            case "<=":
                made = field <= one
            case ">":
                made = field > one
            case ">=":
                made = field >= one
            case "in":
                made = field.in_([one, other])
            case _:
                made = ~field.in_([one, other])
        assert isinstance(made, Filter)
        return made

    def tree(depth: int) -> Filter:
        kind = rng.integers(4) if depth else 3
        if kind == 0:
            return tree(depth - 1) & tree(depth - 1)
        if kind == 1:
            return tree(depth - 1) | tree(depth - 1)
        return ~tree(depth - 1) if kind == 2 else comparison()

    for _ in range(150):
        index_world.check("user_alice", direction(int(rng.integers(1000))), int(rng.integers(1, 30)), tree(4))


def test_equal_similarities_come_by_id(index_world: IndexWorld) -> None:
    near, far = unit_vectors(2, DIMENSION, 8)
    names = [f"mem_{number * 7919 % 101:03}" for number in range(100)]
    index_world.put([make_record(name, near if place % 2 else far) for place, name in enumerate(names)])
    for k in (100, 1000):
        ids = [match.id for match in index_world.check("user_alice", near, k)]
        assert ids[:50] == sorted(names[1::2])
        assert ids[50:] == sorted(names[::2])
    assert {match.id for match in index_world.check("user_alice", near, 50)} == set(names[1::2])


def test_a_thousand_copies_of_one_vector_are_all_found(index_world: IndexWorld) -> None:
    index_world.put(make_records(500, "user_bob", prefix="bob"))
    count = 3000 // index_world.slowness
    index_world.put([make_record(f"mem_{place:04}", direction(1)) for place in range(count)])
    matches = index_world.check("user_alice", direction(1), count)
    assert [match.id for match in matches] == [f"mem_{place:04}" for place in range(count)]
    assert len(index_world.check("user_alice", direction(2), 5000)) == count


def test_thousands_are_written_and_asked_for_at_once(index_world: IndexWorld) -> None:
    count = 6000 // index_world.slowness
    mine = make_records(count)
    theirs = make_records(count, "user_bob", prefix="bob", seed=2)
    index_world.fill([record for pair in zip(mine, theirs, strict=True) for record in pair])
    assert index_world.index.count() == 2 * count
    assert index_world.index.count("user_bob") == count
    index_world.check("user_alice", direction(), 10)
    index_world.check("user_alice", direction(), count * 5 // 6, recall=0.999)
    assert len(index_world.check("user_alice", direction(), 100_000)) == count
    index_world.check("user_alice", direction(), 5000, F.compressed == True)  # noqa: E712
    index_world.remove([record.id for record in theirs])
    assert index_world.index.count() == count
    index_world.check("user_bob", direction(), 10)


def test_a_small_user_among_many_records_loses_none(index_world: IndexWorld) -> None:
    count = 30_000 // index_world.slowness
    records = make_records(count, "user_bob")
    for place in range(count // 60, count, count // 30):
        records[place] = replace(records[place], metadata=replace(records[place].metadata, user_id="user_alice"))
    index_world.fill(records)
    for seed in range(5):
        assert len(index_world.check("user_alice", direction(seed), 50)) == 30
        index_world.check("user_alice", direction(seed), 5)


def test_reopening_keeps_everything(index_world: IndexWorld) -> None:
    varied(index_world)
    index_world.remove([f"mem_{place}" for place in range(0, 100, 3)])
    before = index_world.check("user_alice", direction(), 500)
    index_world.reopen()
    assert index_world.check("user_alice", direction(), 500) == before
    check_scan(index_world, 100)
    index_world.put(make_records(50, prefix="new", seed=4))
    index_world.index.close()
    index_world.reopen()
    index_world.check("user_alice", direction(), 20, F.importance > 0.2)


def test_closing_twice_is_no_error(index_world: IndexWorld) -> None:
    index_world.index.close()
    index_world.index.close()
    assert index_world.index.open(SPEC)


def test_creating_what_is_there_keeps_it(index_world: IndexWorld) -> None:
    index_world.put(make_records(20))
    index_world.index.create()
    index_world.check("user_alice", direction(), 100)


def test_another_dimension_is_refused(index_world: IndexWorld) -> None:
    index_world.put(make_records(5))
    index_world.index.close()
    with pytest.raises(IndexMismatchError, match="16.*17"):
        index_world.index.open(replace(SPEC, dimension=17))
    index_world.reopen()
    index_world.check("user_alice", direction(), 100)


def test_scan_returns_everything_once(index_world: IndexWorld) -> None:
    varied(index_world)
    for batch in (1, 37, 400, 1000, 100_000):
        check_scan(index_world, batch)


def test_what_was_purged_can_be_created_anew(index_world: IndexWorld) -> None:
    for seed in range(3):
        index_world.put(make_records(50, seed=seed))
        index_world.check("user_alice", direction(), 100)
        index_world.purge()
        index_world.index.create()
        assert index_world.index.count() == 0
        assert list(index_world.index.scan()) == []
        assert index_world.index.query("user_alice", direction(), 10) == []
    index_world.purge()
    index_world.purge()


def test_threads_write_and_ask_at_once(index_world: IndexWorld) -> None:
    started = threading.Barrier(8)

    def work(number: int) -> None:
        user_id = f"user_{number}"
        started.wait()
        for turn in range(6):
            index_world.put(make_records(40, user_id, prefix=f"{user_id}_{turn}", seed=100 * number + turn))
            index_world.remove([f"{user_id}_{turn}_{place}" for place in range(0, 40, 4)])
            matches = index_world.index.query(user_id, direction(turn), 1000)
            assert len(matches) == index_world.index.count(user_id) == 30 * (turn + 1)
            assert all(match.id.startswith(f"{user_id}_") for match in matches)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()
    for number in range(8):
        index_world.check(f"user_{number}", direction(), 10)
        index_world.check(f"user_{number}", direction(), 1000)
    assert index_world.index.count() == 8 * 180
    check_scan(index_world, 1000)


def test_records_are_fetched_by_their_ids(index_world: IndexWorld) -> None:
    index = index_world.index
    assert index.fetch(["mem_1"]) == []
    index_world.put([*make_records(60), *make_records(3, "user_bob", prefix="bob", seed=2)])
    assert index.fetch([]) == []
    assert [record.id for record in index.fetch(["bob_1", "mem_no", "bob_1", "MEM_1"])] == ["bob_1"]
    ids = list(index_world.records)
    check_records(index_world, [index.fetch(ids[:2]), index.fetch([*ids[2:], "mem_no"])])


@pytest.mark.parametrize("index_world", INSIDE, indirect=True)
def test_a_write_is_part_of_the_callers_transaction(index_world: IndexWorld) -> None:
    world, index = index_world, index_world.index
    assert isinstance(world, SqlWorld)
    assert isinstance(index, TransactionalIndex)
    world.put(make_records(20))
    added, removed = make_records(1, prefix="new", seed=7), ["mem_3", "mem_4"]
    turned = make_record("mem_5", direction())

    def change(connection: Connection) -> None:
        vectors = {record.id: record.vector for record in [*added, turned]}
        index.follow(connection, "user_alice", {**vectors, **dict.fromkeys(removed)})
        found = {match.id for match in index.query("user_alice", direction(), 100, connection=connection)}
        assert found == (set(world.records) | {"new_0"}) - set(removed)
        [nearest] = index.query("user_alice", direction(), 1, connection=connection)
        assert nearest.id == "mem_5"
        assert nearest.similarity > 0.99999
        assert {match.id for match in index.query("user_alice", direction(), 100)} == set(world.records)

    with pytest.raises(RuntimeError, match="changed my mind"), world.database.writing() as connection:
        change(connection)
        raise RuntimeError("changed my mind")
    world.check("user_alice", direction(), 100)
    with world.database.writing() as connection:
        change(connection)
    assert index.count() == 19


def check_scan(index_world: IndexWorld, batch: int) -> None:
    lists = list(index_world.index.scan(batch))
    assert all(0 < len(some) <= batch for some in lists)
    check_records(index_world, lists)


def check_records(index_world: IndexWorld, lists: list[list[ScannedRecord]]) -> None:
    scanned: dict[str, ScannedRecord] = {}
    for record in (record for some in lists for record in some):
        assert record.id not in scanned
        scanned[record.id] = record
    assert set(scanned) == set(index_world.records)
    for id, record in scanned.items():
        written = index_world.records[id]
        assert record.user_id == written.metadata.user_id
        assert record.metadata is not None
        assert record.metadata.importance == pytest.approx(written.metadata.importance, rel=1e-12)
        assert replace(record.metadata, importance=written.metadata.importance) == written.metadata
        assert record.vector.dtype == np.float32
        assert np.abs(record.vector - written.vector).max() < TOLERANCE
        assert record.document in (None, written.document)
