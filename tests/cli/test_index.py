"""Does `memvault index create` make what a service that may make nothing then opens, on either database?"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from memvault import IndexMismatchError, NewChunk, StorageLayer, create_engine
from memvault.cli.app import app
from memvault.database import migrate
from memvault.database.transactions import Database
from memvault.indexing.vault import find_vault
from tests.postgres import Postgres
from tests.support import unit_vectors

BACKENDS = (("sqlite", "sqlite-vec"), ("postgres", "pgvector"))
USAGE, FAILURE = 2, 4

COMMAND = "`memvault index create`"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment's settings come from the environment, and are the test's alone."""
    for name in os.environ:
        if name.startswith("MEMVAULT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def environment(database_url: str, index_name: str, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Names the test's database, at head and without a vault, and the index and embedder for a new one."""
    monkeypatch.setenv("MEMVAULT_DATABASE_URL", database_url)
    monkeypatch.setenv("MEMVAULT_VECTORS", index_name)
    monkeypatch.setenv("MEMVAULT_EMBEDDER", "static")
    return monkeypatch


def create(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["index", "create", *arguments], prog_name="memvault")


def succeeds(result: Result, said: str) -> None:
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{said}\n"


def fails(result: Result, code: int, *words: str) -> None:
    """The command failed with this code, and one line that says these words."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def founded(url: str) -> bool:
    engine = create_engine(url)
    vault = find_vault(Database(engine))
    engine.dispose()
    return vault is not None


@pytest.mark.usefixtures("environment")
def test_it_founds_the_vault_that_a_service_opens(database_url: str, index_name: str) -> None:
    succeeds(create(), f"made: {index_name}, 0 records")
    succeeds(create(), f"was there already: {index_name}, 0 records")
    with StorageLayer.open(database_url, schema="check", exact_limit=0) as storage:
        assert storage.health()["last_error"] is None
        user = storage.for_user("user_alice")
        user.chunks.add_many([NewChunk("a grey cat sleeps"), NewChunk("the train leaves at nine")])
        [hit] = user.search("a grey cat sleeps", k=1)
        assert (hit.chunk.content, hit.why["tier"]) == ("a grey cat sleeps", "index")
    succeeds(create("--database-url", database_url), f"was there already: {index_name}, 2 records")


@pytest.mark.usefixtures("environment")
def test_it_fills_what_a_service_did_without(
    database_url: str, index_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memvault.index"):
        service = StorageLayer.open(database_url, vectors=index_name, embedder="static", schema="check", exact_limit=0)
    [record] = [record for record in caplog.records if record.name == "memvault.index"]
    assert record.levelno == logging.WARNING
    assert COMMAND in record.getMessage()
    with service:
        assert COMMAND in service.health()["last_error"]
        assert service.health()["ok"]
        user = service.for_user("user_alice")
        user.chunks.add_many([NewChunk(f"memory number {place}") for place in range(1200)])
        [hit] = user.search("memory number 7", k=1)
        assert (hit.chunk.content, hit.why["tier"]) == ("memory number 7", "exact")
        succeeds(create(), f"made: {index_name}, 1,200 records")
        user.chunks.add("written since")
        [hit] = user.search("written since", k=1)
        assert (hit.chunk.content, hit.why["tier"]) == ("written since", "index")
        assert service.health()["last_error"] is None
    succeeds(create(), f"was there already: {index_name}, 1,201 records")


def test_without_an_embedder_somebody_has_to_tell_the_dimension(
    environment: pytest.MonkeyPatch, database_url: str, index_name: str
) -> None:
    environment.setenv("MEMVAULT_EMBEDDER", "none")
    fails(create(), USAGE, "no embedder", "`memvault index create --dimension 384`")
    for wrong in ("many", "0"):
        assert create("--dimension", wrong).exit_code == USAGE
    assert create("--dimension", "20000").exit_code == FAILURE  # more than either extension takes; nothing is fixed
    succeeds(create("--dimension", "8"), f"made: {index_name}, 0 records")
    succeeds(create(), f"was there already: {index_name}, 0 records")
    succeeds(create("--dimension", "8"), f"was there already: {index_name}, 0 records")
    fails(create("--dimension", "9"), USAGE, "dimension 8, not 9")
    vectors = unit_vectors(5, 8, 1)
    with StorageLayer.open(database_url, schema="check", exact_limit=0) as storage:
        user = storage.for_user("user_alice")
        user.chunks.add_many([NewChunk(f"memory {place}", embedding=one) for place, one in enumerate(vectors)])
        [hit] = user.search(embedding=vectors[3], k=1)
        assert (hit.chunk.content, hit.why["tier"]) == ("memory 3", "index")
        assert storage.stats()["index_records"] == 5


def test_without_an_embedder_vectors_tell_the_dimension(
    environment: pytest.MonkeyPatch, database_url: str, index_name: str
) -> None:
    environment.setenv("MEMVAULT_EMBEDDER", "none")
    with StorageLayer.open(database_url, vectors=index_name, embedder="none", schema="check") as storage:
        storage.for_user("user_alice").chunks.add("a memory", embedding=[1, 0, 0])
    succeeds(create(), f"made: {index_name}, 1 records")


def test_another_index_or_embedder_is_refused(environment: pytest.MonkeyPatch, index_name: str) -> None:
    succeeds(create(), f"made: {index_name}, 0 records")
    environment.setenv("MEMVAULT_VECTORS", "exact")
    fails(create(), FAILURE, f"{index_name!r}, not 'exact'")
    environment.setenv("MEMVAULT_VECTORS", index_name)
    environment.setenv("MEMVAULT_EMBEDDER", "none")
    fails(create(), FAILURE, "leave embedder= out")


@pytest.mark.usefixtures("environment")
def test_a_service_that_names_another_index_is_refused(database_url: str) -> None:
    assert create().exit_code == 0
    with pytest.raises(IndexMismatchError, match="leave vectors= out"):
        StorageLayer.open(database_url, vectors="exact", schema="check")


def test_an_index_that_is_no_table_has_nothing_to_make(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MEMVAULT_VECTORS", "exact")
    succeeds(create(), "was there already: exact, 0 records")


@pytest.fixture
def blank(request: pytest.FixtureRequest, database_name: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a database in which nothing is yet."""
    if database_name == "sqlite":
        yield f"sqlite:///{tmp_path / 'blank.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres18")
    yield server.create_database("blank_index")
    server.drop_database("blank_index")


def test_a_database_that_is_not_at_head_is_left_as_it_is(environment: pytest.MonkeyPatch, blank: str) -> None:
    environment.setenv("MEMVAULT_DATABASE_URL", blank)
    fails(create(), FAILURE, "`memvault db upgrade`")
    assert migrate.current(blank) is None
    assert CliRunner().invoke(app, ["db", "upgrade"]).exit_code == 0
    assert create().exit_code == 0
    assert founded(blank)


def test_what_the_environment_gets_wrong_founds_nothing(environment: pytest.MonkeyPatch, database_url: str) -> None:
    environment.setenv("MEMVAULT_VECTORS", "faiss")
    fails(create(), USAGE, "'faiss'")
    environment.setenv("MEMVAULT_VECTORS", "sqlite-vec" if database_url.startswith("postgresql") else "pgvector")
    fails(create(), USAGE, "needs a")
    assert not founded(database_url)


def test_a_database_has_to_be_named() -> None:
    fails(create(), USAGE, "--database-url", "MEMVAULT_DATABASE_URL")


def test_a_server_without_pgvector_is_told_what_to_install(
    postgres15: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres15.create_database("no_vectors_here")
    migrate.upgrade(url)
    monkeypatch.setenv("MEMVAULT_DATABASE_URL", url)
    monkeypatch.setenv("MEMVAULT_VECTORS", "pgvector")
    fails(create(), FAILURE, "postgresql-15-pgvector", "'no_vectors_here'", "CREATE EXTENSION vector")
    postgres15.drop_database("no_vectors_here")
