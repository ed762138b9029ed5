"""What becomes of the index when the process that Chroma runs in crashes, hangs, or outlives its owner?"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import memvault
from memvault.errors import IndexOwnershipError, VectorIndexError
from memvault.vectors import chroma_process
from memvault.vectors.chroma import ChromaIndex
from tests.support import eventually
from tests.vectors.test_chroma import make_raw, opened, raw_client
from tests.vectors.worlds import SPEC, ChromaWorld, direction, make_record, make_records


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "chroma"


@pytest.fixture
def world(directory: Path) -> Iterator[ChromaWorld]:
    world = ChromaWorld(directory)
    yield world
    world.close()


def child_of(world: ChromaWorld) -> psutil.Process:
    assert isinstance(world.index, ChromaIndex)
    pid = world.index.child_pid
    assert pid is not None
    return psutil.Process(pid)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def reopened(world: ChromaWorld) -> bool:
    """Open again what failed; whether it is doubted."""
    assert isinstance(world.index, ChromaIndex)
    assert world.index.open(SPEC)
    if world.index.doubt is not None:
        assert set(world.index.doubt.listed) == set(world.records)
        assert world.index.doubt.unfindable == []
    return world.index.doubt is not None


def test_a_child_that_is_killed_is_an_error_and_can_be_replaced(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(30))
    first = child_of(world)
    first.kill()
    eventually(lambda: gone(first))
    for _ in range(2):
        with pytest.raises(VectorIndexError, match="was ended by signal 9"):
            world.index.query("user_alice", direction(), 5)
    with pytest.raises(IndexOwnershipError):  # it stays the owner
        ChromaIndex(directory).open(SPEC)
    assert reopened(world)
    assert child_of(world).pid != first.pid
    world.check("user_alice", direction(), 50)
    world.put(make_records(40))
    world.check("user_alice", direction(), 50)


def test_one_that_was_closed_in_good_order_is_not_doubted(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(3))
    assert Path(f"{directory}.child").read_text() == f"{child_of(world).pid}\n"
    world.index.close()
    assert not Path(f"{directory}.child").exists()
    assert not reopened(world)
    assert not reopened(world)  # nor one that is open


def test_a_child_that_hangs_is_ended(world: ChromaWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(make_records(30))
    hung = child_of(world)
    monkeypatch.setattr(chroma_process, "QUICK_S", 0.3)
    hung.suspend()
    with pytest.raises(VectorIndexError, match=r"did not answer within 0\.3 s, and was ended"):
        world.index.query("user_alice", direction(), 5)
    monkeypatch.undo()
    assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE
    assert reopened(world)
    world.check("user_alice", direction(), 50)


def test_who_waits_for_a_child_that_hangs_waits_in_bounds(world: ChromaWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(make_records(30))
    hung = child_of(world)
    hung.suspend()

    def write() -> None:
        with pytest.raises(VectorIndexError):
            world.index.upsert(make_records(1))

    writing = threading.Thread(target=write)
    writing.start()
    monkeypatch.setattr(chroma_process, "QUICK_S", 0.2)
    with pytest.raises(VectorIndexError, match=r"(was busy for|did not answer within) 0\.2 s"):
        world.index.query("user_alice", direction(), 5)
    with suppress(psutil.NoSuchProcess):  # whoever of the two came first has ended it
        hung.kill()
    writing.join(60)
    assert not writing.is_alive()


def test_a_large_message_to_a_child_that_hangs_is_given_up(world: ChromaWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = child_of(world)
    hung.suspend()
    monkeypatch.setattr(chroma_process, "SLOW_S", 0.3)
    text = "x" * (4 << 20)  # more than a socket holds
    with pytest.raises(VectorIndexError, match="did not answer"):
        world.index.upsert([make_record("mem_1", direction(), document=text)])


def test_the_words_of_a_child_that_crashed_are_passed_on(world: ChromaWorld) -> None:
    child_of(world).send_signal(signal.SIGSEGV)
    with pytest.raises(VectorIndexError, match=f"was ended by signal {int(signal.SIGSEGV)}"):
        world.index.count()


def test_signals_to_the_services_group_do_not_end_the_child(world: ChromaWorld) -> None:
    child = child_of(world)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        child.send_signal(number)
    world.put(make_records(10))
    world.check("user_alice", direction(), 20)
    assert os.getsid(child.pid) != os.getsid(0)


def test_a_child_is_kept_for_the_next_directory(tmp_path: Path) -> None:
    pids = set()
    for name in ("first", "second", "first"):
        with opened(tmp_path / name) as index:
            index.upsert(make_records(5))
            pids.add(index.child_pid)
            assert index.count() == 5
    assert len(pids) == 1


def test_two_directories_have_two_children(tmp_path: Path) -> None:
    with opened(tmp_path / "first") as first, opened(tmp_path / "second") as second:
        assert first.child_pid != second.child_pid
        first.upsert(make_records(5))
        assert second.count() == 0


# What was left behind.


def leave_open(world: ChromaWorld) -> None:
    """As if service and child had been killed at once."""
    child = child_of(world)
    child.kill()
    eventually(lambda: gone(child))


def test_what_does_not_answer_is_removed_as_if_nothing_had_been_there(
    world: ChromaWorld, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("memvault.vectors.chroma_collection.SYNC_THRESHOLD", 100)  # so that the graph is on the disk
    world.purge()
    world.index.create()
    world.put(make_records(300))
    leave_open(world)
    [graph] = [path for path in directory.iterdir() if path.is_dir()]
    for path in graph.iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    with caplog.at_level(logging.WARNING, logger="memvault.index"):
        assert not world.index.open(SPEC)
    assert "is made anew from SQL" in caplog.text
    assert not directory.exists()
    world.records.clear()
    world.index.create()
    world.put(make_records(20))
    world.check("user_alice", direction(), 50)
    world.index.close()
    assert not reopened(world)


def test_a_database_that_is_none_is_removed_where_it_was_left_open(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(10))
    leave_open(world)
    (directory / "chroma.sqlite3").write_bytes(b"nonsense" * 1000)
    assert not world.index.open(SPEC)
    world.records.clear()
    world.index.create()
    world.put(make_records(5))
    world.check("user_alice", direction(), 20)


def test_a_directory_with_others_collections_is_not_removed(
    world: ChromaWorld, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memvault.vectors.chroma_collection.SYNC_THRESHOLD", 100)
    world.purge()
    with raw_client(directory) as client:
        client.create_collection("thesis", embedding_function=None)
    assert not world.index.open(SPEC)
    world.index.create()
    world.put(make_records(300))
    leave_open(world)
    for path in directory.rglob("*.bin"):
        path.write_bytes(b"\xff" * path.stat().st_size)
    for _ in range(2):
        with pytest.raises(VectorIndexError, match="other collections, too: thesis"):
            world.index.open(SPEC)
    with raw_client(directory) as client:
        assert client.get_collection("thesis", embedding_function=None).count() == 0


def test_another_models_collection_is_refused_and_not_removed(world: ChromaWorld, directory: Path) -> None:
    world.purge()
    make_raw(directory, "l2", None)
    Path(f"{directory}.child").write_text("4711\n")
    with pytest.raises(VectorIndexError, match="space 'l2'"):
        world.index.open(SPEC)
    assert (directory / "chroma.sqlite3").exists()


def test_a_directory_that_vanished_is_not_doubted(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(10))
    leave_open(world)
    shutil.rmtree(directory)
    assert not world.index.open(SPEC)
    world.records.clear()
    world.index.create()
    world.index.close()
    assert not reopened(world)


# Who goes when.

OWNER = """
import json, sys, threading
from pathlib import Path
from memvault.vectors.chroma import ChromaIndex
from tests.vectors.worlds import SPEC, make_records

index = ChromaIndex(Path(sys.argv[1]))
if not index.open(SPEC):
    index.create()
index.upsert(make_records(20))
print(json.dumps(index.child_pid), flush=True)
if sys.argv[2] == "writes":
    threading.Thread(target=index.upsert, args=(make_records(1500, seed=3),)).start()
sys.stdin.read()
"""


@contextmanager
def owner(directory: Path, doing: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory), doing],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(memvault.__file__).parents[1],
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        try:
            yield process, psutil.Process(json.loads(process.stdout.readline()))
        finally:
            process.kill()


@pytest.mark.parametrize("doing", ["waits", "writes"])
def test_a_killed_owners_child_ends_in_good_order(directory: Path, doing: str) -> None:
    with owner(directory, doing) as (process, child):
        process.kill()
        process.wait(30)
        with opened(directory) as index:  # it waits for the child to let go
            assert index.doubt is None
            assert index.count() in (20, 1500)
            assert len(index.query("user_alice", direction(), 2000)) == index.count()
        eventually(lambda: gone(child))


def test_while_a_dead_owners_child_hangs_nobody_else_touches_the_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner(directory, "waits") as (process, child):
        child.suspend()
        process.kill()
        process.wait(30)
        index = ChromaIndex(directory)
        for wait_s in (1, 0.1):
            monkeypatch.setattr(chroma_process, "LOCK_WAIT_S", wait_s)
            with pytest.raises(VectorIndexError, match="could not be opened"):
                index.open(SPEC)
        assert (directory / "chroma.sqlite3").exists()
        monkeypatch.undo()
        child.resume()
        eventually(lambda: gone(child))
        assert index.open(SPEC)
        assert index.count() == 20
        index.close()


def test_an_owner_that_ends_without_closing_leaves_no_child(directory: Path) -> None:
    with owner(directory, "waits") as (process, child):
        process.communicate()
        assert process.returncode == 0
        eventually(lambda: gone(child))
    with opened(directory) as index:
        assert index.count() == 20
