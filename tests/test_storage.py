"""How is a vault opened, what does it remember, and what may be done with all of it?"""

from __future__ import annotations

import json
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import memvault
from memvault import (
    ConfigurationError,
    ConflictError,
    F,
    IndexMismatchError,
    MemvaultError,
    NewChunk,
    SchemaError,
    StorageError,
    StorageLayer,
    ValidationError,
    create_engine,
)
from memvault.database.engine import sqlite_driver
from memvault.embedding.static import StaticEmbedder
from tests.conftest import OpenVault
from tests.support import HashingEmbedder, ListIndex, dump, eventually, refused, rows_of, statements


def url(path: Path) -> str:
    return f"sqlite:///{path}"


class TestOpen:
    def test_a_new_vault_is_founded_with_the_defaults(self, tmp_path: Path) -> None:
        with StorageLayer.open(url(tmp_path / "new.db")) as layer:
            stats = layer.stats()
            assert (stats["index"], stats["model"], stats["dimension"]) == ("chroma", StaticEmbedder.model, 256)
            alice = layer.for_user("user_alice")
            alice.chunks.add_many([NewChunk("She prefers concise answers"), NewChunk("The cat sleeps all day")])
            assert alice.search("How should I reply?", k=1)[0].chunk.content == "She prefers concise answers"
            assert layer.stats()["index_records"] == 2
        assert (tmp_path / "new.db.chroma").is_dir()

    def test_a_vault_remembers_its_index_and_embedder(self, vault_path: Path, index_name: str) -> None:
        with StorageLayer.open(url(vault_path), vectors=index_name, embedder="none") as layer:
            vault_id = layer.vault_id
            chunk = layer.for_user("user_alice").chunks.add("text", embedding=[1, 2])
        with StorageLayer.open(url(vault_path)) as layer:
            assert layer.vault_id == vault_id
            assert layer.stats()["index"] == index_name
            assert layer.stats()["index_records"] == 1
            assert [hit.chunk for hit in layer.for_user("user_alice").search(embedding=[1, 2])] == [chunk]
            assert layer.health()["debts"] == 0

    def test_two_vaults_differ(self, tmp_path: Path) -> None:
        ids = set()
        for name in ("one", "two"):
            with StorageLayer.open(url(tmp_path / name), vectors="exact", embedder="none") as layer:
                ids.add(layer.vault_id)
        assert len(ids) == 2

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"vectors": "chroma"}, ("'exact'", "'chroma'", "memvault reindex")),
            ({"vectors": ListIndex()}, ("'exact'", "tests-list", "memvault reindex")),
            ({"embedder": "static"}, ("tests/hashing-64", StaticEmbedder.model, "memvault reindex")),
            ({"embedder": "none"}, ("tests/hashing-64", "'none'", "memvault reindex")),
            ({"embedder": HashingEmbedder("tests/other")}, ("tests/hashing-64", "tests/other", "memvault reindex")),
            ({"embedder": HashingEmbedder(dimension=32)}, ("64", "32", "memvault reindex")),
        ],
        ids=["index", "index-object", "static", "none", "model", "dimension"],
    )
    def test_another_index_model_or_dimension_is_refused(
        self, open_exact: OpenVault, vault_path: Path, options: dict[str, Any], words: tuple[str, ...]
    ) -> None:
        layer = open_exact()
        layer.for_user("user_alice").chunks.add("text")
        with refused(layer, IndexMismatchError, *words):
            StorageLayer.open(url(vault_path), **{"embedder": HashingEmbedder(), **options})
        assert not Path(f"{vault_path}.chroma").exists()
        assert issubclass(IndexMismatchError, memvault.VectorIndexError)

    def test_an_embedder_that_has_no_name_has_to_be_given_again(self, open_exact: OpenVault, vault_path: Path) -> None:
        open_exact().close()
        with pytest.raises(ConfigurationError, match="tests/hashing-64"):
            StorageLayer.open(url(vault_path))

    def test_what_fails_to_open_leaves_nothing_open(self, vault_path: Path, tmp_path: Path) -> None:
        with StorageLayer.open(url(vault_path), vectors="chroma", embedder="none"):
            pass
        for _ in range(3):
            with pytest.raises(IndexMismatchError):
                StorageLayer.open(url(vault_path), embedder=HashingEmbedder())
        with StorageLayer.open(url(vault_path)) as layer:
            layer.for_user("user_alice").chunks.add("text", embedding=[1.0])
            assert layer.stats()["index_records"] == 1

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"vectors": "faiss"}, ("'faiss'", "exact")),
            ({"vectors": "chroma://"}, ("'chroma://'", "folder")),
            ({"vectors": 7}, ("vectors", "7")),
            ({"embedder": "word2vec"}, ("'word2vec'", "static")),
            ({"embedder": 7}, ("embedder", "7")),
            ({"schema": "create"}, ("schema", "'create'", "upgrade")),
            ({"indexing": "later"}, ("indexing", "'later'", "inline")),
            ({"index_wait": -1}, ("index_wait", "-1")),
            ({"index_wait": float("nan")}, ("index_wait", "nan")),
            ({"index_wait": "1"}, ("index_wait", "'1'")),
            ({"exact_limit": -1}, ("exact_limit", "-1")),
            ({"exact_limit": 1.5}, ("exact_limit", "1.5")),
            ({"engine_options": {"no_such_option": 1}}, ("no_such_option",)),
        ],
    )
    def test_an_option_that_cannot_work(
        self, vault_path: Path, options: dict[str, Any], words: tuple[str, ...]
    ) -> None:
        with pytest.raises(ConfigurationError) as caught:
            StorageLayer.open(url(vault_path), **options)
        assert all(word in str(caught.value) for word in words)

    @pytest.mark.parametrize(
        "bad",
        ["", "memvault.db", "sqlite://", "sqlite:///:memory:", "mysql://host/db", 7, None, "sqlite:////no/such/a.db"],
    )
    def test_a_database_that_cannot_work(self, bad: Any) -> None:
        with pytest.raises(ConfigurationError):
            StorageLayer.open(bad)

    def test_a_password_is_in_no_error(self) -> None:
        for bad in ("postgresql://me:s3cret@127.0.0.1:1/db", "nonsense://me:s3cret@ho st:port/db"):
            with pytest.raises(MemvaultError) as caught:
                StorageLayer.open(bad)
            assert "s3cret" not in f"{caught.value!r} {caught.value.__cause__!r}"

    def test_schema_check_names_the_command(self, tmp_path: Path) -> None:
        path = tmp_path / "new.db"
        with pytest.raises(SchemaError, match="memvault db upgrade"):
            StorageLayer.open(url(path), schema="check", vectors="exact")
        with pytest.raises(StorageError):
            StorageLayer.open(url(path), schema="ignore", vectors="exact")
        StorageLayer.open(url(path), schema="upgrade", vectors="exact").close()
        for schema in ("check", "ignore"):
            StorageLayer.open(url(path), schema=schema).close()

    def test_memory_is_a_private_temporary_file(self) -> None:
        with StorageLayer.open(":memory:", vectors="exact") as one, StorageLayer.open(":memory:") as two:
            folders = [Path(layer.engine.url.database or "").parent for layer in (one, two)]
            one.for_user("user_alice").chunks.add("text")
            two.for_user("user_alice").chunks.add("text")
            assert one.for_user("user_alice").chunks.count() == two.for_user("user_alice").chunks.count() == 1
            assert all(folder.is_dir() for folder in folders)
        assert not any(folder.exists() for folder in folders)

    def test_closing_is_idempotent(self, open_vault: OpenVault) -> None:
        layer = open_vault()
        layer.close()
        layer.close()
        with pytest.raises(StorageError, match="closed"):
            layer.stats()

    def test_repr_names_the_vault(self, open_exact: OpenVault, database_name: str) -> None:
        assert repr(open_exact()).startswith(f"StorageLayer('{database_name}")

    def test_from_env(self, vault_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MEMVAULT_DATABASE_URL", raising=False)
        with pytest.raises(ConfigurationError, match="MEMVAULT_DATABASE_URL"):
            StorageLayer.from_env()
        for name, value in {
            "DATABASE_URL": url(vault_path),
            "VECTORS": "exact",
            "EMBEDDER": "none",
            "INDEXING": "manual",
            "INDEX_WAIT": "0.25",
            "SCHEMA": "check",
            "EXACT_LIMIT": "7",
        }.items():
            monkeypatch.setenv(f"MEMVAULT_{name}", value)
        with StorageLayer.from_env() as layer:
            assert layer.stats()["index"] == "exact"
            assert (layer.indexing, layer.index_wait) == ("manual", 0.25)
        monkeypatch.setenv("MEMVAULT_EXACT_LIMIT", "many")
        with pytest.raises(ConfigurationError, match="MEMVAULT_EXACT_LIMIT.*'many'"):
            StorageLayer.from_env()

    def test_25_threads_write_to_a_vault_that_does_not_exist_yet(self, tmp_path: Path) -> None:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                with StorageLayer.open(url(tmp_path / "new.db"), vectors="exact", embedder="none") as layer:
                    layer.for_user(f"user {number % 3}").chunks.add("text", embedding=[1.0, number])
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(25)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        with StorageLayer.open(url(tmp_path / "new.db")) as layer:
            assert layer.stats()["vectors"] == 25
            assert layer.stats()["users"] == 3


class TestEngine:
    def test_of_memvaults_own(self, vault_path: Path) -> None:
        engine = create_engine(url(vault_path))
        with StorageLayer.open(engine, vectors="exact", embedder="none") as layer:
            assert layer.engine is engine
            layer.for_user("user_alice").chunks.add("text")
        with engine.connect() as connection:  # closing the layer leaves the caller's engine alone
            assert connection.execute(sa.text("SELECT count(*) FROM memory_chunks")).scalar_one() == 1
        engine.dispose()

    @pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
    def test_of_the_callers(self, vault_path: Path, used: bool) -> None:
        engine = sa.create_engine(url(vault_path))
        if used:
            with engine.connect() as connection:
                connection.execute(sa.text("SELECT 1"))
        with StorageLayer.open(engine, vectors="exact", embedder="none") as layer:
            alice = layer.for_user("user_alice")
            chunk = alice.chunks.add("text", metadata={"e": "ü"}, embedding=[1.0])
            alice.procedural.set("key", 1, source_chunk_id=chunk.id)
            assert alice.chunks.delete(chunk.id)
            preference = alice.procedural.get("key")
            assert preference is not None
            assert preference.source_chunk_id is None
            with engine.connect() as connection:
                for pragma, value in (("foreign_keys", 1), ("secure_delete", 1), ("journal_mode", "wal")):
                    assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value
        engine.dispose()

    def test_options_are_for_a_url(self, vault_path: Path) -> None:
        engine = create_engine(url(vault_path))
        with pytest.raises(ConfigurationError, match="engine_options"):
            StorageLayer.open(engine, engine_options={"pool_size": 1})
        engine.dispose()

    def test_values_are_in_no_error(self, open_exact: OpenVault, vault_path: Path) -> None:
        layer = open_exact(engine_options={"connect_args": {"timeout": 0.1}})
        alice = layer.for_user("user_alice")
        alice.chunks.add("before")
        with closing(sqlite_driver().connect(vault_path)) as other:
            other.execute("DROP TABLE procedural_memory")
        with pytest.raises(StorageError) as caught:
            alice.procedural.set("key", "s3cret value")
        assert "s3cret" not in f"{caught.value!r} {caught.value.__cause__!r}"
        assert caught.value.__cause__ is not None
        assert not caught.value.retryable


class TestUsers:
    def test_for_user_does_no_io(self, exact_storage: StorageLayer) -> None:
        with statements(exact_storage.engine) as sent:
            user = exact_storage.for_user("user_alice")
        assert sent == []
        assert repr(user) == "UserMemory('user_alice')"

    def test_user_ids_are_those_with_anything_stored(
        self, exact_storage: StorageLayer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("memvault.operations.census.PAGE", 3)
        for number in range(10):
            user = exact_storage.for_user(f"user {number}")
            (user.chunks.add, user.sessions.start, user.jobs.enqueue)[number % 3](*["text"][: number % 3 == 0])
        exact_storage.for_user("reads only").search("text")
        exact_storage.for_user("reads only").chunks.list()
        expected = [f"user {number}" for number in range(10)]
        assert list(exact_storage.user_ids()) == expected
        for user_id in exact_storage.user_ids():  # nothing is held open between two of them
            exact_storage.for_user(user_id).chunks.add("more")
        exact_storage.erase_user("user 4")
        assert list(exact_storage.user_ids()) == [one for one in expected if one != "user 4"]

    def test_a_user_whose_writes_all_failed_is_none(self, exact_storage: StorageLayer) -> None:
        alice = exact_storage.for_user("user_alice")
        with pytest.raises(memvault.NotFoundError):
            alice.chunks.add("text", session_id="sess_none")
        assert list(exact_storage.user_ids()) == []


class TestHealth:
    def test_of_a_vault_without_debts(self, storage: StorageLayer, index_name: str) -> None:
        storage.for_user("user_alice").chunks.add("text")
        health = storage.health()
        assert {name: health[name] for name in ("ok", "debts", "oldest_debt_s", "last_error", "index_owner_pid")} == {
            "ok": True,
            "debts": 0,
            "oldest_debt_s": None,
            "last_error": None,
            "index_owner_pid": os.getpid() if index_name == "chroma" else None,
        }

    @pytest.mark.leaves_debts
    def test_debts_are_no_failure(self, open_vault: OpenVault, index_name: str) -> None:
        layer = open_vault(indexing="manual")
        layer.for_user("user_alice").chunks.add_many([NewChunk("one"), NewChunk("two")])
        health = layer.health()
        assert health["ok"] is True
        assert health["debts"] == (2 if index_name == "chroma" else 0)
        report = layer.sync()
        assert (report.paid, report.failed, report.owed) == (health["debts"], 0, 0)
        assert layer.sync().paid == 0

    def test_another_owner_of_the_index_is_named(self, open_exact: OpenVault, tmp_path: Path) -> None:
        folder = f"chroma://{tmp_path}/chroma"
        open_exact(vectors=folder)
        health = open_exact(vectors=folder).health()
        assert health["ok"] is True
        assert health["index_owner_pid"] == os.getpid()
        assert "owned" in health["last_error"]

    def test_a_broken_database_is_one(self, open_exact: OpenVault, vault_path: Path) -> None:
        layer = open_exact()
        with closing(sqlite_driver().connect(vault_path)) as other:
            other.execute("DROP TABLE index_outbox")
        health = layer.health()
        assert health["ok"] is False
        assert "index_outbox" in health["last_error"]

    def test_stats(self, storage: StorageLayer, index_name: str) -> None:
        for name in ("user_alice", "user_bob"):
            user = storage.for_user(name)
            user.chunks.add_many([NewChunk("one"), NewChunk("rule", memory_type="procedural")])
            user.procedural.set("key", 1)
            user.jobs.enqueue()
        assert storage.stats() == {
            "users": 2,
            "rows": {
                "memory_chunks": 4,
                "memory_vectors": 2,
                "procedural_memory": 2,
                "sessions": 2,
                "compression_jobs": 2,
            },
            "vectors": 2,
            "model": "tests/hashing-64",
            "dimension": 64,
            "index": index_name,
            "index_records": 2,
            "debts": 0,
        }


class FailingIndex(ListIndex):
    """An index of which some calls fail, as a server that is going down."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.failing: set[int] = set()
        self.refused: str | None = None
        """A text that is not taken, however often it is tried."""

    def upsert(self, records: Any) -> None:
        self.calls += 1
        if any(record.document == self.refused for record in records):
            raise memvault.VectorIndexError(f"{self.refused!r} is refused")
        if self.calls in self.failing:
            raise memvault.VectorIndexError(f"call {self.calls} failed")
        super().upsert(records)


class TestDebts:
    @pytest.mark.parametrize("exact_limit", [0, 20_000])
    def test_an_index_that_fails_on_the_third_of_five_writes(self, open_exact: OpenVault, exact_limit: int) -> None:
        index = FailingIndex()
        layer = open_exact(vectors=index, exact_limit=exact_limit)
        alice = layer.for_user("user_alice")
        index.refused = "text 2"
        chunks = [alice.chunks.add(f"text {number}") for number in range(5)]
        assert {hit.chunk.id for hit in alice.search("text")} == {chunk.id for chunk in chunks}
        assert [hit.chunk.id for hit in alice.search("text 2", k=1)] == [chunks[2].id]
        health = layer.health()
        assert (health["ok"], health["debts"], health["last_error"]) == (True, 1, "'text 2' is refused")
        index.refused = None
        eventually(lambda: layer.sync().owed == 0)
        assert index.records.keys() == {chunk.id for chunk in chunks}

    def test_a_sync_that_fails_says_so(self, open_exact: OpenVault) -> None:
        index = FailingIndex()
        layer = open_exact(vectors=index, indexing="manual")
        layer.for_user("user_alice").chunks.add("text")
        index.failing = {1}
        report = layer.sync()
        assert (report.paid, report.failed, report.owed) == (0, 1, 1)
        assert (layer.sync().paid, layer.health()["debts"]) == (1, 0)

    def test_an_index_that_was_lost_is_rebuilt(self, open_exact: OpenVault) -> None:
        first = open_exact(vectors=ListIndex())
        first.for_user("user_alice").chunks.add_many([NewChunk("one"), NewChunk("two")])
        first.close()
        empty = ListIndex()
        layer = open_exact(vectors=empty, exact_limit=0)
        assert len(layer.for_user("user_alice").search("one")) == 2
        layer.sync()
        assert len(empty.records) == 2
        assert layer.health()["debts"] == 0

    def test_churn_leaves_no_double(self, open_vault: OpenVault) -> None:
        layer = open_vault(exact_limit=0)
        alice = layer.for_user("user_alice")
        chunks = alice.chunks.add_many(NewChunk(f"text {number}") for number in range(20))
        for turn in range(5):
            with alice.transaction() as tx:
                for chunk in chunks:
                    tx.chunks.update(chunk.id, content=f"{chunk.content} turn {turn}")
        stats = layer.stats()
        assert (stats["vectors"], stats["index_records"], stats["debts"]) == (20, 20, 0)
        ids = [hit.chunk.id for hit in alice.search("text 7 turn 4", k=20)]
        assert ids[0] == chunks[7].id
        assert len(set(ids)) == 20


class TestErase:
    def fill(self, layer: StorageLayer, name: str) -> None:
        user = layer.for_user(name)
        session = user.sessions.start()
        chunks = user.chunks.add_many([NewChunk(f"tea {number}", session_id=session.id) for number in range(5)])
        user.chunks.add("rule", memory_type="procedural")
        user.procedural.set("key", name, source_chunk_id=chunks[0].id)
        user.jobs.enqueue()

    def test_erasing_a_user_leaves_others_alone(self, storage: StorageLayer) -> None:
        for name in ("user_alice", "user_bob"):
            self.fill(storage, name)
        theirs = rows_of(storage, "user_bob")
        found = [hit.chunk for hit in storage.for_user("user_bob").search("tea 3")]
        report = storage.erase_user("user_alice")
        assert report.model_dump() == {
            "user_id": "user_alice",
            "counts": {
                "memory_chunks": 6,
                "memory_vectors": 5,
                "procedural_memory": 1,
                "sessions": 2,
                "compression_jobs": 1,
            },
            "owed": 0,
        }
        assert all(rows == [] for rows in rows_of(storage, "user_alice").values())
        assert rows_of(storage, "user_bob") == theirs
        assert [hit.chunk for hit in storage.for_user("user_bob").search("tea 3")] == found
        assert storage.stats()["index_records"] == 5
        alice = storage.for_user("user_alice")
        assert alice.search("tea") == alice.search() == []
        assert alice.chunks.list().items == []
        assert list(storage.user_ids()) == ["user_bob"]

    def test_a_user_without_anything(self, storage: StorageLayer) -> None:
        before = dump(storage)
        report = storage.erase_user("nobody")
        assert set(report.counts.values()) == {0}
        assert report.owed == 0
        assert dump(storage) == before

    def test_a_user_may_come_back(self, storage: StorageLayer) -> None:
        self.fill(storage, "user_alice")
        storage.erase_user("user_alice")
        self.fill(storage, "user_alice")
        alice = storage.for_user("user_alice")
        assert alice.search("tea 3", k=1)[0].chunk.content == "tea 3"
        assert len(alice.search("tea", k=99)) == storage.stats()["index_records"] == 5
        session = alice.chunks.list().items[0].session_id
        assert alice.sessions.get(session) is not None

    @pytest.mark.parametrize("exact_limit", [0, 20_000])
    def test_what_the_index_still_owes_is_reported(self, open_exact: OpenVault, exact_limit: int) -> None:
        index = ListIndex()
        layer = open_exact(vectors=index, indexing="manual", exact_limit=exact_limit)
        self.fill(layer, "user_alice")
        layer.sync()
        report = layer.erase_user("user_alice")
        assert report.owed == 6  # every chunk: the index may hold what SQL no longer tells of
        assert len(index.records) == 5
        alice = layer.for_user("user_alice")
        assert alice.search("tea") == []
        chunk = alice.chunks.add("new tea")
        assert [hit.chunk for hit in alice.search("tea")] == [chunk]
        assert layer.sync().owed == 0
        assert index.records.keys() == {chunk.id}

    def test_a_vault_that_never_had_a_vector_owes_nothing(self, bare_storage: StorageLayer) -> None:
        bare_storage.for_user("user_alice").chunks.add_many([NewChunk("one"), NewChunk("two")])
        assert bare_storage.erase_user("user_alice").owed == 0
        assert bare_storage.health()["debts"] == bare_storage.sync().owed == 0
        bare_storage.for_user("user_bob").chunks.add("three", embedding=[1.0])
        assert bare_storage.stats()["index_records"] == 1

    def test_nothing_of_the_text_is_left_in_the_database(self, open_exact: OpenVault, vault_path: Path) -> None:
        layer = open_exact()
        layer.for_user("user_alice").chunks.add("xyzzy the secret word")
        layer.for_user("user_bob").chunks.add("plugh")
        layer.erase_user("user_alice")
        with layer.engine.connect() as connection:
            connection.exec_driver_sql("COMMIT")  # the checkpoint does not run in a transaction
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.exec_driver_sql("BEGIN")
        layer.close()
        files = b"".join(path.read_bytes() for path in vault_path.parent.glob("memvault.db*"))
        assert b"plugh" in files
        assert b"xyzzy" not in files


class TestImport:
    LINE: dict[str, Any] = {  # noqa: RUF012
        "record": "chunk",
        "user_id": "user_alice",
        "id": "mem_1",
        "session_id": "sess_1",
        "memory_type": "semantic",
        "content": "likes tea",
        "importance": 0.8,
        "created_at": "2026-02-11T18:42:00+09:00",
        "metadata": {"topic": "food"},
    }

    def lines(self, *changes: dict[str, Any]) -> list[str]:
        return [json.dumps({**self.LINE, **change}) for change in changes]

    def test_a_line_becomes_a_chunk(self, storage: StorageLayer) -> None:
        report = storage.import_user(self.lines({}))
        assert (report.added, report.skipped, report.users) == (1, 0, 1)
        alice = storage.for_user("user_alice")
        chunk = alice.chunks.get("mem_1")
        assert chunk is not None
        assert chunk.model_dump(include=self.LINE.keys() - {"record", "created_at"}) == {
            name: self.LINE[name] for name in self.LINE.keys() - {"record", "created_at"}
        }
        assert chunk.created_at.isoformat() == "2026-02-11T09:42:00+00:00"
        session = alice.sessions.get("sess_1")
        assert session is not None
        assert (session.started_at, session.memory_count) == (chunk.created_at, 1)
        assert [hit.chunk for hit in alice.search("likes tea")] == [chunk]

    def test_twice_adds_nothing(self, storage: StorageLayer) -> None:
        lines = self.lines(
            {}, {"id": None, "content": "no id"}, {"id": None, "user_id": "user_bob", "session_id": None}
        )
        done: list[int] = []
        report = storage.import_user([*lines, "", "  \n"], progress=done.append)
        assert (report.added, report.skipped, report.users, done) == (3, 0, 2, [3])
        before = dump(storage)
        report = storage.import_user(lines)
        assert (report.added, report.skipped, report.users) == (0, 3, 2)
        assert dump(storage) == before

    def test_for_another_user(self, storage: StorageLayer) -> None:
        storage.import_user(self.lines({"user_id": "ignored"}, {"user_id": None, "id": "mem_2"}), "user_bob")
        assert list(storage.user_ids()) == ["user_bob"]
        assert storage.for_user("user_bob").chunks.count() == 2

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ("not json", ("line 2", "JSON")),
            ("[1]", ("line 2", "object")),
            ({"record": "session"}, ("line 2", "record", "'session'")),
            ({"colour": "red"}, ("line 2", "'colour'")),
            ({"user_id": ""}, ("line 2", "user_id", "''")),
            ({"content": None}, ("line", "content", "None")),
            ({"content": 7, "id": None}, ("line", "content", "7")),
            ({"importance": 7}, ("line", "importance", "7")),
            ({"memory_type": "dream"}, ("line", "memory_type", "'dream'")),
            ({"created_at": "yesterday"}, ("line 2", "created_at", "'yesterday'")),
            ({"created_at": "2026-01-01T00:00:00"}, ("line", "created_at", "time zone")),
            ({"created_at": 7}, ("line 2", "created_at", "7")),
            ({"id": "a\x00b"}, ("line", "id", "NUL")),
            ({"session_id": 7}, ("line", "session_id", "7")),
            ({"metadata": [1]}, ("line", "metadata", "[1]")),
            ({"embedding": [0.0]}, ("line", "embedding")),
        ],
    )
    def test_a_bad_line_is_named_and_its_batch_leaves_nothing(
        self, exact_storage: StorageLayer, change: Any, words: tuple[str, ...]
    ) -> None:
        bad = change if isinstance(change, str) else self.lines({"id": "mem_2", "session_id": "sess_2", **change})[0]
        with refused(exact_storage, ValidationError, *words):
            exact_storage.import_user([*self.lines({}), bad])

    def test_an_id_of_another_user(self, exact_storage: StorageLayer) -> None:
        exact_storage.for_user("user_bob").chunks.add("theirs", id="mem_1")
        with refused(exact_storage, ConflictError, "line 1", "mem_1"):
            exact_storage.import_user(self.lines({}))

    def test_a_session_of_another_user(self, exact_storage: StorageLayer) -> None:
        exact_storage.for_user("user_bob").sessions.start(id="sess_1")
        with refused(exact_storage, ConflictError, "line 1", "sess_1"):
            exact_storage.import_user(self.lines({}))

    def test_a_file_of_many_users(self, exact_storage: StorageLayer) -> None:
        changes = [
            {"id": f"mem_{number}", "user_id": f"user {number % 7}", "session_id": f"sess_{number % 21}"}
            for number in range(300)
        ]
        report = exact_storage.import_user(iter(self.lines(*changes)))
        assert (report.added, report.users) == (300, 7)
        counts = [exact_storage.for_user(name).chunks.count() for name in exact_storage.user_ids()]
        assert sum(counts) == 300
        assert exact_storage.for_user("user 3").chunks.count(F.session_id == "sess_3") == 15
