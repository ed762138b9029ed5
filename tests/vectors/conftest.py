"""Every index in one suite: a kind that is added here is tested like the others."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from memvault.database.engine import create_engine
from memvault.vectors.exact import ExactIndex
from memvault.vectors.pgvector import PgVectorIndex
from memvault.vectors.sqlite_vec import SqliteVecIndex
from tests.support import unavailable
from tests.vectors.worlds import ChromaServerWorld, ChromaWorld, IndexWorld, SqlWorld

STDLIB_LOADS = hasattr(sqlite3.Connection, "enable_load_extension")
"""Whether this Python's own SQLite takes extensions. Where not, `test_sqlite_vec` finds a Python whose does."""

WORLDS = (
    "exact-sqlite",
    "exact-postgres",
    "chroma",
    "chroma-server",
    *(["sqlite-vec-stdlib"] if STDLIB_LOADS else []),
    "sqlite-vec-pysqlite3",
    "sqlite-vec-sqlean",
    "pgvector",
)


def sqlite_driver(name: str) -> ModuleType:
    """A SQLite library that can load extensions."""
    if name == "stdlib":
        return sqlite3
    try:
        return importlib.import_module(f"{name}.dbapi2")
    except ImportError as error:
        unavailable(f"there is no {name} for this Python: {error}")


@pytest.fixture(params=WORLDS)
def index_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IndexWorld]:
    """An index that was opened and created, and is empty."""
    world: IndexWorld
    match request.param.rsplit("-", 1):
        case ["chroma"]:
            world = ChromaWorld(tmp_path / "chroma")
        case ["chroma", "server"]:
            world = ChromaServerWorld(request.getfixturevalue("chroma_server").new_url())
        case ["exact", "sqlite"]:
            world = SqlWorld(create_engine(f"sqlite:///{request.getfixturevalue('vault_path')}"), ExactIndex)
        case ["exact", "postgres"]:
            world = SqlWorld(create_engine(request.getfixturevalue("postgres_url")), ExactIndex)
        case ["pgvector"]:
            world = SqlWorld(create_engine(request.getfixturevalue("postgres_url")), PgVectorIndex)
        case ["sqlite-vec", driver]:
            url = f"sqlite:///{request.getfixturevalue('vault_path')}"
            world = SqlWorld(create_engine(url, module=sqlite_driver(driver)), SqliteVecIndex)
        case other:
            raise AssertionError(other)
    yield world
    world.close()
