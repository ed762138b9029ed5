"""What does the Chroma index leave on the disk, what does it refuse, and who may have it open?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import chromadb
import pytest
from chromadb.api.models.Collection import Collection

import memvault
from memvault.errors import (
    ConfigurationError,
    IndexMismatchError,
    IndexOwnershipError,
    MissingDependencyError,
    VectorIndexError,
)
from memvault.filters import F, Filter
from memvault.vectors.base import IndexSpec
from memvault.vectors.chroma import ChromaIndex
from memvault.vectors.chroma_collection import chroma_errors
from tests.vectors.worlds import DIMENSION, NOON, SPEC, ChromaWorld, direction, make_record, make_records

NAME = f"memvault_{SPEC.vault_id}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "chroma"


@pytest.fixture
def world(directory: Path) -> Iterator[ChromaWorld]:
    world = ChromaWorld(directory)
    yield world
    world.close()


@contextmanager
def raw_client(directory: Path) -> Iterator[Any]:
    """Chroma by itself, as any script would open the directory."""
    client: Any = chromadb.PersistentClient(str(directory), chromadb.config.Settings(anonymized_telemetry=False))
    try:
        yield client
    finally:
        client.close()


@contextmanager
def raw_collection(directory: Path, name: str = NAME) -> Iterator[Collection]:
    with raw_client(directory) as client:
        yield client.get_collection(name, embedding_function=None)


def make_raw(directory: Path, space: str = "cosine", metadata: dict[str, Any] | None = None) -> None:
    with raw_client(directory) as client:
        client.create_collection(
            NAME, configuration={"hnsw": {"space": space}}, metadata=metadata, embedding_function=None
        )


@contextmanager
def opened(directory: Path, spec: IndexSpec = SPEC) -> Iterator[ChromaIndex]:
    index = ChromaIndex(directory)
    try:
        if not index.open(spec):
            index.create()
        yield index
    finally:
        index.close()


# What lies in the directory.


def test_layout(world: ChromaWorld, directory: Path) -> None:
    east = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    world.put(make_records(30))
    world.put(
        [
            make_record(
                "mem_odd", direction(), 'u"1', document="Prefers\nÄ", session_id="sess_9", memory_type="semantic",
                importance=1, compressed=True, created_at=east,
            )
        ]
    )  # fmt: skip
    world.index.close()
    with raw_collection(directory) as collection:
        assert collection.metadata == {"vault_id": SPEC.vault_id, "model": SPEC.model, "dimension": DIMENSION}
        assert collection.configuration_json["hnsw"]["space"] == "cosine"
        everything = collection.get(include=["metadatas", "documents"])
        metadatas, documents = everything["metadatas"], everything["documents"]
        assert metadatas is not None
        assert documents is not None
        kinds = {
            "user_id": str, "session_id": str, "memory_type": str, "importance": float, "compressed": bool,
            "created_at": str, "created_us": int,
        }  # fmt: skip
        assert len(metadatas) == 31
        for metadata in metadatas:
            assert {name: type(value) for name, value in metadata.items()} == kinds
        assert set(documents) == {record.document for record in world.records.values()}
        odd = collection.get(ids=["mem_odd"], include=["metadatas", "documents"])
        assert odd["documents"] == ["Prefers\nÄ"]
        assert odd["metadatas"] == [
            {
                "user_id": 'u"1', "session_id": "sess_9", "memory_type": "semantic", "importance": 1.0,
                "compressed": True, "created_at": "2026-01-01T21:34:05.678901+00:00",
                "created_us": 1767303245678901,
            }
        ]  # fmt: skip


def test_no_stale_key_and_no_stale_text_after_an_overwrite(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(20))
    changed = make_record("mem_3", direction(), document="changed", importance=0.9, compressed=True)
    world.put([changed])
    world.index.close()
    with raw_collection(directory) as collection:
        answer = collection.get(ids=["mem_3"], include=["metadatas", "documents"])
        assert answer["documents"] == ["changed"]
        assert answer["metadatas"] is not None
        assert len(answer["metadatas"][0]) == 7
        assert answer["metadatas"][0]["importance"] == 0.9
        assert collection.get(where_document={"$contains": "remembers 3"}, include=[])["ids"] == []


def test_chroma_itself_can_query_it(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(40))
    world.put([make_record("mem_old", direction(), compressed=True), make_record("mem_bob", direction(), "user_bob")])
    expected = world.check("user_alice", direction(), 5, F.compressed == False)  # noqa: E712
    world.index.close()
    with raw_collection(directory) as collection:
        answer = collection.query(
            query_embeddings=[direction().tolist()],
            n_results=5,
            where={"$and": [{"user_id": "user_alice"}, {"compressed": False}]},
        )
    assert answer["ids"] == [[match.id for match in expected]]


def test_of_an_id_that_comes_twice_the_last_record_counts(world: ChromaWorld) -> None:
    world.put([make_record("mem_1", direction(1)), make_record("mem_1", direction(2), importance=0.9)])
    assert world.index.count() == 1
    world.check("user_alice", direction(2), 5, F.importance > 0.5)


def test_scan_tells_what_memvault_did_not_write(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(3))
    world.index.close()
    good: dict[str, Any] = {
        "user_id": "user_alice", "session_id": "s", "memory_type": "episodic", "importance": 0.5, "compressed": False,
        "created_at": "2026-03-01T12:00:00+00:00", "created_us": 1772366400000000,
    }  # fmt: skip
    foreign: list[dict[str, Any] | None] = [
        None,
        {"user_id": 7},
        {**good, "extra": 1},
        {name: value for name, value in good.items() if name != "created_us"},
        {**good, "created_us": 1},
        {**good, "created_at": "2026-03-01T12:00:00"},
        {**good, "created_at": "yesterday"},
        {**good, "importance": 1},
        {**good, "compressed": "no"},
    ]
    with raw_collection(directory) as collection:
        collection.add(
            ids=[f"foreign_{place}" for place in range(len(foreign))],
            embeddings=[direction().tolist()] * len(foreign),
            metadatas=foreign,  # type: ignore[arg-type]  # None is taken, whatever the types say
        )
        collection.add(ids=["good"], embeddings=[direction().tolist()], metadatas=[good])
    assert world.index.open(SPEC)
    scanned = {record.id: record for some in world.index.scan() for record in some}
    assert len(scanned) == 4 + len(foreign)
    assert scanned["good"].metadata == make_record("good", direction(), session_id="s", created_at=NOON).metadata
    for place in range(len(foreign)):
        assert scanned[f"foreign_{place}"].metadata is None, foreign[place]
    assert scanned["foreign_0"].user_id == scanned["foreign_1"].user_id == ""
    assert scanned["foreign_2"].user_id == "user_alice"


# What is refused.


@pytest.mark.parametrize(
    ("space", "metadata", "message"),
    [
        ("l2", vars(SPEC), "space 'l2'; expected space 'cosine'"),
        ("ip", vars(SPEC), "space 'ip'; expected space 'cosine'"),
        ("cosine", {**vars(SPEC), "dimension": 384}, "dimension 384; expected dimension 16"),
        ("cosine", {**vars(SPEC), "model": "other"}, "model 'other'; expected model 'tests/random-16'"),
        ("cosine", {**vars(SPEC), "vault_id": "other"}, f"vault_id 'other'; expected vault_id '{SPEC.vault_id}'"),
        ("l2", None, "vault_id None"),
    ],
)
def test_another_collection_of_that_name_is_refused(
    directory: Path, space: str, metadata: dict[str, Any] | None, message: str
) -> None:
    make_raw(directory, space, metadata)
    index = ChromaIndex(directory)
    with pytest.raises(IndexMismatchError) as raised:
        index.open(SPEC)
    assert message in str(raised.value)
    assert NAME in str(raised.value)
    assert str(directory) in str(raised.value)
    assert "memvault reindex" in str(raised.value)
    with pytest.raises(VectorIndexError):
        index.query("user_alice", direction(), 1)
    index.close()
    with raw_client(directory) as client:  # it was left alone
        assert [collection.name for collection in client.list_collections()] == [NAME]


def test_what_was_refused_can_be_purged_and_created(directory: Path) -> None:
    make_raw(directory, "l2", None)
    index = ChromaIndex(directory)
    with pytest.raises(IndexMismatchError):
        index.open(SPEC)
    index.purge()
    assert not directory.exists()
    index.create()
    assert index.count() == 0
    index.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no folder .*absent"):
        ChromaIndex(tmp_path / "absent" / "chroma").open(SPEC)
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_error_says_what_to_install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chromadb", None)
    with pytest.raises(MissingDependencyError, match="pip install chromadb"):
        ChromaIndex(directory).open(SPEC)


def test_a_file_in_the_place_of_the_directory_is_an_error(directory: Path) -> None:
    directory.write_text("")
    index = ChromaIndex(directory)
    assert not index.open(SPEC)
    for _ in range(2):
        with pytest.raises(VectorIndexError, match="could not be opened"):
            index.create()
    directory.unlink()
    index.create()
    index.close()


def test_settings_in_the_working_directory_are_not_ours(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("MIGRATIONS=never\nCHROMA_API_IMPL=none.such\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHROMA_API_IMPL", "chromadb.api.fastapi.FastAPI")
    with opened(directory) as index:
        assert index.count() == 0


def test_the_wrong_dimension_is_chromas_to_refuse(world: ChromaWorld) -> None:
    world.put(make_records(1))
    with pytest.raises(VectorIndexError, match="16") as raised:
        world.index.query("user_alice", direction()[:3], 1)
    assert raised.value.__cause__ is not None


def test_programmer_errors_pass_unchanged() -> None:
    for error in (TypeError("no"), ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), chroma_errors("here", "be tested"):
            raise error


def test_a_panic_of_the_rust_layer_is_an_index_error() -> None:
    panic = type("PanicException", (BaseException,), {})  # of no importable type, and no Exception
    with pytest.raises(VectorIndexError, match="panicked: boom"), chroma_errors("here", "be tested"):
        raise panic("boom")


# What is broken.


def test_a_database_that_is_none_can_be_purged_and_created(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(10))
    world.index.close()
    (directory / "chroma.sqlite3").write_bytes(b"nonsense" * 1000)
    for _ in range(2):
        with pytest.raises(VectorIndexError, match="could not be opened"):
            world.index.open(SPEC)
    world.purge()
    assert not directory.exists()
    world.index.create()
    world.put(make_records(10))
    world.check("user_alice", direction(), 20)


def test_a_lost_graph_is_an_error_not_an_empty_answer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memvault.vectors.chroma_collection.SYNC_THRESHOLD", 100)  # so that it is on the disk
    world = ChromaWorld(directory)
    world.put(make_records(300))
    world.index.close()
    [graph] = [path for path in directory.iterdir() if path.is_dir()]
    for path in graph.iterdir():
        path.unlink()
    assert world.index.open(SPEC)
    with pytest.raises(VectorIndexError):
        world.index.query("user_alice", direction(), 10_000)
    world.purge()
    world.index.create()
    world.put(make_records(10))
    world.check("user_alice", direction(), 20)
    world.close()


def test_where_the_directory_was_deleted_a_new_one_is_created(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(10))
    world.index.close()
    subprocess.run(["rm", "-r", str(directory)], check=True)
    world.records.clear()
    assert not world.index.open(SPEC)
    assert not directory.exists()
    with pytest.raises(VectorIndexError, match="not created"):
        world.index.count()
    world.index.create()
    world.put(make_records(5))
    world.check("user_alice", direction(), 20)


# Who shares the directory.


def test_two_vaults_in_one_directory_do_not_see_each_other(directory: Path) -> None:
    other = replace(SPEC, vault_id="0d2c61a7e944", dimension=8)
    with opened(directory) as index:
        index.upsert(make_records(30))
    with opened(directory, other) as index:
        assert index.count() == 0
        assert list(index.scan()) == []
        index.upsert([make_record("mem_1", direction()[:8])])
        assert [match.id for match in index.query("user_alice", direction()[:8], 50)] == ["mem_1"]
    with opened(directory) as index:
        assert index.count() == 30
        index.purge()
        assert directory.exists()
        index.create()
        assert index.count() == 0
        index.purge()
        index.purge()
    with opened(directory, other) as index:
        assert index.count() == 1
        index.purge()
        assert not directory.exists()


def test_purging_takes_only_what_chroma_made(world: ChromaWorld, directory: Path) -> None:
    world.put(make_records(10))
    (directory / "thesis").mkdir()
    (directory / "thesis" / "final.txt").write_text("mine")
    world.purge()
    assert [path.name for path in directory.iterdir()] == ["thesis"]
    world.index.create()
    world.put(make_records(10))
    world.check("user_alice", direction(), 20)


def test_purging_leaves_nothing_of_the_texts(world: ChromaWorld, directory: Path) -> None:
    world.put([make_record("mem_1", direction(), document="xylophone secret")])
    assert b"xylophone" in (directory / "chroma.sqlite3").read_bytes()
    world.purge()
    for path in directory.parent.rglob("*"):
        assert not path.is_file() or b"xylophone" not in path.read_bytes()


# Who has it open.

OWNER = """
import json, sys
from pathlib import Path
from memvault.errors import IndexOwnershipError
from memvault.vectors.chroma import ChromaIndex
from tests.vectors.worlds import SPEC, make_records

index = ChromaIndex(Path(sys.argv[1]))
try:
    if not index.open(SPEC):
        index.create()
    index.upsert(make_records(20))
    print(json.dumps("ready"), flush=True)
    sys.stdin.read()
    index.close()
except IndexOwnershipError as error:
    print(json.dumps([error.owner_pid, str(error)]), flush=True)
"""


@contextmanager
def another_process(directory: Path) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A process that opens the index and keeps it until its standard input ends; what it said first."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(memvault.__file__).parents[1],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def test_a_second_process_is_told_who_owns_it(world: ChromaWorld, directory: Path) -> None:
    with another_process(directory) as (_, said):
        pid, message = said
    assert pid == os.getpid()
    assert str(os.getpid()) in message
    assert str(directory) in message
    world.put(make_records(10))
    world.check("user_alice", direction(), 20)


def test_the_next_may_open_what_its_owner_closed(directory: Path) -> None:
    index = ChromaIndex(directory)
    with another_process(directory) as (process, said):
        assert said == "ready"
        with pytest.raises(IndexOwnershipError) as raised:
            index.open(SPEC)
        assert raised.value.owner_pid == process.pid
    assert process.returncode == 0
    assert index.open(SPEC)
    assert index.count() == 20
    index.close()
    assert not Path(f"{directory}.owner").exists()


def test_the_next_may_open_what_a_killed_process_owned(directory: Path) -> None:
    with another_process(directory) as (process, _):
        process.kill()
        process.wait(30)
        with opened(directory) as index:
            assert index.count() == 20
            assert len(index.query("user_alice", direction(), 50)) == 20
            with pytest.raises(IndexOwnershipError) as raised:
                ChromaIndex(directory).open(SPEC)
            assert raised.value.owner_pid == os.getpid()  # not the dead one's


def test_a_link_to_the_directory_has_the_same_owner(world: ChromaWorld, directory: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    with pytest.raises(IndexOwnershipError):
        ChromaIndex(link).open(SPEC)


def test_the_owner_stays_the_owner_while_the_directory_comes_and_goes(world: ChromaWorld, directory: Path) -> None:
    for _ in range(2):
        world.purge()
        assert not directory.exists()
        with pytest.raises(IndexOwnershipError):
            ChromaIndex(directory).open(SPEC)
        world.index.create()


def test_an_owner_whose_pid_is_unknown(world: ChromaWorld, directory: Path) -> None:
    Path(f"{directory}.owner").unlink()
    with pytest.raises(IndexOwnershipError, match="another process") as raised:
        ChromaIndex(directory).open(SPEC)
    assert raised.value.owner_pid is None


def test_filters_with_many_parts(world: ChromaWorld) -> None:
    world.put(make_records(60))
    listed = [f"sess_{number}" for number in range(10_000)]
    world.check("user_alice", direction(), 100, F.session_id.in_(listed))
    chain: Filter = F.importance > 2
    for number in range(499):
        chain = chain | (F.created_at == NOON + timedelta(seconds=number))
    world.check("user_alice", direction(), 100, chain)


def test_times_before_the_epoch_and_in_other_zones(world: ChromaWorld) -> None:
    times = [
        datetime(1, 1, 2, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(2026, 7, 1, 1, tzinfo=timezone(timedelta(hours=2))),
        datetime(9999, 12, 30, tzinfo=UTC),
    ]
    world.put([make_record(f"mem_{place}", direction(place), created_at=time) for place, time in enumerate(times)])
    for time in times:
        for where in (F.created_at == time, F.created_at < time, F.created_at >= time):
            world.check("user_alice", direction(), 10, where)
    assert {record.metadata.created_at for some in world.index.scan() for record in some if record.metadata} == set(
        times
    )
