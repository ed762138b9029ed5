"""Does a vault that was opened before a fork work in both processes? By os.fork, and behind a preloading gunicorn."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import memvault
from tests.support import eventually

BACKENDS = (
    ("sqlite", "exact"),
    ("sqlite", "chroma"),
    ("sqlite", "chroma-server"),
    ("sqlite", "sqlite-vec"),
    ("postgres", "exact"),
    ("postgres", "pgvector"),
)

ROOT = Path(memvault.__file__).parents[1]

FORKING = """
import json, os, sys, threading, time
from memvault import StorageLayer

def check(done, what):
    if not done:
        raise SystemExit(f"{os.getpid()}: {what}")

def found(layer, content):
    return content in [hit.chunk.content for hit in layer.for_user("alice").search(content, k=3)]

def work(layer, name):
    for number in range(5):
        layer.for_user("alice").chunks.add(f"{name} number {number}")
        check(found(layer, f"{name} number {number}"), f"{name} {number} is not found")

layer = StorageLayer.open(sys.argv[1], vectors=sys.argv[2], schema="upgrade", exact_limit=int(sys.argv[3]))
work(layer, "before")
stop = threading.Event()
failures = []

def write_on():
    number = 0
    try:
        while not stop.is_set():
            number += 1
            layer.for_user("bob").chunks.add(f"meanwhile {number}")
            layer.for_user("bob").search("meanwhile", k=2)
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=write_on) for _ in range(2)]
for thread in threads:
    thread.start()
children = []
for name in ("first", "second"):
    time.sleep(0.2)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(layer, name)
            check(found(layer, "before number 3"), "what was there before the fork is not found")
            layer.close()
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    children.append((name, pid))
    work(layer, f"beside {name}")
for name, pid in children:
    check(os.waitpid(pid, 0)[1] == 0, f"the {name} child failed")
stop.set()
for thread in threads:
    thread.join()
check(not failures, failures)
for name, _ in children:
    for number in range(5):
        check(found(layer, f"{name} number {number}"), f"what the {name} child wrote is not found")
deadline = time.monotonic() + 60
while layer.health()["debts"] and time.monotonic() < deadline:
    time.sleep(0.05)
health, stats = layer.health(), layer.stats()
records, vectors = stats["index_records"], stats["vectors"]
print(json.dumps({"health": health, "pid": os.getpid(), "records": records, "vectors": vectors}))
layer.close()
"""


def run(script: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("exact_limit", [20_000, 0])
def test_both_go_on(database_url: str, vectors: str, exact_limit: int) -> None:
    after = run(FORKING, database_url, vectors, str(exact_limit))
    assert after["health"]["ok"]
    assert after["health"]["debts"] == 0
    assert after["records"] == after["vectors"] >= 25
    if vectors.endswith("chroma"):
        assert after["health"]["index_owner_pid"] == after["pid"]


INHERITING = """
import os, sys, time
from memvault import StorageLayer

layer = StorageLayer.open(sys.argv[1], vectors="chroma", exact_limit=0)
layer.for_user("alice").chunks.add("likes tea")
if os.fork() == 0:
    try:
        os.close(1)
        time.sleep(0.2)
        layer.for_user("alice").chunks.add("plays chess")
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline:
            health = layer.health()
            if health["index_owner_pid"] == os.getpid() and not health["debts"]:
                break
            time.sleep(0.05)
        hits = layer.for_user("alice").search("plays chess")
        print([hit.chunk.content for hit in hits], hits[0].explain()["tier"], file=sys.stderr, flush=True)
        layer.close()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    os._exit(0)
if sys.argv[2] == "closes":
    layer.close()
os._exit(0)
"""


@pytest.mark.parametrize("ending", ["closes", "dies"])
def test_the_child_takes_over_when_its_parent_is_gone(vault_path: Path, ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INHERITING, f"sqlite:///{vault_path}", ending],
        capture_output=True, text=True, timeout=100, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == "['plays chess', 'likes tea'] index"


PRIVATE = """
import os
from memvault import StorageLayer

layer = StorageLayer.open(":memory:", vectors="exact")
layer.for_user("alice").chunks.add("likes tea")
pid = os.fork()
if pid == 0:
    layer.for_user("alice").chunks.add("plays chess")
    raise SystemExit  # which runs what is to be run at exit, as a worker of gunicorn's does
assert os.waitpid(pid, 0)[1] == 0
assert [hit.chunk.content for hit in layer.for_user("alice").search("chess")][0] == "plays chess"
folder = os.path.dirname(layer.engine.url.database)
assert os.path.exists(folder)
layer.close()
assert not os.path.exists(folder)
print('{}')
"""


def test_a_private_file_outlives_the_child() -> None:
    run(PRIVATE)


SERVICE = """
import json
import os
from urllib.parse import parse_qs

from memvault import StorageLayer

storage = StorageLayer.from_env()


def app(environ, start_response):
    query = parse_qs(environ["QUERY_STRING"])
    alice = storage.for_user("alice")
    if environ["PATH_INFO"] == "/add":
        answer = alice.chunks.add(query["text"][0]).id
    elif environ["PATH_INFO"] == "/search":
        answer = [hit.chunk.content for hit in alice.search(query["text"][0], k=3)]
    else:
        answer = storage.health()
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps({"pid": os.getpid(), "answer": answer}).encode()]
"""


@contextmanager
def gunicorn(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Two workers, forked from a process that has opened the vault."""
    (folder / "service.py").write_text(SERVICE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "2", "--bind", f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        [*command, "service:app"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stderr=(folder / "log").open("w"),
    )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: process.poll() is None and _answers(url))
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        ask(url)
    except OSError:
        return False
    return True


def ask(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def four_at_once(url: str) -> set[int]:
    """The workers that answer."""
    with ThreadPoolExecutor(4) as clients:
        return {answer["pid"] for answer in clients.map(ask, [url] * 4)}


@pytest.mark.parametrize("vectors", ["chroma", "sqlite-vec"])
def test_behind_gunicorn_with_preload(tmp_path: Path, vault_path: Path, vectors: str) -> None:
    environment = {"MEMVAULT_DATABASE_URL": f"sqlite:///{vault_path}", "MEMVAULT_VECTORS": vectors}
    with memvault.StorageLayer.open(environment["MEMVAULT_DATABASE_URL"], vectors=vectors) as layer:
        layer.for_user("alice").chunks.add("written before the workers were forked")
    with gunicorn(tmp_path, environment) as url:
        workers: set[int] = set()
        for number in range(30):
            workers.add(ask(f"{url}/add?text=number+{number}")["pid"])
            answer = ask(f"{url}/search?text=number+{number}")
            workers.add(answer["pid"])
            assert f"number {number}" in answer["answer"]

        def both_have_answered() -> bool:
            workers.update(four_at_once(url))
            return len(workers) == 2

        eventually(both_have_answered)  # which worker takes a connection is the kernel's choice
        assert "written before the workers were forked" in ask(f"{url}/search?text=forked+workers")["answer"]
        if vectors == "chroma":
            eventually(lambda: ask(url)["answer"]["debts"] == 0)
            # The process that preloaded it is the owner: it pays for its workers.
            assert ask(url)["answer"]["index_owner_pid"] not in workers
