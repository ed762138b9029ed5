"""Is sqlite-vec small, part of the write, and out of everybody else's way, whichever driver loads it?"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from memvault import MissingDependencyError, StorageError, StorageLayer, create_engine
from memvault.cli.app import app
from memvault.database import migrate
from memvault.database.transactions import Database
from memvault.errors import IndexMismatchError, VectorIndexError
from memvault.filters import F
from memvault.memory.chunk_table import CHUNKS
from memvault.vectors.canonical import VECTORS
from memvault.vectors.sqlite_vec import CHUNK_SIZE, MAX_K, SqliteVecIndex
from memvault.vectors.within import table_name
from tests.database.migrating import CHECKOUT, alembic_on, copy_migrations
from tests.support import HashingEmbedder, unavailable, unit_vectors
from tests.vectors.conftest import STDLIB_LOADS, WORLDS
from tests.vectors.worlds import DIMENSION, SPEC, SqlWorld, direction, make_record, make_records

TABLE = table_name(SPEC)


@pytest.fixture
def world(vault_path: Path) -> Iterator[SqlWorld]:
    world = SqlWorld(create_engine(f"sqlite:///{vault_path}"), SqliteVecIndex)
    yield world
    assert world.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
    world.close()


def index_of(world: SqlWorld) -> SqliteVecIndex:
    assert isinstance(world.index, SqliteVecIndex)
    return world.index


def without_extensions() -> ModuleType:
    """A SQLite library that cannot load any: this Python's own, or what it would be had it been built like that."""
    if not STDLIB_LOADS:
        return sqlite3
    bare = ModuleType("sqlite3")
    vars(bare).update({**vars(sqlite3), "Connection": object})
    return bare


# Drivers


def test_the_contract_holds_on_the_standard_librarys_driver(tmp_path: Path) -> None:
    """Where this Python's own SQLite takes no extensions, in another one of the same ABI."""
    if STDLIB_LOADS:
        assert "sqlite-vec-stdlib" in WORLDS
        return
    said = subprocess.run(
        [
            python_that_loads(), "-m", "pytest", "tests/vectors/test_contract.py", "-k", "sqlite-vec-stdlib", "-q",
            "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={tmp_path / 'there'}",
        ],
        cwd=CHECKOUT, env=environment(), capture_output=True, text=True, timeout=110,
    ).stdout.splitlines()  # fmt: skip
    counted = re.fullmatch(r"(\d+) passed, \d+ deselected in .*", said[-1].strip("= "))
    assert counted is not None, said[-40:]
    assert int(counted[1]) >= 20


def python_that_loads() -> str:
    probe = (
        "import sqlite3, sys, sysconfig; "
        "sys.exit(not (hasattr(sqlite3.Connection, 'enable_load_extension') "
        f"and sysconfig.get_config_var('SOABI') == {sysconfig.get_config_var('SOABI')!r}))"
    )
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = [*os.get_exec_path(), "/usr/bin", "/usr/local/bin", "/opt/homebrew/bin"]
    for folder in dict.fromkeys(folders):
        found = shutil.which(name, path=folder)
        if found is not None and subprocess.run([found, "-c", probe], capture_output=True).returncode == 0:
            return found
    unavailable(f"no {name} of this one's ABI with a sqlite3 that loads extensions is in {', '.join(folders)}")


def environment() -> dict[str, str]:
    """For another interpreter to run this one's packages and this checkout."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_", "VIRTUAL_ENV"))
    }
    return {**kept, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), sysconfig.get_path("purelib")])}


def test_a_driver_that_cannot_load_it_is_refused_before_anything_is_written(vault_path: Path) -> None:
    before = vault_path.read_bytes()
    database = Database(create_engine(f"sqlite:///{vault_path}", module=without_extensions()))
    with pytest.raises(MissingDependencyError, match=r'sqlite3 .*pip install "memvault\[sqlite-vec\]"'):
        SqliteVecIndex(database, CHUNKS)
    if not STDLIB_LOADS:
        options = {"module": sqlite3}
        with pytest.raises(MissingDependencyError, match="sqlite-vec"):
            StorageLayer.open(f"sqlite:///{vault_path}", vectors="sqlite-vec", embedder="none", engine_options=options)
    assert vault_path.read_bytes() == before


def test_another_engines_connection_loads_it_or_is_refused(world: SqlWorld, vault_path: Path) -> None:
    world.put(make_records(3))
    world.engine.dispose()  # two SQLite libraries in one process must not have one file open
    other = create_engine(f"sqlite:///{vault_path}", module=sqlite3)
    with other.connect() as connection:
        if STDLIB_LOADS:
            assert len(index_of(world).query("user_alice", direction(), 3, connection=connection)) == 3
        else:
            with pytest.raises(MissingDependencyError, match="sqlite-vec"):
                index_of(world).query("user_alice", direction(), 3, connection=connection)
    other.dispose()


def test_without_the_package_the_error_names_the_extra(world: SqlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlite_vec", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "memvault\[sqlite-vec\]"'):
        SqliteVecIndex(world.database, CHUNKS)


def test_without_the_package_no_vault_is_founded(vault_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{vault_path}"
    before = vault_path.read_bytes()
    with monkeypatch.context() as blocked:
        blocked.setitem(sys.modules, "sqlite_vec", None)
        with pytest.raises(MissingDependencyError, match=r'pip install "memvault\[sqlite-vec\]"'):
            StorageLayer.open(url, vectors="sqlite-vec", embedder="none")
    assert vault_path.read_bytes() == before
    with StorageLayer.open(url, vectors="exact", embedder="none") as storage:  # another choice is still free
        assert storage.stats()["index"] == "exact"


def test_connections_from_before_load_it_too_and_nothing_else_can(vault_path: Path) -> None:
    engine = create_engine(f"sqlite:///{vault_path}")
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
    world = SqlWorld(engine, SqliteVecIndex)
    world.put(make_records(5))
    world.check("user_alice", direction(), 5)
    assert engine.pool.status().startswith("Pool size: 5  Connections in pool: 1")
    with engine.connect() as connection, pytest.raises(Exception, match="not authorized"):
        connection.execute(text("SELECT load_extension('anything')"))
    world.close()


# Size and limits


def test_a_thousand_users_of_twenty_take_little_room(world: SqlWorld, vault_path: Path) -> None:
    spec = replace(SPEC, model="tests/random-256", dimension=256)
    index = SqliteVecIndex(world.database, CHUNKS)
    assert not index.open(spec)
    index.create()
    checkpoint(world)
    empty = vault_path.stat().st_size
    vectors = unit_vectors(20_000, spec.dimension, 1)
    index.upsert(
        [make_record(f"mem_{place:012x}", vector, f"user_{place % 1000}") for place, vector in enumerate(vectors)]
    )
    checkpoint(world)
    assert index.count() == 20_000
    assert vectors.nbytes < vault_path.stat().st_size - empty < 50e6


def checkpoint(world: SqlWorld) -> None:
    on_the_driver(world, "PRAGMA wal_checkpoint(TRUNCATE)")


def on_the_driver(world: SqlWorld, statement: str) -> None:
    """Run what no transaction may be around."""
    driver = world.engine.raw_connection()
    driver.cursor().execute(statement)
    driver.close()


@pytest.mark.parametrize("k", [MAX_K - 1, MAX_K, MAX_K + 1])
def test_more_than_it_returns_at_once_is_answered_all_the_same(world: SqlWorld, k: int) -> None:
    records = make_records(MAX_K + 10)
    world.fill([replace(r, metadata=replace(r.metadata, compressed=i % 9 == 0)) for i, r in enumerate(records)])
    world.check("user_alice", direction(), k)
    world.check("user_alice", direction(), k, F.compressed == True)  # noqa: E712


# Transactions


def test_an_error_is_the_indexs_in_its_own_transaction_and_the_writes_in_the_callers(world: SqlWorld) -> None:
    index = index_of(world)
    world.put(make_records(5))
    bad = [make_record("mem_1", direction()), make_record("mem_2", unit_vectors(1, DIMENSION + 1, 1)[0])]
    with pytest.raises(VectorIndexError, match="could not be written: .*16 .*17") as caught:
        index.upsert(bad)
    assert isinstance(caught.value.__cause__, StorageError)
    with pytest.raises(StorageError, match="16 .*17"), world.database.writing() as connection:
        index.follow(connection, "user_alice", {record.id: record.vector for record in bad})
    with world.database.reading() as connection:
        with pytest.raises(VectorIndexError, match="could not be searched"):
            index.query("user_alice", bad[1].vector, 5, connection=connection)
        assert len(index.query("user_alice", direction(), 5, connection=connection)) == 5
    world.check("user_alice", direction(), 5)


def test_a_write_that_the_index_refuses_is_not_stored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'memvault.db'}"
    with StorageLayer.open(url, vectors="sqlite-vec", embedder=HashingEmbedder(), exact_limit=0) as storage:
        alice = storage.for_user("user_alice")
        kept = alice.chunks.add("a cat")
        with storage.engine.begin() as connection:
            name = connection.execute(
                text("SELECT name FROM sqlite_master WHERE name LIKE 'memvault_vec%_chunks'")
            ).scalar_one()
            connection.execute(text(f"ALTER TABLE {name} RENAME TO hidden"))
        with pytest.raises(StorageError):
            alice.chunks.add("a dog")
        assert [hit.chunk.id for hit in alice.search("a dog", mode="vector")] == [kept.id]
        with storage.engine.begin() as connection:
            connection.execute(text(f"ALTER TABLE hidden RENAME TO {name}"))
        assert {chunk.id for chunk in alice.chunks.list().items} == {kept.id}
        alice.chunks.add("a dog")
        assert storage.stats()["index_records"] == 2


# Made and removed


def test_it_is_made_with_all_that_sql_holds(world: SqlWorld) -> None:
    world.put([*make_records(40), *make_records(30, "user_bob", prefix="bob", seed=2)])
    world.index.purge()
    with world.database.reading() as connection:
        assert not index_of(world).exists(connection)
    assert not world.fresh().open(SPEC)
    world.index.create()
    with world.database.reading() as connection:
        assert index_of(world).exists(connection)
    world.check("user_alice", direction(), 100)
    world.check("user_bob", direction(), 100)


def test_it_is_made_whole_or_not_at_all(world: SqlWorld) -> None:
    world.put(make_records(40))
    world.index.purge()
    with world.database.writing() as connection:
        connection.execute(VECTORS.update().where(VECTORS.c.chunk_id == "mem_39").values(vector=b"\0" * 12))
    with pytest.raises(VectorIndexError, match="could not be created"):
        world.index.create()
    assert virtual_tables(world) == []
    with world.database.writing() as connection:
        vector = world.records["mem_39"].vector
        connection.execute(VECTORS.update().where(VECTORS.c.chunk_id == "mem_39").values(vector=vector.tobytes()))
    world.index.create()
    world.check("user_alice", direction(), 100)


def virtual_tables(world: SqlWorld) -> list[str]:
    with world.database.reading() as connection:
        return list(
            connection.execute(text("SELECT name FROM sqlite_master WHERE name LIKE 'memvault_vec%'")).scalars()
        )


def test_nothing_is_left_after_a_purge(world: SqlWorld) -> None:
    world.put(make_records(40))
    assert TABLE in virtual_tables(world)
    world.index.purge()
    assert virtual_tables(world) == []


MAKE = """
import sys
from memvault import create_engine
from memvault.database.transactions import Database
from memvault.memory.chunk_table import CHUNKS
from memvault.vectors.sqlite_vec import SqliteVecIndex
from tests.vectors.worlds import SPEC
index = SqliteVecIndex(Database(create_engine(sys.argv[1])), CHUNKS)
index.open(SPEC)
print("ready", flush=True)
sys.stdin.readline()
index.create()
print(index.count())
"""


def test_two_processes_make_it_at_once(world: SqlWorld, vault_path: Path) -> None:
    world.put(make_records(500))
    world.index.purge()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE, f"sqlite:///{vault_path}"],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in running if process.stdout] == ["ready\n"] * 2
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[0] for process in running] == ["500\n"] * 2
    world.check("user_alice", direction(), 100)


def test_two_models_stand_side_by_side(world: SqlWorld) -> None:
    world.put(make_records(20))
    other = SqliteVecIndex(world.database, CHUNKS)
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
    world.index.purge()
    with world.engine.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE VIRTUAL TABLE {TABLE} USING vec0(chunk_id text primary key, user_id text partition key, "
            f"embedding float[{DIMENSION}])"
        )
    with pytest.raises(IndexMismatchError, match="metric l2, expected cosine: `memvault reindex`"):
        world.fresh().open(SPEC)


# Everybody else


def test_the_file_serves_connections_without_the_extension(world: SqlWorld, vault_path: Path) -> None:
    world.put(make_records(20))
    world.engine.dispose()  # two SQLite libraries in one process must not have one file open
    with closing(sqlite3.connect(vault_path)) as plain:
        assert plain.execute("SELECT count(*) FROM memory_chunks").fetchone() == (20,)
        plain.execute("UPDATE memory_chunks SET importance = .25")
        plain.execute("DELETE FROM memory_chunks WHERE id = 'mem_3'")
        plain.commit()
        plain.execute("VACUUM")
        assert plain.execute("SELECT count(*) FROM memory_chunks WHERE importance = .25").fetchone() == (19,)
        with pytest.raises(sqlite3.OperationalError, match="no such module: vec0"):
            plain.execute(f"SELECT count(*) FROM {TABLE}")
    assert len(world.index.query("user_alice", direction(), 100)) == 20  # vectors are the index's own affair
    assert len(world.index.query("user_alice", direction(), 100, F.importance == 0.25)) == 19


def test_a_vacuum_by_anybody_changes_no_answer(world: SqlWorld, vault_path: Path) -> None:
    """Its own tables name each other's rows by numbers, which a VACUUM might give anew: here with gaps to close."""
    for place in range(6):
        world.put(make_records(3 * CHUNK_SIZE, f"user_{place}", prefix=f"u{place}", seed=place))
    gone = [record.id for user in (0, 3) for record in world.of_user(f"user_{user}")]
    world.remove([*gone, *(f"u{user}_{place}" for user in (1, 4) for place in range(0, 3 * CHUNK_SIZE, 3))])
    world.engine.dispose()
    with closing(sqlite3.connect(vault_path)) as plain:
        plain.execute("VACUUM")
    for place in range(6):
        world.check(f"user_{place}", direction(place), 1000)
    world.put(make_records(50, "user_0", prefix="u0", seed=9))
    world.put(make_records(50, "user_1", prefix="u1", seed=9))
    on_the_driver(world, "VACUUM")
    world.reopen()
    for place in range(6):
        world.check(f"user_{place}", direction(place), 1000)
        world.check(f"user_{place}", direction(place), 5)


def test_migrations_pass_it_by(world: SqlWorld, vault_path: Path) -> None:
    world.put(make_records(20))
    tables = virtual_tables(world)
    url = f"sqlite:///{vault_path}"
    migrate.require_declared(url)
    world.engine.dispose()
    migrate.downgrade(url, "base")
    migrate.upgrade(url)
    migrate.require_declared(url)
    assert virtual_tables(world) == tables
    assert world.index.count() == 20


def test_the_commands_and_a_generated_revision_pass_it_by(world: SqlWorld, vault_path: Path, tmp_path: Path) -> None:
    world.put(make_records(20))
    world.engine.dispose()
    for arguments in (["check"], ["downgrade", "base", "--yes"], ["upgrade"], ["check"]):
        result = CliRunner().invoke(app, ["db", *arguments, "--database-url", f"sqlite:///{vault_path}"])
        assert result.exit_code == 0, result.output
    copied = copy_migrations(tmp_path / "copied")
    alembic_on(world.engine, copied, "revision", "nothing", autogenerate=True)
    (generated,) = (copied.parent / "alembic" / "versions").glob("*_nothing.py")
    assert "op." not in generated.read_text(encoding="utf-8")
    assert world.index.count() == 20


def test_vectors_come_back_as_they_were(world: SqlWorld) -> None:
    world.put(make_records(20))
    for record in next(world.index.scan()):
        assert np.array_equal(record.vector, world.records[record.id].vector)
