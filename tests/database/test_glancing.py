"""Are the connections that single statements read on let go of whenever the engine's are?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import create_engine as sa_create_engine

from memvault import NewChunk, StorageLayer
from memvault.database.engine import create_engine
from memvault.database.glancing import KEPT, GlanceConnections
from tests.support import HashingEmbedder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'memvault.db'}"


def open_files(path: Path) -> int:
    """How often this process has the file open."""
    return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))


def test_one_is_used_again_and_only_so_many_are_kept(url: str) -> None:
    engine = create_engine(url)
    connections = GlanceConnections(engine)
    with connections.lend() as first:
        pass
    with connections.lend() as second:
        assert second is first
        assert second.cursor().execute("PRAGMA cache_size").fetchone()[0] < -2000
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
    lent = [connections.lend() for _ in range(KEPT + 3)]
    for one in lent:
        one.__enter__()
    for one in lent:
        one.__exit__(None, None, None)
    assert len(connections._idle) == KEPT
    connections.close()
    engine.dispose()


def test_after_an_error_it_is_not_used_again(url: str) -> None:
    engine = create_engine(url)
    connections = GlanceConnections(engine)
    with pytest.raises(RuntimeError), connections.lend() as first:
        raise RuntimeError
    with connections.lend() as second:
        assert second is not first
    connections.close()
    engine.dispose()


def test_the_file_is_let_go_of(url: str, tmp_path: Path) -> None:
    path = tmp_path / "memvault.db"
    engine = create_engine(url)
    storage = StorageLayer.open(engine, vectors="exact", embedder=HashingEmbedder())
    alice = storage.for_user("user_alice")
    alice.chunks.add_many([NewChunk("a cat"), NewChunk("a dog")])
    for _ in range(2):  # the second time at a glance
        assert len(alice.search("cat")) == 2
    assert open_files(path) >= 1
    engine.dispose()
    assert open_files(path) == 0
    assert len(alice.search("cat")) == 2
    storage.close()
    engine.dispose()
    assert open_files(path) == 0


def test_an_engine_is_not_watched_any_longer(url: str) -> None:
    engine = sa_create_engine(url)
    before = len(list(engine.dispatch.engine_disposed))
    for _ in range(5):
        GlanceConnections(engine).close()
    assert len(list(engine.dispatch.engine_disposed)) == before
