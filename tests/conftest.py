"""Vaults to test on: each database and index through the same tests; none may leave a connection or a debt behind."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from memvault import StorageLayer, UserMemory
from memvault.database import migrate
from tests import postgres
from tests.reused_postgres import Reused
from tests.support import PATIENT_S, HashingEmbedder, assert_returned
from tests.vectors.chroma_servers import ChromaServer

BACKENDS = (
    ("sqlite", "exact"),
    ("sqlite", "chroma"),
    ("sqlite", "sqlite-vec"),
    ("postgres", "exact"),
    ("postgres", "pgvector"),
)
"""Database and index of the tests that an index has a say in; all others run once on each database."""

OpenVault = Callable[..., StorageLayer]
"""`StorageLayer.open` on the test's own vault, with the test's index and embedder unless others are named."""


if sys.dont_write_bytecode and "PYTHONPYCACHEPREFIX" not in os.environ:
    # The tests start a hundred interpreters, each of which would compile all it imports: 4 s instead of 1.5.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache" / "pycache")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves_debts: this test ends while its index still owes something, on purpose")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI nothing is skipped: what a test needs has to be there."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped in CI: {report.longrepr}"
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test that uses a vault the databases and indexes to run on.

    One that asks for `vault_path` or `postgres_url`, be it by "usefixtures", is about that database, and stays there.
    """
    asked = metafunc.fixturenames
    kept = {"vault_path": "sqlite", "postgres_url": "postgres"}
    named = {database for name, database in kept.items() if name in asked}
    every = getattr(metafunc.module, "BACKENDS", BACKENDS)
    backends = [backend for backend in every if not named or backend[0] in named]
    if "index_name" in asked:
        ids = ["-".join(backend) for backend in backends]
        metafunc.parametrize(("database_name", "index_name"), backends, ids=ids, indirect=True)
    elif "database_name" in asked:
        metafunc.parametrize("database_name", dict.fromkeys(database for database, _ in backends), indirect=True)


@pytest.fixture
def database_name(request: pytest.FixtureRequest) -> str:
    """The kind of the test's database, as in `BACKENDS`."""
    name: str = request.param
    return name


@pytest.fixture
def index_name(request: pytest.FixtureRequest, database_name: str) -> str:
    """The kind of the test's index."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def chroma_server() -> Iterator[ChromaServer]:
    """A Chroma server that tests share, each with a database of its own there."""
    server = ChromaServer()
    yield server
    server.close()


@pytest.fixture
def vectors(request: pytest.FixtureRequest, index_name: str, database_name: str, tmp_path: Path) -> str:
    """What `StorageLayer.open` calls the test's index."""
    if index_name == "chroma-server":
        server: ChromaServer = request.getfixturevalue("chroma_server")
        return server.new_url()
    if index_name == "chroma" and database_name != "sqlite":  # no folder is beside a server
        return f"chroma://{tmp_path}/chroma"
    return index_name


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database at head in which no vault was founded yet, to be copied: migrating takes longer than most tests."""
    path = tmp_path_factory.mktemp("template") / "memvault.db"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def vault_path(tmp_path: Path, migrated_database: Path) -> Path:
    """The test's own database file, at head."""
    return Path(shutil.copy(migrated_database, tmp_path / "memvault.db"))


@pytest.fixture(scope="session")
def postgres18() -> Iterator[postgres.Postgres]:
    """PostgreSQL 18 with pgvector; a test that changes its schema makes a database of its own there."""
    server = postgres.postgres18()
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgres15() -> Iterator[postgres.Postgres]:
    """PostgreSQL 15, whose databases sort by a language's rules."""
    server = postgres.postgres15()
    yield server
    server.close()


@pytest.fixture(scope="session")
def reused_postgres(postgres18: postgres.Postgres) -> Iterator[Reused]:
    reused = Reused(postgres18)
    yield reused
    reused.close()


@pytest.fixture
def postgres_url(reused_postgres: Reused) -> str:
    """The test's own PostgreSQL database, at head."""
    return reused_postgres.emptied()


@pytest.fixture
def database_url(request: pytest.FixtureRequest, database_name: str) -> str:
    """The test's own database, at head."""
    if database_name == "sqlite":
        return f"sqlite:///{request.getfixturevalue('vault_path')}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def opened() -> Iterator[list[StorageLayer]]:
    """The storage layers that a test opened: closed at its end, with every connection returned."""
    layers: list[StorageLayer] = []
    with ExitStack() as closing:
        yield layers
        for layer in layers:
            closing.callback(layer.close)
        for layer in layers:
            assert_returned(layer)


@pytest.fixture
def open_vault(database_url: str, vectors: str, opened: list[StorageLayer]) -> OpenVault:
    return opener(database_url, vectors, opened)


@pytest.fixture
def open_exact(database_url: str, opened: list[StorageLayer]) -> OpenVault:
    """As `open_vault`, on the exact index only: for what no index has a say in."""
    return opener(database_url, "exact", opened)


def opener(url: str, index: str, opened: list[StorageLayer]) -> OpenVault:
    def open_it(**options: Any) -> StorageLayer:
        defaults = {"vectors": index, "embedder": HashingEmbedder(), "schema": "upgrade", "index_wait": PATIENT_S}
        layer = StorageLayer.open(url, **{**defaults, **options})
        opened.append(layer)
        return layer

    return open_it


@pytest.fixture
def storage(request: pytest.FixtureRequest, open_vault: OpenVault) -> Iterator[StorageLayer]:
    """An empty vault with the tests' embedder, on each database and index."""
    layer = open_vault()
    yield layer
    assert_settled(request, layer)


@pytest.fixture
def bare_storage(request: pytest.FixtureRequest, open_vault: OpenVault) -> Iterator[StorageLayer]:
    """An empty vault without an embedder, on each database and index."""
    layer = open_vault(embedder="none")
    yield layer
    assert_settled(request, layer)


@pytest.fixture
def exact_storage(open_exact: OpenVault) -> StorageLayer:
    """An empty vault with the tests' embedder, on the exact index only, on each database."""
    return open_exact()


@pytest.fixture
def alice(exact_storage: StorageLayer) -> UserMemory:
    return exact_storage.for_user("user_alice")


@pytest.fixture
def bob(exact_storage: StorageLayer) -> UserMemory:
    return exact_storage.for_user("user_bob")


def assert_settled(request: pytest.FixtureRequest, layer: StorageLayer) -> None:
    if request.node.get_closest_marker("leaves_debts") is None:
        assert layer.health()["debts"] == 0
