"""Does pgvector find a small tenant's, keep to its transaction, and say what an administrator has to do?"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, event, text

from memvault import StorageError, StorageLayer, create_engine
from memvault.database import migrate
from memvault.database.transactions import Database
from memvault.database.unit import Unit
from memvault.errors import IndexMismatchError, VectorIndexError
from memvault.filters import F
from memvault.memory.chunk_table import CHUNKS
from memvault.vectors.base import IndexSpec
from memvault.vectors.canonical import VECTORS
from memvault.vectors.pgvector import PgVectorIndex
from memvault.vectors.within import table_name
from tests.postgres import Postgres
from tests.support import HashingEmbedder, statements, unit_vectors
from tests.vectors.worlds import DIMENSION, SPEC, SqlWorld, direction, make_record, make_records

TABLE = table_name(SPEC)

TENANTS_OF_MANY = int(os.environ.get("MEMVAULT_TEST_VECTORS", 20_000))
"""Vectors in the recall test, of which a tenant has 1 %. With 100,000, as in benchmarks/pgvector_recall.py, it takes
minutes, most of them for the graph."""

SETTINGS = ("hnsw.iterative_scan", "hnsw.ef_search", "hnsw.max_scan_tuples")


@pytest.fixture
def world(postgres_url: str) -> Iterator[SqlWorld]:
    world = SqlWorld(create_engine(postgres_url), PgVectorIndex)
    yield world
    assert world.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
    world.close()


def index_of(world: SqlWorld, **options: Any) -> PgVectorIndex:
    """Another index on the world's place, opened."""
    index = PgVectorIndex(world.database, CHUNKS, **options)
    assert index.open(SPEC)
    return index


def tables(world: SqlWorld) -> list[str]:
    with world.database.reading() as connection:
        found = connection.execute(text("SELECT relname FROM pg_class WHERE relname LIKE 'memvault_vec%' ORDER BY 1"))
        return list(found.scalars())


# What is found


@contextmanager
def graph_preferred(engine: Engine) -> Iterator[None]:
    """The planner would rather not sort: it takes the graph wherever that can answer."""

    def prefer(connection: Connection) -> None:
        connection.exec_driver_sql("SET LOCAL enable_sort = off")

    event.listen(engine, "begin", prefer)
    yield
    event.remove(engine, "begin", prefer)


def test_a_tenant_of_one_percent_is_found_by_either_way(postgres_url: str) -> None:
    spec = IndexSpec(SPEC.vault_id, SPEC.model, 32)
    world = SqlWorld(create_engine(postgres_url), PgVectorIndex, spec=spec)
    vectors = unit_vectors(TENANTS_OF_MANY, spec.dimension, 1)
    world.fill([make_record(f"mem_{place}", vector, f"user_{place % 100}") for place, vector in enumerate(vectors)])
    asked = unit_vectors(40, spec.dimension, 2)
    for place, vector in enumerate(asked):
        world.check(f"user_{place}", vector, 10)

    graph = PgVectorIndex(world.database, CHUNKS, exact_limit=0)
    assert graph.open(spec)
    found = 0
    with graph_preferred(world.engine), statements(world.engine) as sent:
        for place, vector in enumerate(asked):
            matches = graph.query(f"user_{place}", vector, 10)
            cosines = vectors[place::100] @ vector
            assert len({match.id for match in matches}) == 10
            assert all(later.similarity <= earlier.similarity for earlier, later in pairwise(matches))
            for match in matches:
                assert int(match.id.removeprefix("mem_")) % 100 == place
            nearest = np.argsort(-cosines)[:10] * 100 + place
            found += len({f"mem_{number}" for number in nearest} & {match.id for match in matches})
    assert found / (10 * len(asked)) >= 0.95
    asks = [statement for statement in sent if "<=>" in statement]
    assert len(asks) == len(asked)  # the graph's answers alone: none was completed by a comparison with all
    assert used(world.engine, f"{table_name(spec)}_hnsw") >= len(asked)
    world.close()


def used(engine: Engine, index: str) -> int:
    """How often PostgreSQL has scanned an index; sessions report that when they end."""
    engine.dispose()
    with engine.connect() as connection:
        statement = text("SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = :index")
        scans: int = connection.execute(statement, {"index": index}).scalar_one()
        return scans


def test_small_tenants_are_compared_not_guessed(world: SqlWorld) -> None:
    world.fill([*make_records(2000, "user_bob", prefix="bob"), *make_records(50)])
    with graph_preferred(world.engine):
        for seed in range(10):
            world.check("user_alice", direction(seed), 10)
    assert used(world.engine, f"{TABLE}_hnsw") == 0


def test_what_the_graph_does_not_find_is_found_by_comparing_all(world: SqlWorld) -> None:
    records = make_records(3000)
    for place in range(0, 3000, 600):
        records[place] = replace(records[place], metadata=replace(records[place].metadata, compressed=True))
    world.fill(records)
    world.index = index_of(world, exact_limit=2999)
    with graph_preferred(world.engine):
        for seed in range(5):
            world.check("user_alice", direction(seed), 10, F.compressed == True)  # noqa: E712
            world.check("user_alice", direction(seed), 10, recall=0.9)
            world.check("user_alice", direction(seed), 5000)
    assert used(world.engine, f"{TABLE}_hnsw") > 0


def test_more_dimensions_than_the_graph_takes_are_compared(world: SqlWorld) -> None:
    spec = replace(SPEC, model="tests/random-2001", dimension=2001)
    index = PgVectorIndex(world.database, CHUNKS, exact_limit=0)
    assert not index.open(spec)
    index.create()
    vectors = unit_vectors(30, spec.dimension, 1)
    index.upsert([make_record(f"mem_{place}", vector) for place, vector in enumerate(vectors)])
    assert index.query("user_alice", vectors[7], 1)[0].id == "mem_7"
    assert f"{table_name(spec)}_user" in tables(world)
    assert f"{table_name(spec)}_hnsw" not in tables(world)


# Transactions


def test_a_search_leaves_the_callers_transaction_as_it_was(world: SqlWorld) -> None:
    index = index_of(world, exact_limit=0)
    world.put(make_records(100))

    def settings(connection: Connection) -> list[str | None]:
        asked = ", ".join(f"current_setting('{name}', true)" for name in SETTINGS)
        return list(connection.execute(text(f"SELECT {asked}")).one())

    longer = unit_vectors(1, DIMENSION + 1, 1)[0]
    for begin in (world.database.reading, world.database.writing):
        with begin() as connection:
            index.query("user_alice", direction(), 1, connection=connection)  # which loads the extension
            before = settings(connection)
            index.query("user_alice", direction(), 10, connection=connection)
            assert settings(connection) == before
            connection.execute(text("SET LOCAL hnsw.ef_search = 77"))
            index.query("user_alice", direction(), 10, connection=connection)
            with pytest.raises(VectorIndexError, match="could not be searched: .*dimensions"):
                index.query("user_alice", longer, 10, connection=connection)
            assert settings(connection) == [before[0], "77", before[2]]
            assert len(index.query("user_alice", direction(), 10, connection=connection)) == 10


def test_an_error_is_the_indexs_in_its_own_transaction_and_the_writes_in_the_callers(world: SqlWorld) -> None:
    index = index_of(world)
    world.put(make_records(5))
    bad = [make_record("mem_1", direction()), make_record("mem_2", unit_vectors(1, DIMENSION + 1, 1)[0])]
    with pytest.raises(VectorIndexError, match="could not be written: .*expected 16 dimensions") as caught:
        index.upsert(bad)
    assert isinstance(caught.value.__cause__, StorageError)
    with pytest.raises(StorageError, match="expected 16 dimensions"), world.database.writing() as connection:
        index.follow(connection, "user_alice", {record.id: record.vector for record in bad})
    world.check("user_alice", direction(), 5)


# Made and removed


def test_it_is_made_with_all_that_sql_holds(world: SqlWorld) -> None:
    world.put([*make_records(40), *make_records(30, "user_bob", prefix="bob", seed=2)])
    index = index_of(world)
    world.index.purge()
    assert tables(world) == []
    with world.database.reading() as connection:
        assert not index.exists(connection)
    assert not world.fresh().open(SPEC)
    world.index.create()
    with world.database.reading() as connection:
        assert index.exists(connection)
    world.check("user_alice", direction(), 100)
    world.check("user_bob", direction(), 100)


def test_it_is_made_whole_or_not_at_all(world: SqlWorld) -> None:
    world.put(make_records(40))
    world.index.purge()

    def set_vector(vector: bytes) -> None:
        with world.database.writing() as connection:
            connection.execute(VECTORS.update().where(VECTORS.c.chunk_id == "mem_39").values(vector=vector))

    set_vector(b"\0" * 12)
    with pytest.raises(VectorIndexError, match="could not be created"):
        world.index.create()
    assert tables(world) == []
    set_vector(world.records["mem_39"].vector.tobytes())
    world.index.create()
    world.check("user_alice", direction(), 100)


def test_no_write_slips_by_while_it_is_made(world: SqlWorld) -> None:
    """Neither one that was under way before, which is waited for, nor one that comes later, which waits."""
    world.put(make_records(40))
    index = index_of(world)
    world.index.purge()
    late = make_records(2, prefix="late", seed=7)

    def add(connection: Connection, place: int) -> None:
        unit = Unit(connection, "user_alice")
        unit.lock_owner()
        exists = index.exists(connection)
        world.write(unit, [late[place]])
        if exists:
            index.follow(connection, "user_alice", {late[place].id: late[place].vector})
        else:
            assert place == 0

    def add_later() -> None:
        with world.database.writing() as connection:
            add(connection, 1)

    with ThreadPoolExecutor(2) as pool:
        with world.database.writing() as connection:
            add(connection, 0)
            made = pool.submit(index.create)
            waiting(world, 1)
            later = pool.submit(add_later)
            waiting(world, 2)
        made.result(60)
        later.result(60)
    world.records.update((record.id, record) for record in late)
    world.check("user_alice", direction(), 100)
    assert index.count() == 42


def waiting(world: SqlWorld, sessions: int) -> None:
    """Return when so many sessions wait for a lock."""
    deadline = monotonic() + 60
    statement = text("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted")
    while monotonic() < deadline:
        with world.database.reading() as connection:
            if connection.execute(statement).scalar_one() == sessions:
                return
        sleep(0.01)
    raise AssertionError(f"{sessions} sessions never waited at once")


def at_once(calls: list[Callable[[], object]]) -> None:
    started = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        started.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(run, call) for call in calls]:
            done.result(60)


def test_several_make_it_at_once(world: SqlWorld) -> None:
    world.put(make_records(200))
    indexes = [index_of(world) for _ in range(4)]
    world.index.purge()
    at_once([index.create for index in indexes])
    assert world.index.count() == 200
    world.check("user_alice", direction(), 100)


def test_two_models_stand_side_by_side(world: SqlWorld) -> None:
    world.put(make_records(20))
    other = PgVectorIndex(world.database, CHUNKS)
    assert not other.open(replace(SPEC, model="tests/other-8", dimension=8))
    other.create()
    other.upsert([make_record("mem_1", unit_vectors(1, 8, 1)[0])])
    assert (world.index.count(), other.count()) == (20, 1)
    other.purge()
    world.check("user_alice", direction(), 100)


def test_what_another_vault_left_is_not_taken_for_this_ones(world: SqlWorld) -> None:
    world.put(make_records(20))
    assert not world.fresh().open(replace(SPEC, vault_id="another"))


def test_another_metric_is_refused(world: SqlWorld) -> None:
    with world.engine.begin() as connection:
        connection.execute(text(f"DROP INDEX {TABLE}_hnsw"))
        connection.execute(text(f"CREATE INDEX ON {TABLE} USING hnsw (embedding vector_l2_ops)"))
    with pytest.raises(
        IndexMismatchError, match="metric vector_l2_ops, expected vector_cosine_ops: `memvault reindex`"
    ):
        world.fresh().open(SPEC)


def test_migrations_pass_it_by(world: SqlWorld, postgres_url: str) -> None:
    world.put(make_records(20))
    before = tables(world)
    migrate.require_declared(postgres_url)
    migrate.downgrade(postgres_url, "base")
    migrate.upgrade(postgres_url)
    migrate.require_declared(postgres_url)
    assert tables(world) == before


# Extensions, schemas and rights


@pytest.fixture
def fresh(postgres18: Postgres) -> Iterator[str]:
    """The URL of a database that pgvector is available to, and not yet in."""
    yield postgres18.create_database("fresh_vectors")
    postgres18.drop_database("fresh_vectors")


def made_in(url: str, schema_name: str | None = None) -> PgVectorIndex:
    """An index in a vault of that schema: opened, not created."""
    engine = create_engine(url, schema_name=schema_name)
    migrate.upgrade(engine)
    index = PgVectorIndex(Database(engine), CHUNKS)
    assert not index.open(SPEC)
    return index


@pytest.mark.parametrize("schema", ["Mem Vault", 'quo"ted', "100% %s", "a.b :c"])
def test_it_lies_beside_the_other_tables_wherever_the_extension_is(
    postgres18: Postgres, fresh: str, schema: str
) -> None:
    postgres18.execute('CREATE SCHEMA "100% %s :ext"', "fresh_vectors")
    postgres18.execute('CREATE EXTENSION vector SCHEMA "100% %s :ext"', "fresh_vectors")
    engine = create_engine(fresh, schema_name=schema)
    migrate.upgrade(engine)
    world = SqlWorld(engine, PgVectorIndex)
    placed = postgres18.execute(
        f"SELECT nspname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace WHERE relname = '{TABLE}'",
        "fresh_vectors",
    )
    assert placed == [(schema,)]
    world.put([*make_records(60), *make_records(30, "user_bob", prefix="bob", seed=2)])
    world.remove(["mem_1", "bob_1"])
    world.index = index_of(world, exact_limit=20)
    for user_id in ("user_alice", "user_bob"):
        world.check(user_id, direction(), 5, recall=0.9)
        world.check(user_id, direction(), 100, F.importance > 0.1)
    assert (world.index.count(), world.index.count("user_bob")) == (88, 29)
    assert sum(map(len, world.index.scan(7))) == 88
    world.reopen()
    world.purge()
    assert not world.fresh().open(SPEC)
    world.close()


def test_vaults_in_two_schemas_bring_the_extension_at_once(fresh: str) -> None:
    indexes = [made_in(fresh, schema) for schema in ("one", "two", "three", "four")]
    at_once([index.create for index in indexes])
    for place, index in enumerate(indexes):
        index.upsert(make_records(place))
    assert [index.count() for index in indexes] == [0, 1, 2, 3]
    for index in indexes:
        index._database.engine.dispose()


def test_a_role_that_may_not_bring_the_extension_is_told_who_may(postgres18: Postgres, fresh: str) -> None:
    """And what that one has to run, which is run here, and is enough."""
    postgres18.execute("CREATE ROLE mortal LOGIN")
    postgres18.execute("GRANT CREATE ON SCHEMA public TO mortal", "fresh_vectors")
    try:
        index = made_in(postgres18.url("fresh_vectors", "mortal"))
        with pytest.raises(VectorIndexError, match="'mortal' .*administrator .*'fresh_vectors': CREATE") as caught:
            index.create()
        assert not index.open(SPEC)
        advised = re.search(r"CREATE EXTENSION .*$", str(caught.value))
        assert advised is not None
        postgres18.execute(advised[0], "fresh_vectors")
        index.create()
        index.upsert(make_records(3))
        assert index.count() == 3
        index._database.engine.dispose()
    finally:
        postgres18.execute("DROP OWNED BY mortal CASCADE", "fresh_vectors")
        postgres18.execute("DROP ROLE mortal")


@pytest.fixture
def without_pgvector(postgres15: Postgres) -> Iterator[str]:
    """The URL of a database on a server that has no pgvector."""
    assert postgres15.execute("SELECT count(*) FROM pg_available_extensions WHERE name = 'vector'") == [(0,)]
    yield postgres15.create_database("no_vectors")
    postgres15.drop_database("no_vectors")


def test_a_server_without_pgvector_is_told_what_to_install(without_pgvector: str) -> None:
    index = made_in(without_pgvector)
    for _ in range(2):
        with pytest.raises(VectorIndexError, match="postgresql-15-pgvector .*'no_vectors': CREATE EXTENSION vector"):
            index.create()
    assert not index.open(SPEC)
    index._database.engine.dispose()


def test_a_vault_on_such_a_server_searches_exactly(without_pgvector: str) -> None:
    with StorageLayer.open(
        without_pgvector, vectors="pgvector", embedder=HashingEmbedder(), schema="upgrade", exact_limit=0
    ) as storage:
        alice = storage.for_user("user_alice")
        added = [alice.chunks.add(content) for content in ("a cat", "a dog")]
        assert [hit.chunk.id for hit in alice.search("dog", mode="vector", k=1)] == [added[1].id]
        assert "postgresql-15-pgvector" in storage.health()["last_error"]
