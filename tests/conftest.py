"""Vaults to test on: each index through the same tests, and none may leave a connection or a debt behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from memvault import StorageLayer, UserMemory
from memvault.database import migrate
from tests.support import HashingEmbedder

INDEXES = ("exact", "chroma")

OpenVault = Callable[..., StorageLayer]
"""`StorageLayer.open` on the test's own vault, with the test's index and embedder unless others are named."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves_debts: this test ends while its index still owes something, on purpose")


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


@pytest.fixture(params=INDEXES)
def index_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def opened() -> Iterator[list[StorageLayer]]:
    """The storage layers that a test opened: closed at its end, with every connection returned."""
    layers: list[StorageLayer] = []
    with ExitStack() as closing:
        yield layers
        for layer in layers:
            closing.callback(layer.close)
        for layer in layers:
            assert layer.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool


@pytest.fixture
def open_vault(vault_path: Path, index_name: str, opened: list[StorageLayer]) -> OpenVault:
    return opener(vault_path, index_name, opened)


@pytest.fixture
def open_exact(vault_path: Path, opened: list[StorageLayer]) -> OpenVault:
    """As `open_vault`, on the exact index only: for what no index has a say in."""
    return opener(vault_path, "exact", opened)


def opener(path: Path, index: str, opened: list[StorageLayer]) -> OpenVault:
    def open_it(**options: Any) -> StorageLayer:
        defaults = {"vectors": index, "embedder": HashingEmbedder()}
        layer = StorageLayer.open(f"sqlite:///{path}", **{**defaults, **options})
        opened.append(layer)
        return layer

    return open_it


@pytest.fixture
def storage(request: pytest.FixtureRequest, open_vault: OpenVault) -> Iterator[StorageLayer]:
    """An empty vault with the tests' embedder, on each index."""
    layer = open_vault()
    yield layer
    assert_settled(request, layer)


@pytest.fixture
def bare_storage(request: pytest.FixtureRequest, open_vault: OpenVault) -> Iterator[StorageLayer]:
    """An empty vault without an embedder, on each index."""
    layer = open_vault(embedder="none")
    yield layer
    assert_settled(request, layer)


@pytest.fixture
def exact_storage(open_exact: OpenVault) -> StorageLayer:
    """An empty vault with the tests' embedder, on the exact index only."""
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
