"""Does the index follow, whatever befalls it? Failures that users of comparable systems met, on every backend."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event

import memvault
from memvault import ConflictError, NewChunk, StorageError, StorageLayer
from memvault.errors import VectorIndexError
from memvault.vectors.base import VectorRecord
from memvault.vectors.chroma import ChromaIndex
from tests.conftest import OpenVault
from tests.support import HashingEmbedder, eventually, unit_vectors
from tests.vectors.chroma_servers import ChromaServer, Relay

BACKENDS = (
    ("sqlite", "exact"),
    ("sqlite", "chroma"),
    ("sqlite", "chroma-server"),
    ("sqlite", "sqlite-vec"),
    ("postgres", "exact"),
    ("postgres", "chroma-server"),
    ("postgres", "pgvector"),
)

DIMENSION = 8
SOAK = bool(os.environ.get("MEMVAULT_SOAK"))


def ids(layer: StorageLayer, query: Any, k: int = 10, user: str = "alice") -> list[str]:
    if isinstance(query, str):
        return [hit.chunk.id for hit in layer.for_user(user).search(query, k=k)]
    return [hit.chunk.id for hit in layer.for_user(user).search(embedding=query, k=k)]


def memory(number: int) -> str:
    """A text that resembles no other: its words are those of a hash."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return " ".join(["memory", *(digest[place : place + 6] for place in range(0, 36, 6))])


def index_alone(layer: StorageLayer) -> dict[str, str]:
    """Whose is what, in the index itself."""
    index = layer._reach.acquire(now=True)
    assert index is not None
    return {record.id: record.user_id for some in index.scan() for record in some}


def test_an_erased_user_is_gone_from_the_index_too(
    bare_storage: StorageLayer, database_name: str, index_name: str
) -> None:
    # Half a millisecond each for Chroma, more for a graph in PostgreSQL or behind a network.
    quick = database_name == "sqlite" and index_name in ("exact", "sqlite-vec")
    count = 25_000 if SOAK or quick else 2_000
    alice, bob = bare_storage.for_user("alice"), bare_storage.for_user("bob")
    bob.chunks.add_many(
        NewChunk("his", id=f"his {n}", embedding=v) for n, v in enumerate(unit_vectors(20, DIMENSION, 1))
    )
    vectors = np.random.default_rng(7).normal(size=(count, DIMENSION)).astype(np.float32)
    alice.chunks.add_many(NewChunk("hers", embedding=vector) for vector in vectors)
    report = bare_storage.erase_user("alice")
    assert report.counts["memory_chunks"] == report.counts["memory_vectors"] == count
    assert report.owed == 0
    assert index_alone(bare_storage) == {f"his {n}": "bob" for n in range(20)}
    assert ids(bare_storage, vectors[0]) == []
    assert len(ids(bare_storage, vectors[0], 50, "bob")) == 20


@pytest.mark.parametrize("indexing", ["manual", "inline"])
def test_only_the_new_content_is_found(open_vault: OpenVault, index_name: str, indexing: str) -> None:
    layer = open_vault(exact_limit=20_000 if index_name == "exact" else 0, indexing="inline")
    alice = layer.for_user("alice")
    for number in range(30):
        alice.chunks.add(f"filler of number {number}")
    chunk = alice.chunks.add("likes hazelnut cake")
    layer.close()
    layer = open_vault(exact_limit=20_000 if index_name == "exact" else 0, indexing=indexing)
    alice = layer.for_user("alice")
    alice.chunks.update(chunk.id, content="plays chess on sundays")
    for _ in range(2):  # before the index has caught up, and after
        [new] = alice.search("plays chess on sundays", k=1)
        assert (new.chunk.id, round(new.similarity or 0, 5)) == (chunk.id, 1.0)
        old = {hit.chunk.id: hit for hit in alice.search("likes hazelnut cake", k=50)}
        assert old[chunk.id].chunk.content == "plays chess on sundays"
        assert (old[chunk.id].similarity or 0) < 0.5
        layer.sync()
    assert layer.health()["debts"] == 0


def test_churn_leaves_neither_doubles_nor_rests(bare_storage: StorageLayer, index_name: str) -> None:
    # An update takes milliseconds, most of them SQLAlchemy's.
    count = 1_000 if SOAK else 120 if index_name == "chroma" else 25
    alice = bare_storage.for_user("alice")
    names = [f"mem {number}" for number in range(count)]
    alice.chunks.add_many(
        NewChunk("first", id=name, embedding=vector)
        for name, vector in zip(names, unit_vectors(count, DIMENSION, 99), strict=True)
    )
    for turn in range(10):
        vectors = unit_vectors(count, DIMENSION, seed=turn)
        with alice.transaction() as tx:
            for name, vector in zip(names, vectors, strict=True):
                tx.chunks.update(name, embedding=vector)
    bare_storage.sync()
    assert bare_storage.health()["debts"] == 0
    assert index_alone(bare_storage) == dict.fromkeys(names, "alice")
    assert bare_storage.stats()["index_records"] == count
    index = bare_storage._reach.acquire(now=True)
    assert index is not None
    held = {record.id: record.vector for some in index.scan() for record in some}
    assert np.allclose(np.array([held[name] for name in names]), vectors, atol=1e-5)


def test_the_second_of_two_updates_from_one_version_is_refused(storage: StorageLayer) -> None:
    alice = storage.for_user("alice")
    chunk = alice.chunks.add("version one")
    outcomes: list[str] = []

    def update(name: str) -> None:
        try:
            alice.chunks.update(chunk.id, content=f"by {name}", expected_version=1)
            outcomes.append(name)
        except ConflictError:
            outcomes.append("refused")

    threads = [threading.Thread(target=update, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [name for name in outcomes if name != "refused"]
    assert outcomes.count("refused") == 2
    stored = alice.chunks.get(chunk.id)
    assert stored is not None
    assert (stored.content, stored.version) == (f"by {winner}", 2)
    assert ids(storage, f"by {winner}", 1) == [chunk.id]


# A second process.

ELSEWHERE = """
import sys
from memvault import StorageLayer
from tests.support import HashingEmbedder

url, vectors = sys.argv[1:]
with StorageLayer.open(url, vectors=vectors, embedder=HashingEmbedder(), schema="check") as layer:
    alice = layer.for_user("alice")
    print("open", flush=True)
    for line in sys.stdin:
        verb, id, *content = line.split(maxsplit=2)
        if verb == "add":
            alice.chunks.add(content[0].strip(), id=id)
        elif verb == "update":
            alice.chunks.update(id, content=content[0].strip())
        else:
            alice.chunks.delete(id)
        print("done", flush=True)
"""


def test_what_another_process_writes_is_found_at_once(
    open_vault: OpenVault, database_url: str, vectors: str, index_name: str
) -> None:
    layer = open_vault(exact_limit=20_000 if index_name == "exact" else 0)
    layer.for_user("alice").chunks.add("was there before", id="before")
    other = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, database_url, vectors],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(memvault.__file__).parents[1],
    )  # fmt: skip
    assert other.stdin is not None
    assert other.stdout is not None
    with other:
        assert other.stdout.readline() == "open\n"

        def told(line: str) -> None:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(f"{line}\n")
            other.stdin.flush()
            assert other.stdout.readline() == "done\n"

        for number in range(5):
            told(f"add new{number} something new of number {number}")
            assert ids(layer, f"something new of number {number}", 1) == [f"new{number}"]
        told("update new1 quite another matter")
        assert ids(layer, "quite another matter", 1) == ["new1"]
        assert "new1" not in ids(layer, "something new of number", 4)
        told("delete new1")
        assert "new1" not in ids(layer, "quite another matter", 50)
        assert set(ids(layer, "something", 50)) == {"before", "new0", "new2", "new3", "new4"}
        other.stdin.close()
    assert other.returncode == 0
    eventually(lambda: layer.health()["debts"] == 0)


# The index fails.


class FailingChroma(ChromaIndex):
    """Chroma, whose third write from now on fails."""

    until_failure = -1

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        self.until_failure -= 1
        if self.until_failure == 0:
            raise VectorIndexError("not this one")
        super().upsert(records)


def test_the_index_raises_on_the_third_of_five_writes(vault_path: Path, tmp_path: Path) -> None:
    index = FailingChroma(tmp_path / "chroma", location="failing")
    with StorageLayer.open(
        f"sqlite:///{vault_path}", vectors=index, embedder=HashingEmbedder(), exact_limit=0, indexing="manual"
    ) as layer:
        alice = layer.for_user("alice")
        seen_debts = []
        index.until_failure = 3
        for number in range(5):
            chunk = alice.chunks.add(memory(number))
            layer.sync()
            seen_debts.append(layer.health()["debts"])
            assert ids(layer, memory(number), 1) == [chunk.id]
        # Sync has found that the index is there again, and that it refused this one, which it tries again next time.
        assert seen_debts == [0, 0, 1, 0, 0]
        assert len(ids(layer, "memory", 10)) == 5
        assert layer.stats()["index_records"] == 5


def test_what_the_index_refuses_for_ever_hinders_nothing_else(vault_path: Path, tmp_path: Path) -> None:
    class Choosy(ChromaIndex):
        def upsert(self, records: Sequence[VectorRecord]) -> None:
            if any("poison" in record.document for record in records):
                raise VectorIndexError("it does not agree with me")
            super().upsert(records)

    with StorageLayer.open(
        f"sqlite:///{vault_path}", vectors=Choosy(tmp_path / "chroma", location="choosy"),
        embedder=HashingEmbedder(), exact_limit=0, indexing="background",
    ) as layer:  # fmt: skip
        alice = layer.for_user("alice")
        alice.chunks.add_many(
            NewChunk(f"poison {memory(number)}" if number % 300 == 7 else memory(number)) for number in range(1000)
        )
        eventually(lambda: layer.health()["debts"] == 4)
        health = layer.health()
        assert "does not agree" in health["last_error"]
        assert health["oldest_debt_s"] > 0
        chunk = alice.chunks.add("written later")
        eventually(lambda: layer.health()["debts"] == 4)
        assert ids(layer, "written later", 1) == [chunk.id]
        for number in (7, 307, 607, 907):
            assert alice.search(f"poison {memory(number)}", k=1)[0].chunk.content == f"poison {memory(number)}"
        report = layer.sync()
        assert (report.paid, report.failed, report.owed) == (0, 4, 4)
        assert layer.stats()["index_records"] == 997


# The server goes away.

INDEX_WAIT_S = 0.5


@pytest.fixture
def server() -> Iterator[ChromaServer]:
    server = ChromaServer()
    yield server
    server.close()


class Service:
    """Adds and searches without a pause, and holds every answer against what it was acknowledged."""

    def __init__(self, layer: StorageLayer) -> None:
        self.acknowledged: list[str] = []
        self.longest_add_s = 0.0
        self.failures: list[BaseException] = []
        self._layer = layer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        alice = self._layer.for_user("alice")
        try:
            while not self._stop.is_set():
                text = memory(len(self.acknowledged))
                began = time.monotonic()
                chunk = alice.chunks.add(text)
                self.longest_add_s = max(self.longest_add_s, time.monotonic() - began)
                self.acknowledged.append(chunk.id)
                assert ids(self._layer, text, 1) == [chunk.id]
                time.sleep(0.01)
        except BaseException as error:  # noqa: BLE001 - told by `end`
            self.failures.append(error)

    def goes_on(self, writes: int = 5) -> None:
        """Wait until it has written so many more."""
        target = len(self.acknowledged) + writes
        eventually(lambda: len(self.acknowledged) >= target or bool(self.failures))
        assert not self.failures, self.failures

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self.failures, self.failures


def terminated(server: ChromaServer) -> Callable[[], None]:
    assert server._process is not None
    server._process.send_signal(signal.SIGTERM)
    server._process.wait(30)
    server.stop()
    return server.start


def frozen(server: ChromaServer) -> Callable[[], None]:
    assert server._process is not None
    process = server._process
    process.send_signal(signal.SIGSTOP)
    return lambda: process.send_signal(signal.SIGCONT)


def emptied(server: ChromaServer) -> Callable[[], None]:
    server.stop()
    server.forget()

    return server.start


@pytest.mark.parametrize("going_away", [terminated, frozen, emptied], ids=lambda function: function.__name__)
def test_the_server_goes_away_and_comes_back(
    server: ChromaServer, vault_path: Path, going_away: Callable[[ChromaServer], Callable[[], None]]
) -> None:
    with StorageLayer.open(
        f"sqlite:///{vault_path}", vectors=f"{server.url}?timeout=3", embedder=HashingEmbedder(),
        exact_limit=5, index_wait=INDEX_WAIT_S,
    ) as layer:  # fmt: skip
        service = Service(layer)
        try:
            service.goes_on(20)
            come_back = going_away(server)
            service.goes_on(20)
            assert layer.health()["ok"]
            assert layer.health()["debts"] > 0
            assert layer.health()["last_error"]
            come_back()
            service.goes_on(5)
        finally:
            service.end()
        assert service.longest_add_s < INDEX_WAIT_S + 1.0
        eventually(lambda: layer.sync().owed == 0)
        assert index_alone(layer) == dict.fromkeys(service.acknowledged, "alice")
        assert set(ids(layer, "memory", 10_000)) == set(service.acknowledged)


def test_connections_are_reset_now_and_then(chroma_server: ChromaServer, vault_path: Path) -> None:
    relay = Relay(chroma_server)
    count = 0

    def every_third(_: object) -> bytes | None:
        nonlocal count
        count += 1
        return b"" if count % 3 == 0 else None

    try:
        url = f"{relay.url}?database={chroma_server.new_database()}"
        with StorageLayer.open(
            f"sqlite:///{vault_path}", vectors=url, embedder=HashingEmbedder(), exact_limit=5, index_wait=INDEX_WAIT_S
        ) as layer:
            relay.answer = every_third
            service = Service(layer)
            try:
                service.goes_on(60)
            finally:
                service.end()
            assert service.longest_add_s < INDEX_WAIT_S + 1.0
            relay.answer = lambda _: None
            eventually(lambda: layer.sync().owed == 0)
            assert index_alone(layer) == dict.fromkeys(service.acknowledged, "alice")
    finally:
        relay.close()


# Chroma's own process goes away.


def child_pid(layer: StorageLayer) -> int | None:
    index = layer._reach.index
    assert isinstance(index, ChromaIndex)
    return index.child_pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
def test_the_process_of_chroma_goes_away(
    vault_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memvault.vectors.chroma_process.QUICK_S", 2.0)
    monkeypatch.setattr("memvault.vectors.chroma_process.SLOW_S", 2.0)
    with StorageLayer.open(
        f"sqlite:///{vault_path}", vectors="chroma", embedder=HashingEmbedder(), exact_limit=5, index_wait=INDEX_WAIT_S
    ) as layer:
        service = Service(layer)
        try:
            pids: set[int | None] = set()
            for _ in range(2):
                service.goes_on(20)
                eventually(lambda: child_pid(layer) not in (None, *pids))
                pids.add(pid := child_pid(layer))
                assert pid is not None
                os.kill(pid, number)
                service.goes_on(10)
        finally:
            service.end()
        assert service.longest_add_s < INDEX_WAIT_S + 1.0
        eventually(lambda: layer.sync().owed == 0)
        assert index_alone(layer) == dict.fromkeys(service.acknowledged, "alice")
        assert set(ids(layer, "memory", 10_000)) == set(service.acknowledged)


# The disk is full.


@pytest.mark.parametrize("vectors", ["exact", "chroma", "sqlite-vec"])
def test_the_disk_is_full(vault_path: Path, vectors: str) -> None:
    with StorageLayer.open(f"sqlite:///{vault_path}", vectors=vectors, embedder=HashingEmbedder()) as layer:
        alice = layer.for_user("alice")
        acknowledged = [alice.chunks.add("the first of all").id]
        limit = {"pages": 0}

        @event.listens_for(layer.engine, "checkout")
        def restrict(connection: Any, *_: object) -> None:
            cursor = connection.cursor()
            pages = cursor.execute("PRAGMA page_count").fetchone()[0]
            limit["pages"] = limit["pages"] or pages + 60
            cursor.execute(f"PRAGMA max_page_count = {limit['pages']}")
            cursor.close()

        with pytest.raises(StorageError, match="full"):
            for number in range(10_000):
                acknowledged.append(alice.chunks.add(f"memory {number} " + "x" * 2000).id)
        with pytest.raises(StorageError, match="full"):
            alice.chunks.add_many(NewChunk(f"batch {number} " + "y" * 2000) for number in range(500))
        assert len(acknowledged) > 3
        assert {chunk.id for chunk in alice.chunks.get_many(acknowledged)} == set(acknowledged)
        assert set(ids(layer, "memory", 10_000)) == set(acknowledged)
        assert alice.chunks.count() == len(acknowledged)
        limit["pages"] = 1_000_000
        acknowledged.append(alice.chunks.add("there is room again").id)
        assert ids(layer, "there is room again", 1) == acknowledged[-1:]
        layer.sync()
        assert layer.health()["debts"] == 0
        assert set(index_alone(layer)) == set(acknowledged)
