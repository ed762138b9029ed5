"""Is the space of what was deleted given back, with everything else as it was?"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memvault import IndexOwnershipError, NewChunk, StorageLayer
from tests.conftest import OpenVault
from tests.support import unit_vectors

BACKENDS = (("sqlite", "exact"), ("sqlite", "chroma"), ("sqlite", "sqlite-vec"), ("sqlite", "chroma-server"))

DIMENSION = 64
COUNT = 1_500


def fill(layer: StorageLayer) -> None:
    """Much of which nearly all is deleted again, here and there."""
    alice, bob = layer.for_user("alice").chunks, layer.for_user("bob").chunks
    for user, chunks in (("alice", alice), ("bob", bob)):
        vectors = unit_vectors(COUNT, DIMENSION, seed=len(user))
        chunks.add_many(
            NewChunk(f"{user} keeps a secret {n} " * 8, id=f"{user} {n}", embedding=vector)
            for n, vector in enumerate(vectors)
        )
    assert bob.delete_many([f"bob {n}" for n in range(COUNT) if n % 30]) == COUNT - COUNT // 30
    layer.erase_user("alice")
    layer.sync()


def test_space_is_given_back(open_vault: OpenVault, index_name: str) -> None:
    layer = open_vault(embedder="none")
    fill(layer)
    report = layer.compact()
    assert report.database_before is not None
    assert report.database_after is not None
    assert report.database_after < report.database_before / 5
    if index_name == "chroma":
        assert report.index_before is not None
        assert report.index_after is not None
        assert report.index_after < report.index_before / 2
    else:
        assert report.index_before is report.index_after is None
    assert layer.doctor().clean
    vectors = unit_vectors(COUNT, DIMENSION, seed=3)
    for place in range(0, COUNT, 30):
        [hit] = layer.for_user("bob").search(embedding=vectors[place], k=1)
        assert hit.chunk.id == f"bob {place}"


def test_nothing_is_left_of_a_text(open_vault: OpenVault, index_name: str, vault_path: Path) -> None:
    if index_name == "chroma-server":
        return  # not ours to compact
    layer = open_vault(embedder="none")
    fill(layer)
    layer.compact()
    layer.close()
    files = [path for path in vault_path.parent.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert b"alice keeps a secret" not in path.read_bytes(), path


def test_writers_and_readers_go_on(open_vault: OpenVault) -> None:
    layer = open_vault(embedder="none", exact_limit=0)
    fill(layer)
    vectors = unit_vectors(60, DIMENSION, seed=9)

    def write() -> None:
        carol = layer.for_user("carol")
        for place, vector in enumerate(vectors):
            carol.chunks.add("meanwhile", id=f"carol {place}", embedding=vector)
            [hit] = carol.search(embedding=vector, k=1)
            assert hit.chunk.id == f"carol {place}"

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        layer.compact()
        writing.result(timeout=60)
    layer.sync()
    assert layer.doctor().clean


def test_the_command(vault_path: Path) -> None:
    url = f"sqlite:///{vault_path}"
    command = [sys.executable, "-m", "memvault", "compact", "--database-url", url, "--json"]
    with StorageLayer.open(url, vectors="chroma", embedder="none") as layer:
        fill(layer)
        owned = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert owned.returncode == 3, owned.stderr
        with StorageLayer.open(url, embedder="none") as second, pytest.raises(IndexOwnershipError):
            second.compact()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    report = json.loads(done.stdout)
    assert report["database_after"] < report["database_before"]
    assert report["index_after"] < report["index_before"]
