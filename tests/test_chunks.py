"""What do the chunks of a user promise?"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pydantic
import pytest
from sqlalchemy import event

from memvault import (
    Chunk,
    ConflictError,
    EmbeddingError,
    F,
    NewChunk,
    NotFoundError,
    StorageLayer,
    UserMemory,
    ValidationError,
)
from memvault.database.engine import READ_ONLY
from memvault.embedding.base import Matrix
from memvault.errors import StorageError
from memvault.ids import MAX_DRAWS
from memvault.memory import drafts, insertion
from memvault.models import MemoryChunk, MemoryVector
from tests.conftest import OpenVault
from tests.support import BAD_TEXTS, TEXTS, HashingEmbedder, dump, refused, rows_of, statements

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def counts(user: UserMemory, session_id: str) -> tuple[int, int]:
    session = user.sessions.get(session_id)
    assert session is not None
    return session.memory_count, session.total_tokens


class TestAdd:
    def test_defaults(self, alice: UserMemory) -> None:
        before = datetime.now(UTC)
        chunk = alice.chunks.add("Prefers concise answers")
        after = datetime.now(UTC)
        assert re.fullmatch(r"mem_[0-9a-f]{12}", chunk.id)
        assert re.fullmatch(r"sess_[0-9a-f]{8}", chunk.session_id)
        assert before <= chunk.created_at == chunk.updated_at <= after
        assert chunk.created_at.tzinfo is UTC
        assert chunk.model_dump(exclude={"id", "session_id", "created_at", "updated_at"}) == {
            "user_id": "user_alice",
            "memory_type": "episodic",
            "content": "Prefers concise answers",
            "importance": 0.5,
            "token_count": 6,  # a quarter of 23 characters, rounded up
            "compressed": False,
            "compression_source": None,
            "source_session_id": None,
            "chroma_id": chunk.id,
            "metadata": {},
            "version": 1,
        }
        assert alice.chunks.get(chunk.id) == chunk

    def test_everything_given(self, exact_storage: StorageLayer, alice: UserMemory) -> None:
        session = alice.sessions.start()
        chunk = alice.chunks.add(
            "Prefers concise answers",
            id="my id",
            session_id=session.id,
            memory_type="semantic",
            importance=1,
            metadata={"topic": "style"},
            embedding=np.arange(1, 65),
            created_at=EPOCH,
        )
        assert (chunk.id, chunk.session_id, chunk.memory_type) == ("my id", session.id, "semantic")
        assert (chunk.importance, chunk.metadata) == (1.0, {"topic": "style"})
        assert chunk.created_at == chunk.updated_at == EPOCH
        assert alice.chunks.get("my id") == chunk
        with exact_storage.engine.connect() as connection:
            row = connection.execute(MemoryVector.__table__.select()).one()  # type: ignore[attr-defined]
        stored = np.frombuffer(row.vector, "<f4")
        assert np.allclose(stored, np.arange(1, 65) / np.linalg.norm(np.arange(1, 65)), atol=1e-6)
        assert (row.user_id, row.chunk_id, row.dimension) == ("user_alice", "my id", 64)

    def test_what_crosses_the_api_is_frozen_and_validates(self, alice: UserMemory) -> None:
        chunk = alice.chunks.add("text", metadata={"n": 1})
        with pytest.raises(pydantic.ValidationError):
            chunk.content = "other"
        for value in (chunk, alice.chunks.get(chunk.id)):
            assert value is not None
            assert Chunk.model_validate_json(value.model_dump_json()) == chunk

    def test_the_callers_metadata_is_copied(self, alice: UserMemory) -> None:
        metadata: dict[str, Any] = {"list": [1]}
        chunk = alice.chunks.add("text", metadata=metadata)
        metadata["list"].append(2)
        assert chunk.metadata == {"list": [1]}

    def test_a_write_without_a_session_goes_to_the_users_default(self, alice: UserMemory, bob: UserMemory) -> None:
        first, second = alice.chunks.add("one"), alice.chunks.add("two", memory_type="procedural")
        assert first.session_id == second.session_id
        assert bob.chunks.add("three").session_id != first.session_id
        assert [session.id for session in alice.sessions.list().items] == [first.session_id]
        assert counts(alice, first.session_id) == (2, 2)

    def test_counts_follow_in_the_same_transaction(self, exact_storage: StorageLayer, alice: UserMemory) -> None:
        session = alice.sessions.start(started_at=EPOCH)
        alice.chunks.add("a" * 9, session_id=session.id)
        assert counts(alice, session.id) == (1, 3)
        read_only: list[bool] = []
        event.listen(
            exact_storage.engine,
            "commit",
            lambda connection: read_only.append(connection.get_execution_options()[READ_ONLY]),
        )
        alice.chunks.add("b" * 4, session_id=session.id)
        assert read_only.count(False) == 1
        assert counts(alice, session.id) == (2, 4)
        touched = alice.sessions.get(session.id)
        assert touched is not None
        assert touched.last_activity > touched.started_at == EPOCH

    def test_an_unknown_session_is_not_found(self, exact_storage: StorageLayer, alice: UserMemory) -> None:
        with refused(exact_storage, NotFoundError, "session_id", "'sess_none'"):
            alice.chunks.add("text", session_id="sess_none")

    def test_a_session_of_another_is_not_found(
        self, exact_storage: StorageLayer, alice: UserMemory, bob: UserMemory
    ) -> None:
        session = bob.sessions.start()
        with refused(exact_storage, NotFoundError, "session_id", session.id):
            alice.chunks.add("text", session_id=session.id)

    def test_an_id_that_is_taken(self, exact_storage: StorageLayer, alice: UserMemory, bob: UserMemory) -> None:
        mine = alice.chunks.add("mine", id="one")
        for user in (alice, bob):
            with refused(exact_storage, ConflictError, "id", "'one'"):
                user.chunks.add("theirs", id="one")
        assert alice.chunks.get("one") == mine
        assert bob.chunks.get("one") is None

    def test_two_users_with_the_same_id_content_and_key(
        self, exact_storage: StorageLayer, alice: UserMemory, bob: UserMemory
    ) -> None:
        for user in (alice, bob):
            user.chunks.add("the same")
            user.procedural.set("key", user.user_id)
        assert [alice.chunks.count(), bob.chunks.count()] == [1, 1]
        for user in (alice, bob):
            preference = user.procedural.get("key")
            assert preference is not None
            assert preference.value == user.user_id
        alice.chunks.add("first come", id="the same id")
        theirs = rows_of(exact_storage, alice.user_id)
        for on_conflict in ("error", "skip"):
            with refused(exact_storage, ConflictError, "the same id"):
                bob.chunks.add_many([NewChunk("late", id="the same id")], on_conflict=on_conflict)
        assert rows_of(exact_storage, alice.user_id) == theirs

    @pytest.mark.parametrize(
        ("fields", "argument", "shown"),
        [
            ({"memory_type": "sematic"}, "memory_type", "'sematic'"),
            ({"memory_type": None}, "memory_type", "None"),
            ({"importance": 1.01}, "importance", "1.01"),
            ({"importance": -0.01}, "importance", "-0.01"),
            ({"importance": math.nan}, "importance", "nan"),
            ({"importance": True}, "importance", "True"),
            ({"importance": "high"}, "importance", "'high'"),
            ({"metadata": [1]}, "metadata", "[1]"),
            ({"metadata": {"a": math.nan}}, "metadata['a']", "nan"),
            ({"metadata": {"a": {1: 2}}}, "metadata['a']", "1"),
            ({"metadata": {"a": object}}, "metadata['a']", "object"),
            ({"created_at": datetime(2026, 1, 1)}, "created_at", "2026-01-01"),  # noqa: DTZ001 - naive on purpose
            ({"created_at": "2026-01-01"}, "created_at", "'2026-01-01'"),
            ({"id": ""}, "id", "''"),
            ({"id": "x" * 256}, "id", "256"),
            ({"session_id": " "}, "session_id", "' '"),
            ({"embedding": "abc"}, "embedding", "'abc'"),
            ({"embedding": [[0.0] * 64]}, "embedding", "(1, 64)"),
            ({"embedding": [1.0] * 64, "memory_type": "procedural"}, "embedding", "procedural"),
        ],
    )
    def test_a_bad_argument_is_named_with_its_value(
        self, exact_storage: StorageLayer, alice: UserMemory, fields: dict[str, Any], argument: str, shown: str
    ) -> None:
        with refused(exact_storage, ValidationError, argument, shown):
            alice.chunks.add("text", **fields)
        with refused(exact_storage, ValidationError, f"chunks[1].{argument}", shown):
            alice.chunks.add_many([NewChunk("good"), NewChunk("bad", **fields)])

    @pytest.mark.parametrize(
        ("vector", "rule"),
        [
            pytest.param([math.nan] * 64, "finite", id="NaN"),
            pytest.param([math.inf] + [0.0] * 63, "finite", id="infinite"),
            pytest.param([0.0] * 64, "zero", id="zero"),
            pytest.param([], "non-empty", id="empty"),
            pytest.param([1.0] * 63, "64", id="other-dimension"),
        ],
    )
    def test_a_vector_without_direction_is_refused_before_any_io(
        self, exact_storage: StorageLayer, alice: UserMemory, vector: list[float], rule: str
    ) -> None:
        alice.chunks.add("text", id="here")
        with statements(exact_storage.engine) as sent:
            for call in (
                lambda: alice.chunks.add("text", embedding=vector),
                lambda: alice.chunks.add_many([NewChunk("good"), NewChunk("text", embedding=vector)]),
                lambda: alice.search(embedding=vector),
                lambda: alice.search(embedding=np.asarray(vector, np.float32)),
            ):
                with pytest.raises(ValidationError, match=rule):
                    call()
        assert sent == []
        with refused(exact_storage, ValidationError, "embedding", rule):
            alice.chunks.update("here", embedding=vector)

    def test_an_embedder_that_fails_leaves_nothing(self, open_exact: OpenVault) -> None:
        class Failing(HashingEmbedder):
            def embed_documents(self, texts: Any) -> Matrix:
                if "poison" in texts:
                    raise RuntimeError("out of memory")
                return super().embed_documents(texts)

        layer = open_exact(embedder=Failing())
        alice = layer.for_user("user_alice")
        alice.chunks.add("fine", id="here")
        with refused(layer, EmbeddingError, "out of memory"):
            alice.chunks.add_many([NewChunk("good"), NewChunk("poison")])
        with refused(layer, EmbeddingError, "out of memory"):
            alice.chunks.update("here", content="poison")

    def test_a_token_counter_of_the_services_own(self, open_exact: OpenVault) -> None:
        def words(text: str) -> int:
            return len(text.split()) if text != "bad" else -1

        layer = open_exact(token_counter=words)
        alice = layer.for_user("user_alice")
        chunk = alice.chunks.add("three words here")
        assert chunk.token_count == 3
        assert alice.chunks.update(chunk.id, content="two words").token_count == 2
        assert counts(alice, chunk.session_id) == (1, 2)
        with refused(layer, ValidationError, "token_counter", "-1"):
            alice.chunks.add("bad")


class TestIdCollisions:
    def test_a_generated_id_that_is_taken_is_drawn_again(
        self, storage: StorageLayer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alice, bob = storage.for_user("user_alice"), storage.for_user("user_bob")
        mine, theirs = alice.chunks.add("mine", id="mem_a"), bob.chunks.add("theirs", id="mem_b")
        drawn = iter(["mem_a", "mem_b", "mem_c", "mem_a", "mem_b", "mem_d", "mem_e"])
        for module in (drafts, insertion):
            monkeypatch.setattr(module, "new_chunk_id", lambda: next(drawn))
        one, two, three = alice.chunks.add_many([NewChunk("one"), NewChunk("two"), NewChunk("three")])
        assert [one.content, two.content, three.content] == ["one", "two", "three"]
        assert {one.id, two.id, three.id} == {"mem_c", "mem_d", "mem_e"}
        assert alice.chunks.get("mem_a") == mine
        assert bob.chunks.get("mem_b") == theirs
        assert alice.search("two", k=1)[0].chunk == two
        assert counts(alice, one.session_id) == (4, 5)

    def test_two_generated_ids_of_one_call_that_are_equal(
        self, exact_storage: StorageLayer, alice: UserMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn = iter(["mem_a", "mem_a", "mem_b", "mem_c"])
        for module in (drafts, insertion):
            monkeypatch.setattr(module, "new_chunk_id", lambda: next(drawn))
        stored = alice.chunks.add_many([NewChunk("one"), NewChunk("two")])
        assert [chunk.content for chunk in stored] == ["one", "two"]
        assert len({chunk.id for chunk in stored}) == 2
        assert alice.chunks.count() == 2

    def test_a_given_and_a_generated_id_that_are_equal(
        self, alice: UserMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn = iter(["mem_a", "mem_b", "mem_c"])
        for module in (drafts, insertion):
            monkeypatch.setattr(module, "new_chunk_id", lambda: next(drawn))
        stored = alice.chunks.add_many([NewChunk("given", id="mem_a"), NewChunk("generated")])
        assert [chunk.content for chunk in stored] == ["given", "generated"]

    def test_draws_end(self, exact_storage: StorageLayer, alice: UserMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        alice.chunks.add("mine", id="mem_a")
        draws: list[str] = []

        def draw() -> str:
            draws.append("mem_a")
            return "mem_a"

        for module in (drafts, insertion):
            monkeypatch.setattr(module, "new_chunk_id", draw)
        with refused(exact_storage, StorageError, str(MAX_DRAWS)):
            alice.chunks.add("more")
        assert MAX_DRAWS <= len(draws) <= MAX_DRAWS + 1


class TestAddMany:
    def test_nothing_is_a_no_op(self, storage: StorageLayer) -> None:
        alice = storage.for_user("user_alice")
        with statements(storage.engine) as sent:
            assert alice.chunks.add_many([]) == []
            assert alice.chunks.add_many(iter([]), on_conflict="skip") == []
            assert alice.chunks.delete_many([]) == 0
            assert alice.chunks.get_many([]) == []
        assert sent == []

    def test_the_stored_come_back_in_their_order(self, alice: UserMemory) -> None:
        stored = alice.chunks.add_many(NewChunk(f"text {number}") for number in range(20))
        assert [chunk.content for chunk in stored] == [f"text {number}" for number in range(20)]
        assert alice.chunks.list().items == stored
        steps = {b.created_at - a.created_at for a, b in zip(stored, stored[1:], strict=False)}
        assert steps == {timedelta(microseconds=1)}

    def test_new_chunk_is_frozen_and_content_comes_first(self) -> None:
        new = NewChunk("text")
        assert (new.content, new.memory_type, new.importance) == ("text", "episodic", 0.5)
        with pytest.raises(dataclasses.FrozenInstanceError):
            new.content = "other"  # type: ignore[misc]

    @pytest.mark.parametrize("bad", ["text", {"content": "text"}, None, ("text",)])
    def test_what_is_no_new_chunk(self, exact_storage: StorageLayer, alice: UserMemory, bad: Any) -> None:
        with refused(exact_storage, ValidationError, "chunks[1]", "NewChunk"):
            alice.chunks.add_many([NewChunk("good"), bad])

    def test_a_conflict_stores_nothing(self, exact_storage: StorageLayer, alice: UserMemory) -> None:
        alice.chunks.add("there", id="b")
        with refused(exact_storage, ConflictError, "'b'"):
            alice.chunks.add_many([NewChunk("one", id="a"), NewChunk("two", id="b")])

    def test_skip_leaves_out_what_this_user_has(self, alice: UserMemory) -> None:
        there = alice.chunks.add("there", id="b")
        stored = alice.chunks.add_many(
            [NewChunk("one", id="a"), NewChunk("two", id="b"), NewChunk("three")], on_conflict="skip"
        )
        assert [chunk.content for chunk in stored] == ["one", "three"]
        assert alice.chunks.get("b") == there
        assert counts(alice, there.session_id)[0] == alice.chunks.count() == 3

    def test_an_id_twice_in_one_call(self, exact_storage: StorageLayer, alice: UserMemory) -> None:
        twice = [NewChunk("first", id="a"), NewChunk("second", id="a")]
        with refused(exact_storage, ConflictError, "'a'", "twice"):
            alice.chunks.add_many(twice)
        assert [chunk.content for chunk in alice.chunks.add_many(twice, on_conflict="skip")] == ["first"]

    def test_on_conflict_has_two_values(self, exact_storage: StorageLayer, alice: UserMemory) -> None:
        with refused(exact_storage, ValidationError, "on_conflict", "'replace'", "skip"):
            alice.chunks.add_many([NewChunk("one")], on_conflict="replace")

    def test_several_sessions_are_counted(self, alice: UserMemory) -> None:
        one, two = alice.sessions.start(), alice.sessions.start()
        alice.chunks.add_many(
            [
                NewChunk("aaaa", session_id=one.id),
                NewChunk("bbbbb", session_id=two.id),
                NewChunk("c", session_id=one.id),
            ]
        )
        assert counts(alice, one.id) == (2, 2)
        assert counts(alice, two.id) == (1, 2)

    def test_more_than_one_transaction_takes_is_checked_before_the_first(
        self, exact_storage: StorageLayer, bob: UserMemory, alice: UserMemory
    ) -> None:
        bob.chunks.add("theirs", id="taken")
        much = [NewChunk(f"text {number}", memory_type="procedural") for number in range(5001)]
        for last, error in (
            (NewChunk("text", session_id="sess_none"), NotFoundError),
            (NewChunk("text", id="taken"), ConflictError),
            (NewChunk("text", importance=2), ValidationError),
        ):
            with refused(exact_storage, error):
                alice.chunks.add_many([*much, last])
        seen: list[tuple[int, int]] = []
        assert len(alice.chunks.add_many(much, progress=lambda *done: seen.append(done))) == 5001
        assert seen == [(5000, 5001), (5001, 5001)]

    def test_a_dimension_is_checked_before_the_first_of_several_transactions(self, open_exact: OpenVault) -> None:
        layer = open_exact(embedder="none")
        much = [NewChunk("text", embedding=[1.0, 2.0])] * 5000
        with refused(layer, ValidationError, "embedding", "2", "3"):
            layer.for_user("user_alice").chunks.add_many([*much, NewChunk("text", embedding=[1.0, 2.0, 3.0])])


class TestTexts:
    """One policy on every entry point."""

    @pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
    def test_is_stored_as_given(self, storage: StorageLayer, text: str) -> None:
        user = storage.for_user(text)
        session = user.sessions.start(id=text)
        chunk = user.chunks.add(text, id=text, session_id=text, metadata={text: [text, {text: text}]})
        user.procedural.set(text, {text: text}, source_chunk_id=text)
        assert session.id == chunk.id == chunk.content == chunk.session_id == chunk.user_id == text
        assert chunk.metadata == {text: [text, {text: text}]}
        assert user.chunks.get(text) == chunk
        assert user.chunks.list(F.content == text, session_id=text).items == [chunk]
        assert user.chunks.count(F.id.in_([text]) & (F.content >= text)) == 1
        preference = user.procedural.get(text)
        assert preference is not None
        assert (preference.key, preference.value, preference.source_chunk_id) == (text, {text: text}, text)
        assert [hit.chunk for hit in user.search(embedding=user.embed([text])[0])] == [chunk]
        assert user.search(text) in ([], user.search(embedding=user.embed([text])[0]))
        assert list(storage.user_ids()) == [text]
        updated = user.chunks.update(text, content=f"{text}{text}")
        assert updated.content == f"{text}{text}"
        assert user.chunks.delete(text)
        assert storage.erase_user(text).user_id == text

    def test_composed_and_decomposed_are_two(self, alice: UserMemory) -> None:
        for name in ("composed", "decomposed"):
            alice.chunks.add(TEXTS[name], id=TEXTS[name])
        assert alice.chunks.count(F.content == TEXTS["composed"]) == 1
        assert alice.chunks.count() == 2

    def test_the_longest(self, exact_storage: StorageLayer, alice: UserMemory) -> None:
        longest = "ä" * (1 << 19)
        chunk = alice.chunks.add(longest, id="x" * 255, metadata={"a": "x" * ((1 << 20) - 8)})
        found = alice.chunks.get("x" * 255)
        assert found == chunk
        assert found is not None
        assert found.content == longest
        assert [hit.chunk for hit in alice.search(longest)] == [chunk]
        with refused(exact_storage, ValidationError, "content", "1 MiB"):
            alice.chunks.add(longest + "a")
        with refused(exact_storage, ValidationError, "content", "1 MiB"):
            alice.chunks.update(chunk.id, content=longest + "a")
        with refused(exact_storage, ValidationError, "query", "1 MiB"):
            alice.search(longest + "a")
        with refused(exact_storage, ValidationError, "metadata", "1 MiB"):
            alice.chunks.add("text", metadata={"a": "x" * ((1 << 20) - 7)})

    @pytest.mark.parametrize("text", BAD_TEXTS.values(), ids=BAD_TEXTS.keys())
    def test_what_is_none_is_refused_before_any_io(
        self, exact_storage: StorageLayer, alice: UserMemory, text: Any
    ) -> None:
        alice.chunks.add("text", id="here")
        calls: list[tuple[str, Callable[[], object]]] = [
            ("user_id", lambda: exact_storage.for_user(text)),
            ("user_id", lambda: exact_storage.erase_user(text)),
            ("user_id", lambda: exact_storage.import_user([], text)),
            ("content", lambda: alice.chunks.add(text)),
            ("content", lambda: alice.chunks.update("here", content=text)),
            ("id", lambda: alice.chunks.add("text", id=text)),
            ("session_id", lambda: alice.chunks.add("text", session_id=text)),
            ("id", lambda: alice.chunks.get(text)),
            ("id", lambda: alice.chunks.get_many(["here", text])),
            ("id", lambda: alice.chunks.update(text, importance=1)),
            ("id", lambda: alice.chunks.delete(text)),
            ("id", lambda: alice.chunks.delete_many([text])),
            ("session_id", lambda: alice.chunks.list(session_id=text)),
            ("content", lambda: alice.chunks.list(F.content == text)),
            ("content", lambda: alice.chunks.count(F.content.in_([text]))),
            ("id", lambda: alice.sessions.start(id=text)),
            ("id", lambda: alice.sessions.get(text)),
            ("id", lambda: alice.sessions.touch(text)),
            ("id", lambda: alice.sessions.end(text)),
            ("key", lambda: alice.procedural.set(text, 1)),
            ("source_chunk_id", lambda: alice.procedural.set("key", 1, source_chunk_id=text)),
            ("key", lambda: alice.procedural.get(text)),
            ("key", lambda: alice.procedural.delete(text)),
            ("id", lambda: alice.jobs.get(text)),
            ("query", lambda: alice.search(text)),
            ("texts[0]", lambda: alice.embed([text])),
        ]
        with statements(exact_storage.engine) as sent:
            for argument, call in calls:
                with pytest.raises(ValidationError) as caught:
                    call()
                assert argument in str(caught.value)
        assert sent == []

    @pytest.mark.parametrize("text", [BAD_TEXTS["NUL"], BAD_TEXTS["surrogate"]], ids=["NUL", "surrogate"])
    def test_json_obeys_it_too(self, exact_storage: StorageLayer, alice: UserMemory, text: str) -> None:
        chunk = alice.chunks.add("text")
        for value in ({"a": text}, {text: 1}, {"a": [{"b": text}]}):
            with refused(exact_storage, ValidationError, "metadata"):
                alice.chunks.add("text", metadata=value)
            with refused(exact_storage, ValidationError, "metadata"):
                alice.chunks.update(chunk.id, metadata=value)
            with refused(exact_storage, ValidationError, "value"):
                alice.procedural.set("key", value)


class TestMetadata:
    VALUE: dict[str, Any] = {"a": None, "b": [], "c": {"d": 1}, "e": "ü", "": 0, "f": 1.5, "g": True, "h": 2**63 - 1}  # noqa: RUF012

    def test_any_json_object_comes_back_equal(self, storage: StorageLayer) -> None:
        alice = storage.for_user("user_alice")
        chunk = alice.chunks.add("text", metadata=self.VALUE)
        found = alice.chunks.get(chunk.id)
        assert found is not None
        assert found.metadata == self.VALUE
        assert [type(value) for value in found.metadata.values()] == [type(value) for value in self.VALUE.values()]
        assert alice.chunks.update(chunk.id, metadata={"z": [None]}).metadata == {"z": [None]}
        assert alice.search("text")[0].chunk.metadata == {"z": [None]}

    def test_a_user_id_in_metadata_is_plain_metadata(self, storage: StorageLayer) -> None:
        alice, bob = storage.for_user("user_alice"), storage.for_user("user_bob")
        theirs = {"user_id": "user_bob", "session_id": "x", "memory_type": "working", "importance": 0, "created_us": 1}
        chunk = alice.chunks.add("tea", metadata=theirs)
        alice.chunks.update(chunk.id, metadata=theirs, importance=0.9)
        storage.sync()
        assert bob.search("tea") == []
        assert bob.chunks.list().items == []
        (hit,) = alice.search("tea", where=(F.memory_type == "episodic") & (F.importance > 0.8))
        assert hit.chunk.metadata == theirs
        assert (hit.chunk.user_id, hit.chunk.session_id) == ("user_alice", chunk.session_id)


class TestTimes:
    @pytest.mark.parametrize(
        "when",
        [
            datetime(2026, 1, 1, 3, 4, 5, 678901, timezone(timedelta(hours=9))),
            datetime(2026, 1, 1, 3, 4, 5, 0, UTC),
            datetime(1969, 7, 20, 20, 17, 40, 1, timezone(timedelta(hours=-5, minutes=-30))),
            datetime(1, 1, 1, tzinfo=UTC),
            datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
        ],
        ids=["+09:00", "microsecond-0", "before-1970", "first", "last"],
    )
    def test_the_same_instant_comes_back_in_utc(self, storage: StorageLayer, when: datetime) -> None:
        alice = storage.for_user("user_alice")
        session = alice.sessions.start(started_at=when)
        chunk = alice.chunks.add("text", created_at=when, session_id=session.id)
        found = alice.chunks.get(chunk.id)
        started = alice.sessions.get(session.id)
        assert found is not None
        assert started is not None
        for time in (chunk.created_at, found.created_at, session.started_at, started.started_at):
            assert time == when
            assert time.tzinfo is UTC
        assert [hit.chunk.id for hit in alice.search("text", where=F.created_at == when)] == [chunk.id]
        assert alice.chunks.count(F.created_at.between(when, when)) == 1

    def test_a_naive_one_is_refused(self, exact_storage: StorageLayer, alice: UserMemory) -> None:
        naive = datetime(2026, 1, 1)  # noqa: DTZ001 - on purpose
        for call in (
            lambda: alice.chunks.add("text", created_at=naive),
            lambda: alice.chunks.list(F.created_at > naive),
            lambda: alice.sessions.start(started_at=naive),
        ):
            with refused(exact_storage, ValidationError, "time zone"):
                call()


class TestRead:
    def test_what_is_absent_or_anothers_is_the_same(self, alice: UserMemory, bob: UserMemory) -> None:
        theirs = bob.chunks.add("theirs")
        assert alice.chunks.get("absent") is None
        assert alice.chunks.get(theirs.id) is None
        assert alice.chunks.get_many([theirs.id, "absent"]) == []
        assert alice.chunks.count(F.id == theirs.id) == 0
        assert not alice.chunks.delete(theirs.id)
        messages = []
        for id in ("absent", theirs.id):
            with pytest.raises(NotFoundError) as caught:
                alice.chunks.update(id, importance=1)
            messages.append(str(caught.value).replace(id, "…"))
        assert messages[0] == messages[1]

    def test_get_many_in_the_order_asked_each_once(self, alice: UserMemory) -> None:
        one, two, three = alice.chunks.add_many([NewChunk("one"), NewChunk("two"), NewChunk("three")])
        assert alice.chunks.get_many([three.id, "absent", one.id, three.id, two.id]) == [three, one, two]
        assert alice.chunks.get_many(iter([two.id])) == [two]

    @pytest.mark.parametrize("ids", ["abc", b"abc", 7, None])
    def test_what_is_no_list_of_ids(self, exact_storage: StorageLayer, alice: UserMemory, ids: Any) -> None:
        for call in (alice.chunks.get_many, alice.chunks.delete_many):
            with refused(exact_storage, ValidationError, "ids"):
                call(ids)

    def test_count(self, alice: UserMemory) -> None:
        assert alice.chunks.count() == 0
        alice.chunks.add_many([NewChunk("one", importance=0.1), NewChunk("two", importance=0.9)])
        assert alice.chunks.count() == 2
        assert alice.chunks.count(F.importance > 0.5) == 1

    def test_a_filter_that_lets_nothing_through_sends_nothing(self, storage: StorageLayer) -> None:
        alice = storage.for_user("user_alice")
        alice.chunks.add("text", id="here")
        nothing = F.id.in_([])
        with statements(storage.engine) as sent:
            assert alice.chunks.count(nothing) == 0
            assert alice.chunks.list(nothing).items == []
            assert alice.chunks.list(nothing & (F.importance > 0), order="-created").next is None
            assert alice.search("text", where=nothing) == []
            assert alice.search(embedding=[1.0] * 64, where=~(F.id.in_([]) | ~F.id.in_([]))) == []
            assert alice.search(where=nothing, include_compressed=True) == []
            assert alice.chunks.delete_many(nothing) == 0
        assert sent == []

    @pytest.mark.parametrize("bad", [True, "importance > 0.5", {"importance": 1}, F.importance])
    def test_what_is_no_filter(self, exact_storage: StorageLayer, alice: UserMemory, bad: Any) -> None:
        for call in (
            lambda: alice.chunks.count(bad),
            lambda: alice.chunks.list(bad),
            lambda: alice.search(where=bad),
        ):
            with refused(exact_storage, ValidationError, "where"):
                call()

    def test_an_unknown_field_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="topic"):
            F.topic == "style"  # noqa: B015


class TestList:
    @pytest.fixture
    def twelve(self, alice: UserMemory) -> list[Chunk]:
        return alice.chunks.add_many(
            NewChunk(
                f"text {number}",
                created_at=EPOCH + timedelta(hours=number),
                memory_type=("episodic", "semantic", "procedural")[number % 3],
            )
            for number in range(12)
        )

    def pages(self, user: UserMemory, **options: Any) -> Iterator[list[Chunk]]:
        after: str | None = None
        while True:
            page = user.chunks.list(after=after, **options)
            yield page.items
            if page.next is None:
                return
            after = page.next

    def test_oldest_or_newest_first(self, alice: UserMemory, twelve: list[Chunk]) -> None:
        assert alice.chunks.list().items == alice.chunks.list(order="created").items == twelve
        assert alice.chunks.list(order="-created").items == twelve[::-1]
        assert alice.chunks.list().next is None

    @pytest.mark.parametrize("order", ["created", "-created"])
    def test_pages(self, alice: UserMemory, twelve: list[Chunk], order: str) -> None:
        pages = list(self.pages(alice, limit=5, order=order))
        assert [len(page) for page in pages] == [5, 5, 2]
        expected = twelve if order == "created" else twelve[::-1]
        assert [chunk for page in pages for chunk in page] == expected
        # No empty page at the end.
        assert [len(page) for page in self.pages(alice, limit=6, order=order)] == [6, 6]

    def test_narrowed(self, alice: UserMemory, twelve: list[Chunk]) -> None:
        semantic = [chunk for chunk in twelve if chunk.memory_type == "semantic"]
        assert alice.chunks.list(memory_type="semantic").items == semantic
        assert alice.chunks.list(F.memory_type == "semantic", limit=2).items == semantic[:2]
        late = F.created_at >= EPOCH + timedelta(hours=6)
        assert alice.chunks.list(late, memory_type="semantic").items == semantic[2:]
        assert alice.chunks.list(session_id=twelve[0].session_id).items == twelve
        assert alice.chunks.list(session_id="sess_none").items == []
        assert [page for (page,) in self.pages(alice, where=late, limit=1)] == twelve[6:]

    def test_50_chunks_of_one_time_by_pages_of_7_with_writes_between(self, alice: UserMemory) -> None:
        there = {f"id {number:02}" for number in range(50)}
        alice.chunks.add_many(NewChunk("text", id=id, created_at=EPOCH) for id in sorted(there))
        for order in ("created", "-created"):
            seen: list[str] = []
            pages = self.pages(alice, limit=7, order=order)
            for turn, page in enumerate(pages):
                seen += [chunk.id for chunk in page]
                alice.chunks.add("before all", id=f"a {order} {turn}", created_at=EPOCH - timedelta(days=1))
                alice.chunks.add("among them", id=f"id {order} {turn}", created_at=EPOCH)
                alice.chunks.delete(f"a {order} {turn}")
            assert len(seen) == len(set(seen))
            assert [id for id in seen if id in there] == sorted(there, reverse=order == "-created")
            alice.chunks.delete_many(F.content != "text")

    def test_compressed_ones_are_left_out_unless_asked_for(
        self, exact_storage: StorageLayer, alice: UserMemory, twelve: list[Chunk]
    ) -> None:
        table: Any = MemoryChunk.__table__  # type: ignore[attr-defined]
        with exact_storage.engine.begin() as connection:
            connection.execute(table.update().where(table.c.id == twelve[0].id).values(compressed=True))
        rest, every = [chunk.id for chunk in twelve[1:]], [chunk.id for chunk in twelve]

        def listed(**options: Any) -> list[str]:
            return [chunk.id for chunk in alice.chunks.list(**options).items]

        assert listed() == rest
        assert listed(include_compressed=True) == every
        assert listed(where=F.compressed == True) == every[:1]  # noqa: E712
        assert listed(where=F.compressed.in_([True, False])) == every
        assert alice.chunks.count() == 12
        assert {hit.chunk.id for hit in alice.search(k=99)} == set(rest)
        assert {hit.chunk.id for hit in alice.search(k=99, include_compressed=True)} == set(every)
        assert every[0] not in {hit.chunk.id for hit in alice.search("text", k=99)}
        assert every[0] in {hit.chunk.id for hit in alice.search("text", k=99, include_compressed=True)}
        assert [hit.chunk.id for hit in alice.search("text", where=F.compressed == True)] == every[:1]  # noqa: E712

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"order": "newest"}, ("order", "'newest'", "-created")),
            ({"limit": 0}, ("limit", "0")),
            ({"limit": -1}, ("limit", "-1")),
            ({"limit": 1.5}, ("limit", "1.5")),
            ({"limit": True}, ("limit", "True")),
            ({"memory_type": "other"}, ("memory_type", "'other'")),
            ({"after": 7}, ("after", "7")),
            ({"after": ""}, ("after", "''")),
            ({"after": "no cursor"}, ("after", "'no cursor'")),
            ({"after": "ü"}, ("after", "'ü'")),
            ({"after": "WyJhIl0"}, ("after",)),  # ["a"]: one key, and a list of preferences'
            ({"after": "WyJhIiwgImIiXQ"}, ("after",)),  # ["a", "b"]: no time
            ({"after": "W3sidCI6ICIyMDI2LTAxLTAxIn0sICJiIl0"}, ("after",)),  # a naive time
            ({"after": "W3sidCI6ICIyMDI2LTAxLTAxVDAwOjAwOjAwKzAwOjAwIn0sICJcdWQ4MDAiXQ"}, ("after",)),  # a surrogate
            ({"after": "W1tbW1tbW1tb" * 20_000}, ("after",)),
        ],
    )
    def test_a_bad_argument_is_named(
        self, exact_storage: StorageLayer, alice: UserMemory, options: dict[str, Any], words: tuple[str, ...]
    ) -> None:
        alice.chunks.add("text")
        with refused(exact_storage, ValidationError, *words):
            alice.chunks.list(**options)

    def test_the_largest_limit(self, alice: UserMemory, twelve: list[Chunk]) -> None:
        assert alice.chunks.list(limit=2**63 - 1).items == twelve
        assert len(alice.search(k=2**63 - 1)) == 12
        assert len(alice.search("text", k=2**63 - 1)) == 8


class TestUpdate:
    def test_what_is_given_changes(self, alice: UserMemory) -> None:
        chunk = alice.chunks.add("old", metadata={"a": 1}, importance=0.1, created_at=EPOCH)
        updated = alice.chunks.update(chunk.id, importance=0.9)
        assert updated == chunk.model_copy(update={"importance": 0.9, "version": 2, "updated_at": updated.updated_at})
        assert updated.updated_at > chunk.updated_at
        updated = alice.chunks.update(chunk.id, metadata={"b": 2})
        assert (updated.metadata, updated.version) == ({"b": 2}, 3)
        updated = alice.chunks.update(chunk.id, content="brand new")
        assert (updated.content, updated.token_count, updated.version) == ("brand new", 3, 4)
        assert alice.chunks.get(chunk.id) == updated
        assert counts(alice, chunk.session_id) == (1, 3)

    def test_the_handle_returns_the_metadata_emptied(self, alice: UserMemory) -> None:
        chunk = alice.chunks.add("text", metadata={"a": 1})
        assert alice.chunks.update(chunk.id, metadata={}).metadata == {}

    def test_the_first_of_two_from_one_version_wins(self, exact_storage: StorageLayer, alice: UserMemory) -> None:
        chunk = alice.chunks.add("text")
        assert alice.chunks.update(chunk.id, content="first", expected_version=1).version == 2
        with refused(exact_storage, ConflictError, chunk.id, "version 2", "expected 1"):
            alice.chunks.update(chunk.id, content="second", expected_version=1)

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({}, ("content", "importance", "metadata")),
            ({"expected_version": 1}, ("content", "importance", "metadata")),
            ({"importance": 2}, ("importance", "2")),
            ({"content": " "}, ("content", "' '")),
            ({"metadata": {"a": math.inf}}, ("metadata['a']", "inf")),
            ({"importance": 1, "expected_version": 0}, ("expected_version", "0")),
            ({"importance": 1, "expected_version": "1"}, ("expected_version", "'1'")),
        ],
    )
    def test_a_bad_argument_is_named(
        self, exact_storage: StorageLayer, alice: UserMemory, fields: dict[str, Any], words: tuple[str, ...]
    ) -> None:
        alice.chunks.add("text", id="here")
        with refused(exact_storage, ValidationError, *words):
            alice.chunks.update("here", **fields)

    def test_what_is_absent_is_not_found(self, exact_storage: StorageLayer, alice: UserMemory, bob: UserMemory) -> None:
        bob.chunks.add("theirs", id="theirs")
        for id in ("absent", "theirs"):
            with refused(exact_storage, NotFoundError, id):
                alice.chunks.update(id, content="mine now", metadata={})

    @pytest.mark.parametrize("exact_limit", [0, 20_000], ids=["index", "exact"])
    def test_only_the_new_content_is_found(self, open_vault: OpenVault, exact_limit: int) -> None:
        layer = open_vault(exact_limit=exact_limit)
        alice = layer.for_user("user_alice")
        chunk = alice.chunks.add("drinks green tea")
        alice.chunks.add("plays chess")
        alice.chunks.update(chunk.id, content="climbs steep mountains")
        (old,) = alice.search("drinks green tea", where=F.id == chunk.id)
        (new,) = alice.search("climbs steep mountains", k=1)
        assert (old.chunk.content, new.chunk.content) == ("climbs steep mountains", "climbs steep mountains")
        assert old.similarity is not None
        assert new.similarity is not None
        assert old.similarity < 0.5 < 0.99 < new.similarity
        assert alice.search("drinks green tea", min_similarity=0.5) == []
        assert layer.health()["debts"] == 0

    @pytest.mark.leaves_debts
    @pytest.mark.parametrize("exact_limit", [0, 1, 20_000])
    def test_only_the_new_content_is_found_before_the_index_has_caught_up(
        self, open_vault: OpenVault, exact_limit: int
    ) -> None:
        layer = open_vault(exact_limit=exact_limit, indexing="manual")
        alice = layer.for_user("user_alice")
        chunk = alice.chunks.add("drinks green tea")
        alice.chunks.add_many([NewChunk("plays chess"), NewChunk("reads at night")])
        layer.sync()
        alice.chunks.update(chunk.id, content="climbs steep mountains")
        assert alice.search("climbs steep mountains", k=1)[0].chunk.content == "climbs steep mountains"
        assert alice.search("drinks green tea", min_similarity=0.5) == []

    def test_a_new_vector_for_the_same_content(self, bare_storage: StorageLayer) -> None:
        alice = bare_storage.for_user("user_alice")
        chunk = alice.chunks.add("text", embedding=[1.0, 0.0])
        updated = alice.chunks.update(chunk.id, embedding=[0.0, 2.0])
        assert (updated.content, updated.version) == ("text", 2)
        (hit,) = alice.search(embedding=[0.0, 1.0])
        assert hit.similarity == 1.0
        assert bare_storage.sync().owed == 0

    def test_metadata_alone_owes_the_index_nothing(self, open_vault: OpenVault, index_name: str) -> None:
        layer = open_vault(indexing="manual")
        alice = layer.for_user("user_alice")
        chunk = alice.chunks.add("text")
        assert layer.health()["debts"] == (1 if index_name == "chroma" else 0)
        layer.sync()
        alice.chunks.update(chunk.id, metadata={"a": 1})
        assert layer.health()["debts"] == 0
        alice.chunks.update(chunk.id, importance=0.9)
        assert layer.health()["debts"] == (1 if index_name == "chroma" else 0)
        layer.sync()

    def test_importance_reaches_the_index(self, open_vault: OpenVault) -> None:
        layer = open_vault(exact_limit=0)
        alice = layer.for_user("user_alice")
        chunk = alice.chunks.add("text", importance=0.1)
        alice.chunks.update(chunk.id, importance=0.9)
        assert [hit.chunk.id for hit in alice.search("text", where=F.importance > 0.5)] == [chunk.id]
        assert alice.search("text", where=F.importance < 0.5) == []


class TestProceduralChunks:
    def test_have_no_vector_and_are_in_no_index(self, storage: StorageLayer) -> None:
        alice = storage.for_user("user_alice")
        rule = alice.chunks.add("never before noon", memory_type="procedural")
        chunk = alice.chunks.add("likes tea")
        assert (rule.chroma_id, chunk.chroma_id) == (None, chunk.id)
        alice.chunks.update(rule.id, content="never before one", importance=1)
        storage.sync()
        stats = storage.stats()
        assert (stats["rows"]["memory_chunks"], stats["vectors"], stats["index_records"]) == (2, 1, 1)
        assert [hit.chunk.id for hit in alice.search("never before one", k=9)] == [chunk.id]
        assert alice.search("never", where=F.memory_type == "procedural") == []
        assert [one.id for one in alice.chunks.list(memory_type="procedural").items] == [rule.id]
        assert alice.search(where=F.memory_type == "procedural")[0].chunk.content == "never before one"
        with refused(storage, ValidationError, "embedding", "procedural"):
            alice.chunks.update(rule.id, embedding=[1.0] * 64)
        assert alice.chunks.delete(rule.id)
        assert storage.stats()["index_records"] == 1


class TestDelete:
    def test_one(self, storage: StorageLayer) -> None:
        alice = storage.for_user("user_alice")
        gone, kept = alice.chunks.add("drinks green tea"), alice.chunks.add("plays chess")
        assert alice.chunks.delete(gone.id) is True
        assert alice.chunks.delete(gone.id) is False
        assert alice.chunks.get(gone.id) is None
        assert [hit.chunk for hit in alice.search("drinks green tea")] == [kept]
        assert counts(alice, kept.session_id) == (1, kept.token_count)
        assert storage.stats()["vectors"] == 1
        assert storage.stats()["index_records"] == 1

    def test_many_by_ids(self, alice: UserMemory, bob: UserMemory) -> None:
        one, two, three = alice.chunks.add_many([NewChunk("one"), NewChunk("two"), NewChunk("three")])
        theirs = bob.chunks.add("theirs")
        assert alice.chunks.delete_many([one.id, two.id, one.id, "absent", theirs.id]) == 2
        assert alice.chunks.list().items == [three]
        assert bob.chunks.list().items == [theirs]
        assert counts(alice, three.session_id) == (1, three.token_count)

    def test_many_by_filter(self, storage: StorageLayer) -> None:
        alice, bob = storage.for_user("user_alice"), storage.for_user("user_bob")
        for user in (alice, bob):
            user.chunks.add_many(NewChunk(f"text {number}", importance=number / 10) for number in range(10))
        assert alice.chunks.delete_many(F.importance < 0.5) == 5
        assert [alice.chunks.count(), bob.chunks.count()] == [5, 10]
        assert alice.chunks.delete_many(F.user_id == "user_bob") == 0
        assert storage.stats()["index_records"] == 15

    def test_a_preference_learnt_from_a_deleted_chunk_stays(self, alice: UserMemory) -> None:
        chunk = alice.chunks.add("text")
        alice.procedural.set("key", 1, source_chunk_id=chunk.id)
        alice.chunks.delete(chunk.id)
        preference = alice.procedural.get("key")
        assert preference is not None
        assert (preference.value, preference.source_chunk_id) == (1, None)

    def test_an_id_may_be_used_again_by_anybody(self, storage: StorageLayer) -> None:
        alice, bob = storage.for_user("user_alice"), storage.for_user("user_bob")
        alice.chunks.add("mine", id="one")
        alice.chunks.delete("one")
        theirs = bob.chunks.add("theirs", id="one")
        assert alice.search("theirs") == []
        assert [hit.chunk for hit in bob.search("theirs")] == [theirs]
        assert dump(storage)["index_outbox"] == []


class TestSeveralUsers:
    NAMES = ("john_doe", "john-doe", "a", "ab", "%", "_", "*", 'u"1', "u'1", "Ä", "ä", "A\u0308", "user a", "user a ")

    def test_names_are_equal_or_different_and_nothing_between(self, storage: StorageLayer) -> None:
        users = [storage.for_user(name) for name in self.NAMES]
        for user in users:
            user.chunks.add(f"likes tea, says {user.user_id}", id=f"of {user.user_id}")
            user.procedural.set("name", user.user_id)
        assert list(storage.user_ids()) == sorted(self.NAMES)
        for user in users:
            own = [f"of {user.user_id}"]
            assert [chunk.id for chunk in user.chunks.list().items] == own
            assert [hit.chunk.id for hit in user.search("likes tea", k=99)] == own
            assert user.chunks.count(F.user_id.in_(list(self.NAMES))) == 1
            preference = user.procedural.get("name")
            assert preference is not None
            assert preference.value == user.user_id
        for user in users:
            assert storage.erase_user(user.user_id).counts["memory_chunks"] == 1
        assert list(storage.user_ids()) == []
        assert storage.stats()["index_records"] == 0

    @pytest.mark.parametrize("name", ["", " ", None])
    def test_a_blank_name_is_refused_before_any_io(self, exact_storage: StorageLayer, name: Any) -> None:
        with statements(exact_storage.engine) as sent, pytest.raises(ValidationError, match="user_id"):
            exact_storage.for_user(name)
        assert sent == []
