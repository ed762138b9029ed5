"""Does an index inside the database hold what SQL holds, whoever writes, in whichever transaction, however it ends?"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from memvault import (
    ConflictError,
    F,
    IndexMismatchError,
    NewChunk,
    NotFoundError,
    StorageLayer,
    UserMemory,
    ValidationError,
    create_engine,
)
from memvault.config import build_index
from memvault.database.transactions import Database
from memvault.filters import Filter
from memvault.vectors.base import IndexSpec, TransactionalIndex
from memvault.vectors.canonical import VECTORS
from memvault.vectors.outbox import live_index
from memvault.vectors.within import table_name
from tests.conftest import OpenVault
from tests.database.migrating import CHECKOUT
from tests.support import assert_nearest, unit_vectors

BACKENDS = (("sqlite", "sqlite-vec"), ("postgres", "pgvector"))

DIMENSION = 16
OTHER_DIMENSION = 24


def index_beside(storage: StorageLayer) -> TransactionalIndex | None:
    """The vault's index, opened by nobody but the test; None where there is none."""
    database = Database(storage.engine)
    with database.reading() as connection:
        row = live_index(connection)
    assert row is not None
    index = build_index(row.spec, database)
    assert isinstance(index, TransactionalIndex)
    there = row.dimension is not None and index.open(IndexSpec(storage.vault_id, row.model, row.dimension))
    return index if there else None


def assert_in_step(storage: StorageLayer) -> int:
    """The index holds SQL's vectors, to the bit, and nothing else; how many those are."""
    index = index_beside(storage)
    assert index is not None
    scanned = [record for batch in index.scan(17) for record in batch]
    held = sorted((record.id, record.user_id, record.vector.tobytes()) for record in scanned)
    with storage.engine.begin() as connection:
        rows = connection.execute(select(VECTORS.c.chunk_id, VECTORS.c.user_id, VECTORS.c.vector)).all()
    assert held == sorted((row.chunk_id, row.user_id, bytes(row.vector)) for row in rows)
    return len(held)


def new_chunks(count: int, prefix: str, *, dimension: int = DIMENSION, seed: int = 1) -> list[NewChunk]:
    return [
        NewChunk(f"memory {place}", id=f"{prefix}_{place}", embedding=vector)
        for place, vector in enumerate(unit_vectors(count, dimension, seed))
    ]


def tiers(user: UserMemory, dimension: int = DIMENSION) -> set[str]:
    """Which way searches go."""
    hits = user.search(embedding=unit_vectors(1, dimension, 9)[0], k=5)
    assert hits
    return {hit.why["tier"] for hit in hits}


# Whatever is done


class Changed(Exception):
    """Ends a transaction that shall not be committed."""


class Doings:
    """Random things that users do, some of which are refused."""

    def __init__(self, storage: StorageLayer, seed: int) -> None:
        self.storage = storage
        self.random = random.Random(seed)
        self.refused = 0

    def one(self) -> None:
        name = self.random.choice(["user_alice", "user_alice", "user_bob", "%"])
        user = self.storage.for_user(name)
        chance = self.random.random()
        if chance < 0.02:
            self.storage.erase_user(name)
        elif chance < 0.3:
            self.together(user)
        elif chance < 0.45:
            self.in_a_session(name)
        else:
            self.write(user)

    def together(self, user: UserMemory) -> None:
        with suppress(Changed), user.transaction() as handle:
            for _ in range(self.random.randint(1, 4)):
                self.write(handle)
            if self.random.random() < 0.5:
                raise Changed

    def in_a_session(self, name: str) -> None:
        with Session(self.storage.engine) as session:
            user = self.storage.for_user(name, sql_session=session)
            self.write(user)
            with suppress(Changed), session.begin_nested():
                self.write(user)
                if self.random.random() < 0.5:
                    raise Changed
            self.write(user)
            if self.random.random() < 0.7:
                session.commit()

    def write(self, user: UserMemory) -> None:
        """One call. Ids are few, so that many are taken, also by others."""
        chunks = user.chunks
        calls: list[Callable[[], Any]] = [
            lambda: chunks.add(self.content(), id=self.id(), embedding=self.vector()),
            lambda: chunks.add(self.content(), id=self.id()),
            lambda: chunks.add_many([self.new() for _ in range(self.random.randint(1, 12))], on_conflict="skip"),
            lambda: chunks.add_many([self.new() for _ in range(12)], on_conflict="skip"),
            lambda: chunks.add_many([self.new() for _ in range(3)]),
            lambda: chunks.update(self.id(), content=self.content()),
            lambda: chunks.update(self.id(), content=self.content(), expected_version=1),
            lambda: chunks.update(self.id(), embedding=self.vector()),
            lambda: chunks.update(self.id(), importance=self.random.random()),
            lambda: chunks.delete(self.id()),
            lambda: chunks.delete_many([self.id() for _ in range(4)]),
            lambda: chunks.delete_many(self.where()),
        ]
        try:
            self.random.choice(calls)()
        except (ConflictError, NotFoundError, ValidationError):
            self.refused += 1

    def new(self) -> NewChunk:
        memory_type = self.random.choice(["episodic", "semantic", "procedural"])
        embedding = self.vector() if memory_type != "procedural" and self.random.random() < 0.5 else None
        return NewChunk(self.content(), id=self.id(), memory_type=memory_type, embedding=embedding)

    def where(self) -> Filter:
        return (F.importance > 0.9) | (F.content == self.content())

    def id(self) -> str:
        return f"id {self.random.randrange(90)}"

    def content(self) -> str:
        return f"text {self.random.randrange(40)}"

    def vector(self) -> list[float]:
        return [self.random.gauss(0, 1) for _ in range(64)]


@pytest.mark.parametrize("seed", [1, 2])
def test_it_equals_sql_after_anything(storage: StorageLayer, seed: int) -> None:
    doings = Doings(storage, seed)
    sizes = []
    for _ in range(25):
        for _ in range(6):
            doings.one()
        sizes.append(assert_in_step(storage))
    assert max(sizes) > 20
    assert doings.refused > 20


# Whoever made it


def test_who_opened_before_it_was_made_writes_into_it(open_vault: OpenVault) -> None:
    """A process that runs on needs no word of it, neither for what it writes nor for what it takes away."""
    before = open_vault(embedder="none", schema="check", exact_limit=0)
    early = before.for_user("user_alice")
    early.chunks.add_many(new_chunks(15, "first"))
    early.chunks.add_many(new_chunks(20, "first")[15:])
    assert index_beside(before) is None  # the dimension is known now, and nobody here may make it
    maker = open_vault(embedder="none", schema="upgrade")
    assert assert_in_step(maker) == 20
    early.chunks.add_many(new_chunks(20, "second", seed=2))
    early.chunks.update("first_1", embedding=unit_vectors(1, DIMENSION, 3)[0])
    early.chunks.update("first_2", content="nobody can embed it")
    early.chunks.delete("first_3")
    assert assert_in_step(maker) == 38
    maker.for_user("user_bob").chunks.add_many(new_chunks(5, "bob"))
    maker.erase_user("user_bob")
    before.erase_user("user_alice")
    assert assert_in_step(maker) == 0
    early.chunks.add_many(new_chunks(3, "third"))
    assert tiers(early) == {"index"}


def test_who_opened_before_it_was_made_finds_all(open_vault: OpenVault) -> None:
    before = open_vault(embedder="none", schema="check", exact_limit=0)
    maker = open_vault(embedder="none", schema="upgrade", exact_limit=0)
    news = new_chunks(30, "mem")
    maker.for_user("user_alice").chunks.add_many(news[:15])
    before.for_user("user_alice").chunks.add_many(news[15:])
    assert assert_in_step(maker) == 30
    vectors = {str(new.id): np.asarray(new.embedding) for new in news}
    query = unit_vectors(1, DIMENSION, 9)[0]
    for layer in (before, maker):
        assert_nearest(layer.for_user("user_alice").search(embedding=query, k=12), vectors, query, 12)
    for layer in (before, maker):
        assert tiers(layer.for_user("user_alice")) == {"index"}
        assert layer.health()["last_error"] is None


@pytest.mark.parametrize("schema", ["check", "upgrade"])
def test_the_first_vector_may_be_anothers(open_vault: OpenVault, schema: str) -> None:
    """Nobody knew the dimension when the vault was opened by all."""
    layers = [open_vault(embedder="none", schema=schema, exact_limit=0) for _ in range(3)]
    for place, layer in enumerate(layers):
        layer.for_user(f"user_{place}").chunks.add_many(new_chunks(4, f"u{place}"))
    if schema == "check":
        assert layers[1].create_index()
    assert not layers[0].create_index()
    for place, layer in enumerate(layers):
        user = layer.for_user(f"user_{place}")
        user.chunks.add("another", embedding=unit_vectors(1, DIMENSION, 30 + place)[0])
        user.chunks.delete(f"u{place}_0")
        with pytest.raises(ValidationError, match="dimension 16, got 3"):
            user.chunks.add("of three", embedding=[1, 2, 3])
    assert assert_in_step(layers[2]) == 12


def test_a_first_vector_that_is_taken_back_fixes_nothing(open_vault: OpenVault) -> None:
    layer = open_vault(embedder="none", exact_limit=0)
    alice = layer.for_user("user_alice")
    with suppress(Changed), alice.transaction() as handle:
        handle.chunks.add_many(new_chunks(3, "mem"))
        handle.chunks.add_many(new_chunks(3, "more", seed=2))
        raise Changed
    with Session(layer.engine) as session:
        joined = layer.for_user("user_alice", sql_session=session)
        joined.chunks.add_many(new_chunks(3, "mem"))
        joined.chunks.add_many(new_chunks(3, "more", seed=2))
        session.rollback()
    assert layer.stats()["dimension"] is None
    alice.chunks.add_many(new_chunks(3, "mem", dimension=OTHER_DIMENSION))
    alice.chunks.add_many(new_chunks(3, "more", dimension=OTHER_DIMENSION, seed=2))
    assert assert_in_step(layer) == 6
    assert tiers(alice, OTHER_DIMENSION) == {"index"}


def test_a_first_vector_may_come_through_a_session(open_vault: OpenVault) -> None:
    layer = open_vault(embedder="none", exact_limit=0)
    with Session(layer.engine) as session:
        joined = layer.for_user("user_alice", sql_session=session)
        joined.chunks.add_many(new_chunks(3, "mem"))
        joined.chunks.add_many(new_chunks(3, "more", seed=2))
        session.commit()
    layer.sync()
    layer.for_user("user_alice").chunks.add_many(new_chunks(3, "own", seed=3))
    assert assert_in_step(layer) == 9
    assert tiers(layer.for_user("user_alice")) == {"index"}


# However it ends


def changes(user: UserMemory) -> None:
    user.chunks.add("new", id="new", embedding=unit_vectors(1, DIMENSION, 5)[0])
    user.chunks.update("mem_1", embedding=unit_vectors(1, DIMENSION, 6)[0])
    user.chunks.update("mem_2", content="nobody can embed it")
    user.chunks.delete("mem_3")
    found = {hit.chunk.id for hit in user.search(embedding=unit_vectors(1, DIMENSION, 5)[0], k=100)}
    assert found == {"new"} | {f"mem_{place}" for place in range(10)} - {"mem_2", "mem_3"}


@pytest.fixture
def layer(open_vault: OpenVault) -> StorageLayer:
    """A vault of ten vectors of one user's, searched by the index."""
    layer = open_vault(embedder="none", exact_limit=0)
    layer.for_user("user_alice").chunks.add_many(new_chunks(10, "mem"))
    assert assert_in_step(layer) == 10
    return layer


def test_what_is_taken_back_is_taken_back_in_both(layer: StorageLayer) -> None:
    alice = layer.for_user("user_alice")
    with pytest.raises(Changed), alice.transaction() as handle:
        changes(handle)
        raise Changed
    with pytest.raises(ConflictError):
        alice.chunks.add_many([*new_chunks(3, "late", seed=7), *new_chunks(1, "mem")])
    assert assert_in_step(layer) == 10
    assert alice.chunks.get("new") is None
    assert tiers(alice) == {"index"}


def test_a_call_that_fails_in_a_transaction_leaves_nothing_in_either(layer: StorageLayer) -> None:
    alice = layer.for_user("user_alice")
    with alice.transaction() as handle:
        changes(handle)
        with pytest.raises(ConflictError):
            handle.chunks.add_many([*new_chunks(3, "late", seed=7), *new_chunks(1, "mem")])
        handle.chunks.delete("mem_4")
    assert assert_in_step(layer) == 8
    assert alice.chunks.get("late_0") is None


@pytest.mark.parametrize("own_engine", [False, True], ids=["its engine", "another engine"])
def test_a_session_decides_for_both(layer: StorageLayer, database_url: str, own_engine: bool) -> None:
    engine = create_engine(database_url) if own_engine else layer.engine
    with Session(engine) as session:
        alice = layer.for_user("user_alice", sql_session=session)
        changes(alice)
        session.rollback()
        assert assert_in_step(layer) == 10
        with pytest.raises(Changed), session.begin_nested():
            changes(alice)
            raise Changed
        with session.begin_nested():
            alice.chunks.delete("mem_5")
        with pytest.raises(ConflictError):
            alice.chunks.add_many([*new_chunks(3, "late", seed=7), *new_chunks(1, "mem")])
        alice.chunks.add("kept", id="kept", embedding=unit_vectors(1, DIMENSION, 8)[0])
        assert tiers(alice) == {"index"}
        session.commit()
    assert assert_in_step(layer) == 10
    assert layer.for_user("user_alice").chunks.get("kept") is not None
    if own_engine:
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        engine.dispose()


# How it is made


def test_it_is_filled_with_all_that_was_there(open_vault: OpenVault) -> None:
    waiting = open_vault(embedder="none", schema="check", exact_limit=0)
    news = new_chunks(5000, "mem")
    waiting.for_user("user_alice").chunks.add_many(news)
    assert waiting.stats()["index_records"] is None
    assert "`memvault index create`" in waiting.health()["last_error"]
    assert waiting.create_index()
    assert not waiting.create_index()
    assert waiting.health()["last_error"] is None
    assert assert_in_step(waiting) == 5000
    query = unit_vectors(1, DIMENSION, 9)[0]
    hits = waiting.for_user("user_alice").search(embedding=query, k=10)
    assert_nearest(hits, {str(new.id): np.asarray(new.embedding) for new in news}, query, 10)
    assert {hit.why["tier"] for hit in hits} == {"index"}


def test_nothing_is_missed_while_it_is_made(open_vault: OpenVault) -> None:
    writers = [open_vault(embedder="none", schema="check") for _ in range(4)]
    writers[0].for_user("user_alice").chunks.add_many(new_chunks(300, "mem"))
    maker = open_vault(embedder="none", schema="check")
    wrote = threading.Barrier(len(writers) + 1)
    made = threading.Event()

    def write(place: int) -> int:
        user = writers[place].for_user(f"user_{place % 2}")  # two write for the same user
        vectors = unit_vectors(500, DIMENSION, 40 + place)
        count, left = 0, 5
        while left:
            left -= made.is_set()
            user.chunks.add("text", id=f"w{place}_{count}", embedding=vectors[count % 500])
            if count % 3 == 2:
                user.chunks.update(f"w{place}_{count - 1}", embedding=vectors[-count % 500])
                user.chunks.delete(f"w{place}_{count - 2}")
            count += 1
            if count == 5:
                wrote.wait(60)
        return count

    with ThreadPoolExecutor(len(writers)) as pool:
        running = [pool.submit(write, place) for place in range(len(writers))]
        try:
            wrote.wait(60)
            assert maker.create_index()
        finally:
            made.set()
        counts = [one.result(60) for one in running]
    assert min(counts) >= 10
    assert assert_in_step(maker) == 300 + sum(count - count // 3 for count in counts)


MAKE = """
import sys
from memvault import StorageLayer
with StorageLayer.open(sys.argv[1], schema="check") as storage:
    print("ready", flush=True)
    sys.stdin.readline()
    storage.create_index()
    print(storage.stats()["index_records"])
"""


def test_two_processes_make_it_at_once(open_vault: OpenVault, database_url: str) -> None:
    layer = open_vault(embedder="none", schema="check")
    layer.for_user("user_alice").chunks.add_many(new_chunks(400, "mem"))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE, database_url], cwd=CHECKOUT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[0] for process in running] == ["400\n"] * 2
    assert assert_in_step(layer) == 400


@pytest.mark.parametrize("columns", ["note text", "chunk_id text, user_id text, embedding text"])
def test_a_table_of_somebody_elses_is_not_written_to(open_vault: OpenVault, columns: str) -> None:
    layer = open_vault(embedder="none", schema="check")
    layer.for_user("user_alice").chunks.add_many(new_chunks(3, "mem"))
    name = table_name(IndexSpec(layer.vault_id, "none", DIMENSION))
    with layer.engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {name} ({columns})"))
    with pytest.raises(IndexMismatchError, match=name):
        open_vault(embedder="none", schema="upgrade")
    with pytest.raises(IndexMismatchError, match=name):
        layer.create_index()
    with layer.engine.begin() as connection:
        assert connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() == 0
        connection.execute(text(f"DROP TABLE {name}"))
    assert layer.create_index()
    assert assert_in_step(layer) == 3
