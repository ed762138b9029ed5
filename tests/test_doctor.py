"""Does the doctor find every kind of damage, on every index, and nothing else? And does its repair mend it for good?"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from memvault import DoctorReport, IndexOwnershipError, NewChunk, StorageLayer
from memvault.indexing import doctor, truth
from memvault.indexing.diagnosis import FINDINGS
from memvault.vectors import chroma_collection
from memvault.vectors.base import VectorIndex, VectorRecord
from memvault.vectors.canonical import VECTORS
from tests.conftest import OpenVault
from tests.support import unit_vectors

BACKENDS = (
    ("sqlite", "chroma"),
    ("sqlite", "chroma-server"),
    ("sqlite", "sqlite-vec"),
    ("postgres", "chroma-server"),
    ("postgres", "pgvector"),
)
INSIDE = ("sqlite-vec", "pgvector")

DIMENSION = 32
BATCH = 100
COUNT = 230
"""More than two of the batches that are compared at once here."""

FEW = 700


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor, truth):
        monkeypatch.setattr(module, "BATCH", BATCH)


@pytest.fixture
def filled(open_vault: OpenVault) -> StorageLayer:
    """Two users' memories, all of them in the index."""
    layer = open_vault(embedder="none", indexing="inline", index_wait=60)
    for user, seed in (("alice", 1), ("bob", 2)):
        vectors = unit_vectors(COUNT // 2, DIMENSION, seed)
        layer.for_user(user).chunks.add_many(
            NewChunk(f"{user} {n}", id=f"{user} {n}", embedding=vector) for n, vector in enumerate(vectors)
        )
    layer.sync()
    assert layer.health()["debts"] == 0
    return layer


def index_of(layer: StorageLayer) -> VectorIndex:
    index = layer._reach.acquire(now=True)
    assert index is not None
    return index


def records(layer: StorageLayer, *ids: str) -> list[VectorRecord]:
    """As the index has them."""
    found = index_of(layer).fetch(ids)
    assert len(found) == len(ids)
    made = []
    for record in found:
        assert record.metadata is not None
        made.append(VectorRecord(record.id, record.vector, record.document or record.id, record.metadata))
    return made


def found(report: DoctorReport) -> dict[str, int]:
    return {finding: count for finding in FINDINGS if (count := getattr(report, finding))}


def lose(layer: StorageLayer) -> dict[str, int]:
    index_of(layer).delete(["alice 3", "alice 4", "bob 114"])
    return {"missing": 3}


def leave_behind(layer: StorageLayer) -> dict[str, int]:
    [record] = records(layer, "alice 5")
    gone = [replace(record, id=f"gone {n}") for n in range(4)]
    stranger = replace(record, id="gone 4", metadata=replace(record.metadata, user_id="nobody"))
    index_of(layer).upsert([*gone, stranger])
    return {"orphaned": 5}


def turn(layer: StorageLayer) -> dict[str, int]:
    index_of(layer).upsert([replace(record, vector=-record.vector) for record in records(layer, "bob 7", "alice 7")])
    return {"stale": 2}


def change_hands(layer: StorageLayer) -> dict[str, int]:
    [record] = records(layer, "alice 9")
    index_of(layer).upsert([replace(record, metadata=replace(record.metadata, user_id="bob"))])
    return {"foreign": 1}


def change_metadata(layer: StorageLayer) -> dict[str, int]:
    some = records(layer, "alice 10", "alice 11", "bob 12")
    changed = [
        replace(some[0], metadata=replace(some[0].metadata, compressed=True)),
        replace(some[1], metadata=replace(some[1].metadata, importance=some[1].metadata.importance + 1e-6)),
        replace(some[2], document="another text"),
    ]
    index_of(layer).upsert(changed)
    return {"stale": 3}


def change_sql(layer: StorageLayer) -> dict[str, int]:
    """Behind the back of everybody: another vector, as of a restored backup."""
    with layer.engine.begin() as connection:
        stored = connection.execute(select(VECTORS.c.vector).where(VECTORS.c.chunk_id == "bob 20")).scalar_one()
        other = (-np.frombuffer(stored, "<f4")).tobytes()
        connection.execute(update(VECTORS).where(VECTORS.c.chunk_id == "bob 20").values(vector=other))
    return {"stale": 1}


def everything(layer: StorageLayer) -> dict[str, int]:
    damage = (lose, leave_behind, turn, change_hands, change_sql)
    total: dict[str, int] = {}
    for one in damage:
        for finding, count in one(layer).items():
            total[finding] = total.get(finding, 0) + count
    return total


def test_damage_is_found_and_mended(filled: StorageLayer, index_name: str) -> None:
    clean = DoctorReport(clean=True, compared=2 * (COUNT // 2))
    assert filled.doctor() == clean
    damages = [lose, leave_behind, turn, change_hands, change_sql, everything]
    if index_name not in INSIDE:  # which keep no metadata
        damages.append(change_metadata)
    for damage in damages:
        expected = damage(filled)
        told: list[tuple[int, int]] = []
        report = filled.doctor(progress=lambda done, total, told=told: told.append((done, total)))  # type: ignore[misc]
        assert found(report) == expected, damage
        assert not report.clean
        assert report.repaired == report.owed == 0
        assert set(report.examples) == set(expected)
        assert told[-1][0] == told[-1][1]
        assert filled.health()["debts"] == 0, "it only looked"
        mended = filled.doctor(repair=True)
        assert found(mended) == expected, damage
        assert mended.repaired == sum(expected.values())
        assert filled.doctor(repair=True) == clean, damage
    for user, seed in (("alice", 1), ("bob", 2)):
        vector = unit_vectors(COUNT // 2, DIMENSION, seed)[3]
        [best] = index_of(filled).query(user, vector, 1)
        assert best.id == f"{user} 3"


def test_what_is_owed_is_no_damage(filled: StorageLayer, open_vault: OpenVault, index_name: str) -> None:
    filled.close()
    layer = open_vault(embedder="none", indexing="manual")
    alice = layer.for_user("alice")
    alice.chunks.delete("alice 1")
    alice.chunks.update("alice 2", embedding=unit_vectors(1, DIMENSION, 5)[0])
    alice.chunks.add("new", embedding=unit_vectors(1, DIMENSION, 6)[0])
    debts = 0 if index_name in INSIDE else 3
    assert layer.health()["debts"] == debts
    assert layer.doctor().clean
    assert layer.doctor(repair=True).clean
    assert layer.health()["debts"] == debts
    layer.sync()
    assert layer.doctor().clean


def test_writers_that_go_on_are_no_damage(filled: StorageLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a repair beside them undo what they write."""
    monkeypatch.setattr(doctor, "LOOK_PAUSE_S", 0.01)
    stop = threading.Event()

    def write(user: str) -> int:
        chunks, rng = filled.for_user(user).chunks, np.random.default_rng(3)
        written = 0
        while not stop.is_set():
            place = int(rng.integers(50, 100))
            chunks.update(f"{user} {place}", embedding=rng.normal(size=DIMENSION))
            chunks.delete(chunks.add("passing", embedding=rng.normal(size=DIMENSION)).id)
            written += 1
        return written

    with ThreadPoolExecutor(2) as pool:
        writing = [pool.submit(write, user) for user in ("alice", "bob")]
        try:
            reports = [filled.doctor() for _ in range(3)]
            expected = lose(filled)
            mended = filled.doctor(repair=True)
        finally:
            stop.set()
        assert all(one.result() for one in writing)
    assert all(report.clean for report in reports)
    assert found(mended) == expected
    filled.sync()
    assert filled.doctor().clean


def test_a_vault_without_a_vector(open_vault: OpenVault) -> None:
    layer = open_vault(embedder="none")
    assert layer.doctor(repair=True) == DoctorReport(clean=True)
    layer.for_user("alice").chunks.add("no vector", memory_type="procedural")
    assert layer.doctor() == DoctorReport(clean=True)


@pytest.mark.usefixtures("vault_path")
class TestChroma:
    """What only embedded Chroma does, or has done to it."""

    @pytest.fixture
    def chroma(self, vault_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorageLayer:
        monkeypatch.setattr(chroma_collection, "SYNC_THRESHOLD", 200)
        url = f"sqlite:///{vault_path}"
        with StorageLayer.open(url, vectors="chroma", embedder="none", index_wait=60) as layer:
            vectors = unit_vectors(FEW, DIMENSION, 1)
            layer.for_user("alice").chunks.add_many(
                NewChunk(f"note {n}", id=f"alice {n}", embedding=vector) for n, vector in enumerate(vectors)
            )
            assert layer.doctor().clean
        return StorageLayer.open(url, embedder="none", index_wait=60, exact_limit=0)

    @pytest.mark.timeout(300)  # Chroma may well hang on what they leave, ten seconds each time
    def test_what_it_forgot_after_unguarded_writes(self, chroma: StorageLayer, vault_path: Path) -> None:
        """Three processes at once, none of which knows of the others, write what was taken out before."""
        chroma.close()
        arguments = [f"{vault_path}.chroma", f"memvault_{chroma.vault_id}", str(vault_path.with_name("taken"))]
        for _ in range(12):  # it is a race, which is not lost each time
            write_unguarded(arguments)
            with StorageLayer.open(f"sqlite:///{vault_path}", embedder="none", index_wait=60, exact_limit=0) as layer:
                report = layer.doctor(repair=True)
                if report.clean:
                    continue
                assert report.unfindable or report.missing or report.reason
                assert layer.doctor().clean
                for place, vector in enumerate(unit_vectors(FEW, DIMENSION, 1)):
                    [hit] = layer.for_user("alice").search(embedding=vector, k=1)
                    assert hit.chunk.id == f"alice {place}"
                return
        raise AssertionError("Chroma forgot nothing")

    def test_another_process_owns_it(self, chroma: StorageLayer, vault_path: Path) -> None:
        with chroma, StorageLayer.open(f"sqlite:///{vault_path}", embedder="none") as second:
            index_of(chroma)
            with pytest.raises(IndexOwnershipError):
                second.doctor()

    def test_a_collection_of_another_metric(self, vault_path: Path) -> None:
        url = f"sqlite:///{vault_path}"
        with StorageLayer.open(url, vectors="chroma", embedder="none") as layer:
            name = f"memvault_{layer.vault_id}"
            layer.for_user("alice").chunks.add("a", embedding=[1.0, 0.0])
        replaced = subprocess.run(
            [sys.executable, "-c", OF_ANOTHER_METRIC, f"{vault_path}.chroma", name], check=True, timeout=60
        )
        assert replaced.returncode == 0
        shown = run_doctor(url, "--json")
        assert shown.returncode == 1, shown.stderr
        report = json.loads(shown.stdout)
        assert report["mismatched"] == 1
        assert "memvault reindex" in report["reason"]

    def test_the_command(self, chroma: StorageLayer, vault_path: Path) -> None:
        url = f"sqlite:///{vault_path}"
        index_of(chroma)
        owned = run_doctor(url)
        assert owned.returncode == 3, owned.stderr
        lost = ["alice 1", "alice 2"]
        index_of(chroma).delete(lost)
        chroma.close()
        shown = run_doctor(url)
        assert shown.returncode == 1
        assert shown.stdout.splitlines()[1] == "missing\t2\talice 1 alice 2"
        mended = run_doctor(url, "--repair", "--json")
        assert mended.returncode == 1
        report: dict[str, Any] = json.loads(mended.stdout)
        assert (report["missing"], report["repaired"], report["owed"]) == (2, 2, 0)
        clean = run_doctor(url)
        assert clean.returncode == 0
        assert clean.stdout == f"clean: {FEW:,} records compared\n"


def write_unguarded(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-c", TAKE_OUT, *arguments], check=True, timeout=120)
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    commands = [[sys.executable, "-c", UNGUARDED, *arguments, str(place)] for place in range(3)]
    writers: list[Any] = [subprocess.Popen(command, **pipes) for command in commands]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]


def run_doctor(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memvault", "doctor", "--database-url", url, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


TAKE_OUT = """
import pickle, sys
import chromadb
from chromadb.config import Settings
folder, name, file = sys.argv[1:]
client = chromadb.PersistentClient(folder, settings=Settings(anonymized_telemetry=False))
collection = client.get_collection(name, embedding_function=None)
ids = [f"alice {n}" for n in range(600)]
there = collection.get(ids=ids, include=["metadatas", "documents", "embeddings"])
with open(file, "wb") as stream:
    pickle.dump([there[key] for key in ("ids", "embeddings", "documents", "metadatas")], stream)
collection.delete(ids=ids)
client.close()
"""

UNGUARDED = """
import pickle, sys
import chromadb
from chromadb.config import Settings
folder, name, file, place = sys.argv[1:]
client = chromadb.PersistentClient(folder, settings=Settings(anonymized_telemetry=False))
collection = client.get_collection(name, embedding_function=None)
with open(file, "rb") as stream:
    columns = pickle.load(stream)
print("ready", flush=True)
sys.stdin.readline()
for first in range(int(place) * 200, int(place) * 200 + 200, 20):
    ids, embeddings, documents, metadatas = [column[first : first + 20] for column in columns]
    collection.upsert(ids=ids, embeddings=embeddings, documents=documents, metadatas=metadatas)
"""

OF_ANOTHER_METRIC = """
import sys
import chromadb
from chromadb.config import Settings
client = chromadb.PersistentClient(sys.argv[1], settings=Settings(anonymized_telemetry=False))
metadata = client.get_collection(sys.argv[2], embedding_function=None).metadata
client.delete_collection(sys.argv[2])
client.create_collection(
    sys.argv[2], metadata=metadata, configuration={"hnsw": {"space": "l2"}}, embedding_function=None
)
client.close()
"""
