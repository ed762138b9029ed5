"""Are vectors that are kept in memory ever anything but those of SQL? What does a search read beside its answer?"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event, text
from sqlmodel import Session

from memvault import ConfigurationError, F, NewChunk, StorageLayer, UserMemory
from memvault.search import nearest
from memvault.search.matrices import VectorCache
from memvault.values import Chunk
from tests.conftest import OpenVault
from tests.support import assert_nearest, unit_vectors

BACKENDS = (("sqlite", "exact"), ("postgres", "exact"))

DIMENSION = 16


@pytest.fixture
def vault(open_exact: OpenVault) -> StorageLayer:
    return open_exact(embedder="none")


def fill(user: UserMemory, count: int, seed: int = 1, prefix: str = "mem") -> dict[str, Any]:
    vectors = dict(zip((f"{prefix} {n:04}" for n in range(count)), unit_vectors(count, DIMENSION, seed), strict=True))
    user.chunks.add_many(NewChunk(f"text of {id}", id=id, embedding=vector) for id, vector in vectors.items())
    return vectors


def check(user: UserMemory, truth: dict[str, Any], seed: int = 50, k: int = 10) -> None:
    query = unit_vectors(1, DIMENSION, seed)[0]
    assert_nearest(user.search(embedding=query, k=k), truth, query, k)


@contextmanager
def reading(storage: StorageLayer) -> Iterator[dict[str, list[Any]]]:
    """How many rows each SELECT of vectors fetched, under "vectors" with them and under "keys" without; and all else
    by statement, under "all"."""
    seen: dict[str, list[Any]] = {"vectors": [], "keys": [], "all": []}

    def note(_conn: Any, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        seen["all"].append(statement)
        if "memory_vectors" in statement:
            kind = "vectors" if ".vector" in statement.split("FROM")[0] else "keys"
            plain = storage.engine.raw_connection()
            try:
                counting = plain.cursor()
                counting.execute(statement, parameters)
                seen[kind].append(len(counting.fetchall()))
            finally:
                plain.close()

    event.listen(storage.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(storage.engine, "before_cursor_execute", note)


def kept(storage: StorageLayer) -> VectorCache:
    return storage._search._nearest._cache


# What is read.


def test_a_second_search_reads_one_row_and_its_answer(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 100)
    with reading(vault) as seen:
        check(alice, truth)
        assert (seen["vectors"], seen["keys"]) == ([100], [])
    with reading(vault) as seen:
        check(alice, truth, seed=51)
        assert (seen["vectors"], seen["keys"]) == ([], [])
        [both] = [statement for statement in seen["all"] if statement.lstrip().startswith("SELECT")]
        assert "owners" in both
        assert "memory_chunks" in both


def test_a_new_chunk_costs_the_rows_that_came(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 100)
    check(alice, truth)
    for turn in range(3):
        truth |= fill(alice, 2, seed=10 + turn, prefix=f"new {turn}")
        with reading(vault) as seen:
            check(alice, truth, k=200)
        assert (seen["vectors"], seen["keys"]) == ([2], [])


def test_a_removal_costs_the_keys_that_are_left(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 100)
    check(alice, truth)
    for id in list(truth)[::7]:
        alice.chunks.delete(id)
        del truth[id]
    with reading(vault) as seen:
        check(alice, truth, k=200)
    assert (seen["vectors"], seen["keys"]) == ([0], [len(truth)])
    changed = list(truth)[3]
    truth[changed] = unit_vectors(1, DIMENSION, 77)[0]
    alice.chunks.update(changed, embedding=truth[changed])
    with reading(vault) as seen:
        check(alice, truth, k=200)
    assert (seen["vectors"], seen["keys"]) == ([1], [len(truth)])


def test_a_change_of_no_vector_costs_nothing(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 50)
    check(alice, truth)
    alice.chunks.update("mem 0003", importance=0.9, metadata={"a": 1})
    with reading(vault) as seen:
        check(alice, truth)
    assert (seen["vectors"], seen["keys"]) == ([0], [])
    assert [hit.chunk.id for hit in alice.search(embedding=truth["mem 0003"], where=F.importance > 0.8)] == ["mem 0003"]


def test_others_writes_cost_nothing(vault: StorageLayer) -> None:
    alice, bob = vault.for_user("alice"), vault.for_user("bob")
    truth = fill(alice, 50)
    check(alice, truth)
    fill(bob, 50, prefix="his")
    with reading(vault) as seen:
        check(alice, truth)
    assert (seen["vectors"], seen["keys"]) == ([], [])


def test_a_filter_hydrates_no_more_than_it_must(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 200)
    check(alice, truth)
    with reading(vault) as seen:
        alice.search(embedding=truth["mem 0007"], k=5, where=F.importance >= 0)
    assert sum("memory_chunks" in statement for statement in seen["all"]) == 1
    only = {"mem 0150": truth["mem 0150"]}
    query = -np.asarray(truth["mem 0150"])
    assert_nearest(alice.search(embedding=query, where=F.id == "mem 0150", k=3), only, query, 3)


def test_what_does_not_pass_makes_room_for_what_does(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 60)
    query = unit_vectors(1, DIMENSION, 5)[0]
    nearest = [hit.chunk.id for hit in alice.search(embedding=query, k=60)]
    with vault.engine.begin() as connection:
        compressed = [{"id": id} for id in nearest[:7]]
        connection.execute(text("UPDATE memory_chunks SET compressed = (1 = 1) WHERE id = :id"), compressed)
    for k in (1, 5, 7, 10, 53, 60):
        assert [hit.chunk.id for hit in alice.search(embedding=query, k=k)] == nearest[7 : 7 + k]
        everything = alice.search(embedding=query, k=k, include_compressed=True)
        assert [hit.chunk.id for hit in everything] == nearest[:k]
    least = alice.search(embedding=query, k=60)[20].similarity
    assert len(alice.search(embedding=query, k=60, min_similarity=least)) == 21
    assert len(alice.search(embedding=query, k=9, min_similarity=least)) == 9
    assert alice.search(embedding=query, min_similarity=1.0) == []
    assert len(truth) == 60


# Who writes.


def test_two_layers_find_each_others_writes(open_exact: OpenVault) -> None:
    one, other = open_exact(embedder="none"), open_exact(embedder="none")
    truth: dict[str, Any] = {}
    for turn in range(4):
        for layer, name in ((one, "one"), (other, "other")):
            truth |= fill(layer.for_user("alice"), 5, seed=turn * 10 + len(name), prefix=f"{name} {turn}")
            gone = sorted(truth)[turn]
            layer.for_user("alice").chunks.delete(gone)
            del truth[gone]
            check(one.for_user("alice"), truth, k=100)
            check(other.for_user("alice"), truth, k=100)


def test_a_user_who_was_erased_and_came_again_is_another(open_exact: OpenVault) -> None:
    one, other = open_exact(embedder="none"), open_exact(embedder="none")
    alice = one.for_user("alice")
    truth = fill(alice, 30)
    check(alice, truth)
    other.erase_user("alice")
    assert alice.search(embedding=unit_vectors(1, DIMENSION, 3)[0]) == []
    # As many, under the same ids: number and epoch could be the very same.
    again = fill(other.for_user("alice"), 30, seed=2)
    check(alice, again)


def test_what_was_rolled_back_was_never_there(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 20)
    check(alice, truth)

    class Abort(Exception):
        pass

    with pytest.raises(Abort), alice.transaction() as tx:
        inside = truth | fill(tx, 5, seed=2, prefix="inside")
        check(tx, inside, k=50)
        tx.chunks.delete("mem 0001")
        del inside["mem 0001"]
        check(tx, inside, k=50)
        raise Abort
    check(alice, truth, k=50)
    # The same epochs again, and other vectors.
    truth |= fill(alice, 5, seed=3, prefix="later")
    check(alice, truth, k=50)


def test_a_transaction_feeds_nobody(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 20)
    with alice.transaction() as tx:
        fill(tx, 5, seed=2, prefix="inside")
        tx.search(embedding=truth["mem 0001"])
        assert kept(vault).nbytes == 0
        if vault.engine.dialect.name == "sqlite":  # where a reader beside a writer is another connection, too
            check(alice, truth, k=50)


def test_a_callers_session_sees_its_own_writes_and_feeds_nobody(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 20)
    check(alice, truth)
    size = kept(vault).nbytes
    with Session(vault.engine) as session:
        hers = vault.for_user("alice", sql_session=session)
        check(hers, truth, k=50)
        inside = truth | fill(hers, 3, seed=4, prefix="inside")
        check(hers, inside, k=50)
        session.rollback()
        check(hers, truth, k=50)
        session.rollback()
    assert kept(vault).nbytes == size
    check(alice, truth, k=50)


def test_an_older_snapshot_sees_what_was_there_then(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    truth = fill(alice, 20)
    engine = vault.engine.execution_options(memvault_read_only=True)
    if engine.dialect.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with Session(engine) as session:
        past = vault.for_user("alice", sql_session=session)
        check(past, truth, k=50)
        now = truth | fill(alice, 5, seed=2, prefix="new")
        alice.chunks.delete("mem 0002")
        del now["mem 0002"]
        check(alice, now, k=50)  # and is kept
        check(past, truth, k=50)
        check(alice, now, k=50)


# How much is kept.


def test_bytes_bound_what_is_kept(open_exact: OpenVault) -> None:
    one_user = 100 * (DIMENSION * 4 + 8 + 80)
    layer = open_exact(embedder="none", cache_bytes=3 * one_user + 100)
    truths = {name: fill(layer.for_user(name), 100, seed, name) for seed, name in enumerate("abcde")}
    for name, truth in truths.items():
        check(layer.for_user(name), truth)
        assert kept(layer).nbytes <= 3 * one_user + 100
    assert kept(layer).nbytes == 3 * one_user
    with reading(layer) as seen:
        check(layer.for_user("e"), truths["e"])
        check(layer.for_user("c"), truths["c"])
        assert seen["vectors"] == []
        check(layer.for_user("a"), truths["a"])  # in the place of d, who searched longest ago
        check(layer.for_user("e"), truths["e"])
        assert seen["vectors"] == [100]
        check(layer.for_user("d"), truths["d"])
        assert seen["vectors"] == [100, 100]


def test_who_does_not_fit_is_not_kept(open_exact: OpenVault) -> None:
    layer = open_exact(embedder="none", cache_bytes=5_000)
    small, large = fill(layer.for_user("small"), 10), fill(layer.for_user("large"), 200, prefix="large")
    check(layer.for_user("small"), small)
    size = kept(layer).nbytes
    check(layer.for_user("large"), large)
    assert kept(layer).nbytes == size > 0


def test_nothing_is_kept_in_no_bytes(open_exact: OpenVault) -> None:
    layer = open_exact(embedder="none", cache_bytes=0)
    truth = fill(layer.for_user("alice"), 10)
    for seed in range(3):
        with reading(layer) as seen:
            check(layer.for_user("alice"), truth, seed)
        assert seen["vectors"] == [10]
    assert kept(layer).nbytes == 0


@pytest.mark.parametrize("value", [-1, 1.5, "many", True, None])
def test_odd_sizes_are_refused(open_exact: OpenVault, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="cache_bytes"):
        open_exact(cache_bytes=value)


def test_bytes_are_counted_while_a_user_grows(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    for turn in range(20):
        fill(alice, 10, seed=turn, prefix=f"turn {turn}")
        alice.search(embedding=unit_vectors(1, DIMENSION, 1)[0])
    least = 200 * (DIMENSION * 4 + 8 + 80)
    assert least <= kept(vault).nbytes <= 2 * least
    vault.erase_user("alice")
    truth = fill(alice, 10)
    check(alice, truth)
    assert kept(vault).nbytes == 10 * (DIMENSION * 4 + 8 + 80)


def test_above_the_limit_vectors_are_streamed(open_exact: OpenVault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "PAGE", 64)
    layer = open_exact(embedder="none", exact_limit=10)
    alice = layer.for_user("alice")
    truth = fill(alice, 300)
    for k in (1, 10, 300, 5000):
        check(alice, truth, seed=k, k=k)
    with reading(layer) as seen:
        check(alice, truth)
    assert seen["vectors"] == [64, 64, 64, 64, 44]
    assert kept(layer).nbytes == 0
    fill(alice, 20, seed=9, prefix="to a full page")
    assert len(alice.search(embedding=truth["mem 0001"], k=1000)) == 320


def test_streaming_takes_no_more_memory_for_more_vectors(open_exact: OpenVault) -> None:
    layer = open_exact(embedder="none", exact_limit=10)
    dimension = 256

    def peak_of(user: UserMemory) -> int:
        query = np.ones(dimension)
        user.search(embedding=query)
        tracemalloc.start()
        user.search(embedding=query)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    peaks = []
    for name, count in (("few", 5_000), ("many", 20_000)):
        user = layer.for_user(name)
        matrix = np.random.default_rng(1).standard_normal((count, dimension)).astype(np.float32)
        user.chunks.add_many(NewChunk("text", embedding=vector) for vector in matrix)
        peaks.append(peak_of(user))
    assert peaks[1] - peaks[0] < 15_000 * 4 * dimension / 3  # a third of what the vectors alone would take


# Threads.


def test_threads_search_while_others_write(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    fill(alice, 50)
    stop = threading.Event()
    failures: list[BaseException] = []
    acknowledged: dict[str, Any] = {}
    removed: set[str] = set()

    def write() -> None:
        rng = np.random.default_rng(5)
        for number in range(60):
            vector = rng.standard_normal(DIMENSION)
            id = f"live {number}"
            alice.chunks.add("text", id=id, embedding=vector)
            acknowledged[id] = vector
            if number % 3 == 2:
                gone = f"live {number - 1}"
                acknowledged.pop(gone)
                alice.chunks.delete(gone)
                removed.add(gone)
            if number % 5 == 4:
                moved = next(iter(acknowledged))
                fresh = rng.standard_normal(DIMENSION)
                acknowledged.pop(moved)
                alice.chunks.update(moved, embedding=fresh)
                acknowledged[moved] = fresh

    def search() -> None:
        while not stop.is_set():
            gone = set(removed)
            sure = list(acknowledged.items())
            for id, vector in sure[-3:]:
                hits = alice.search(embedding=vector, k=1000)
                found = [hit.chunk.id for hit in hits]
                assert len(found) == len(set(found))
                assert not gone & set(found)
                if id in acknowledged and acknowledged[id] is vector:
                    assert found[0] == id
                    assert abs((hits[0].similarity or 0) - 1) < 1e-5

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    searchers = [threading.Thread(target=guarded, args=(search,)) for _ in range(8)]
    for thread in searchers:
        thread.start()
    guarded(write)
    stop.set()
    for thread in searchers:
        thread.join()
    assert not failures, failures[0]


# What a hit is made of.


def test_a_value_made_of_a_row_is_as_good_as_any(vault: StorageLayer) -> None:
    alice = vault.for_user("alice")
    chunk = alice.chunks.add("text", id="a", embedding=unit_vectors(1, DIMENSION, 1)[0], metadata={"b": [1]})
    found = alice.search(embedding=unit_vectors(1, DIMENSION, 1)[0])[0].chunk
    validated = Chunk.model_validate(found.model_dump())
    assert chunk == found == validated
    assert found.model_fields_set == validated.model_fields_set
    assert found.model_copy(update={"content": "other"}).content == "other"
    assert found.content == "text"
    assert Chunk.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(ValueError, match="frozen"):
        found.content = "no"
