"""What does a transaction promise: several writes, one commit, or nothing?"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from sqlalchemy import exc

from memvault import (
    ConfigurationError,
    ConflictError,
    F,
    NewChunk,
    NotFoundError,
    StorageError,
    StorageLayer,
    UserMemory,
    ValidationError,
)
from tests.conftest import OpenVault
from tests.support import dump, refused, statements


class Abort(Exception):
    """Raised by a test to end a transaction."""


def test_all_of_it_is_committed_at_once(storage: StorageLayer) -> None:
    alice = storage.for_user("user_alice")
    before = dump(storage)
    with statements(storage.engine) as sent, alice.transaction() as tx:
        assert tx.user_id == "user_alice"
        session = tx.sessions.start()
        chunk = tx.chunks.add("likes tea", session_id=session.id)
        tx.chunks.add_many([NewChunk("plays chess"), NewChunk("rule", memory_type="procedural")])
        tx.chunks.update(chunk.id, importance=0.9)
        tx.procedural.set("key", 1, source_chunk_id=chunk.id)
        job = tx.jobs.enqueue()
        # Within, all of it is there; outside, nothing yet.
        assert tx.chunks.count() == 3
        assert [hit.chunk.content for hit in tx.search("likes tea", k=1)] == ["likes tea"]
        assert alice.chunks.count() == 0
        assert alice.search("likes tea") == []
        assert dump(storage) == before
    assert sum(one == "BEGIN IMMEDIATE" for one in sent) <= 2  # one, and one to settle what the index was owed
    assert alice.chunks.count() == 3
    assert alice.search("likes tea", k=1)[0].chunk.importance == 0.9
    assert alice.jobs.get(job.id) == job
    assert storage.stats()["index_records"] == 2


def test_an_error_undoes_all_of_it(storage: StorageLayer) -> None:
    alice = storage.for_user("user_alice")
    kept = alice.chunks.add("likes tea")
    before = dump(storage)
    with pytest.raises(Abort), alice.transaction() as tx:
        tx.chunks.add("plays chess")
        tx.chunks.update(kept.id, content="climbs mountains")
        tx.chunks.delete(kept.id)
        tx.procedural.set("key", 1)
        tx.sessions.start()
        raise Abort
    assert dump(storage) == before
    assert [hit.chunk for hit in alice.search("likes tea")] == [kept]
    assert storage.stats()["index_records"] == 1
    # And the next transaction works.
    with alice.transaction() as tx:
        tx.chunks.add("plays chess")
    assert alice.chunks.count() == 2


def test_a_call_that_fails_undoes_itself_only(storage: StorageLayer) -> None:
    alice, bob = storage.for_user("user_alice"), storage.for_user("user_bob")
    bob.chunks.add("theirs", id="taken")
    with alice.transaction() as tx:
        tx.chunks.add("one", id="one")
        failures: list[tuple[type[Exception], Callable[[], object]]] = [
            (ConflictError, lambda: tx.chunks.add_many([NewChunk("two", id="two"), NewChunk("x", id="taken")])),
            (NotFoundError, lambda: tx.chunks.add("x", session_id="sess_none")),
            (NotFoundError, lambda: tx.procedural.set("key", 1, source_chunk_id="taken")),
            (ValidationError, lambda: tx.chunks.add("")),
            (ConflictError, lambda: tx.chunks.update("one", content="x", expected_version=7)),
            (ConflictError, lambda: tx.sessions.start(id=tx.sessions.list().items[0].id)),
        ]
        for error, call in failures:
            with pytest.raises(error):
                call()
        tx.chunks.add("three", id="three")
    assert [chunk.id for chunk in alice.chunks.list().items] == ["one", "three"]
    assert alice.sessions.list().items[0].memory_count == 2
    assert alice.procedural.list().items == []
    assert {hit.chunk.id for hit in alice.search("three")} == {"one", "three"}
    assert storage.health()["debts"] == 0


def test_a_first_write_that_fails_leaves_no_default_session(exact_storage: StorageLayer, alice: UserMemory) -> None:
    bob = exact_storage.for_user("user_bob")
    bob.chunks.add("theirs", id="taken")
    with alice.transaction() as tx:
        with pytest.raises(ConflictError):
            tx.chunks.add("x", id="taken")
        assert tx.sessions.list().items == []
        assert tx.chunks.add("mine").session_id == tx.sessions.list().items[0].id
    assert alice.chunks.count() == 1


def test_it_begins_with_the_first_call_that_reaches_the_database(
    exact_storage: StorageLayer, alice: UserMemory
) -> None:
    with statements(exact_storage.engine) as sent:
        with alice.transaction():
            pass
        with alice.transaction() as tx:
            tx.embed(["text"])
            assert tx.chunks.add_many([]) == []
            assert tx.chunks.count(F.id.in_([])) == 0
            with pytest.raises(ValidationError):
                tx.chunks.add("")
    assert sent == []
    assert exact_storage.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_embeds_before_it_begins(exact_storage: StorageLayer, alice: UserMemory) -> None:
    with alice.transaction() as tx:
        vector = tx.embed(["likes tea"])[0]
        chunk = tx.chunks.add("likes tea", embedding=vector)
        assert tx.search("likes tea")[0].chunk == chunk


@pytest.mark.parametrize("wrong", ["chunk", "procedural", "session", "second"])
def test_a_write_beside_an_open_transaction_is_refused_and_not_waited_for(
    exact_storage: StorageLayer, alice: UserMemory, wrong: str
) -> None:
    bob = exact_storage.for_user("user_bob")

    def beside() -> None:
        if wrong == "chunk":
            alice.chunks.add("beside")
        elif wrong == "procedural":
            bob.procedural.set("key", 1)
        elif wrong == "session":
            bob.sessions.start()
        else:
            with bob.transaction() as second:
                second.chunks.add("beside")

    with alice.transaction() as tx:
        tx.chunks.add("within")
        with pytest.raises(ConfigurationError, match="transaction"):
            beside()
    beside()
    assert alice.chunks.count(F.content == "within") == 1


def test_a_transaction_in_a_transaction_is_refused(alice: UserMemory) -> None:
    with alice.transaction() as tx:
        tx.chunks.add("within")
        with pytest.raises(ConfigurationError, match="open already"), tx.transaction():
            pass
    assert alice.chunks.count() == 1


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
def test_the_handle_ends_with_its_block(alice: UserMemory, used: bool) -> None:
    with alice.transaction() as tx:
        if used:
            tx.chunks.add("within")
    for call in (tx.chunks.count, lambda: tx.chunks.add("after"), tx.sessions.start, lambda: tx.search("within")):
        with pytest.raises(ConfigurationError, match="ended"):
            call()
    assert alice.chunks.count() == used


def test_counts_after_a_rollback_within(exact_storage: StorageLayer, alice: UserMemory) -> None:
    session = alice.sessions.start()
    with alice.transaction() as tx:
        tx.chunks.add("aaaa", session_id=session.id, id="one")
        with pytest.raises(ConflictError):
            tx.chunks.add("aaaa", session_id=session.id, id="one")
        tx.chunks.add("aaaa", session_id=session.id, id="two")
    found = alice.sessions.get(session.id)
    assert found is not None
    assert (found.memory_count, found.total_tokens) == (2, 2)


@pytest.mark.leaves_debts
def test_a_search_within_sees_what_is_not_committed(open_vault: OpenVault) -> None:
    layer = open_vault(exact_limit=3, indexing="manual")
    alice = layer.for_user("user_alice")
    alice.chunks.add_many([NewChunk(f"text {number}", id=f"id {number}") for number in range(9)])
    layer.sync()
    with alice.transaction() as tx:
        tx.chunks.update("id 1", content="climbs mountains")
        tx.chunks.delete("id 2")
        assert tx.search("climbs mountains", k=1)[0].chunk.id == "id 1"
        assert "id 2" not in {hit.chunk.id for hit in tx.search("text 2", k=99)}
        assert "id 2" in {hit.chunk.id for hit in alice.search("text 2", k=99)}
        assert alice.search("text 1", k=1)[0].chunk.content == "text 1"


def test_threads_write_one_after_the_other(storage: StorageLayer) -> None:
    alice = storage.for_user("user_alice")
    session = alice.sessions.start()
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for turn in range(5):
                with alice.transaction() as tx:
                    tx.chunks.add(f"text {name} {turn}", session_id=session.id)
                    tx.procedural.set("last", [name, turn])
                alice.chunks.add(f"more {name} {turn}", session_id=session.id)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    found = alice.sessions.get(session.id)
    assert found is not None
    assert found.memory_count == alice.chunks.count() == storage.stats()["index_records"] == 60


def test_a_closed_vault_takes_nothing(open_exact: OpenVault) -> None:
    layer = open_exact()
    alice = layer.for_user("user_alice")
    layer.close()
    for call in (lambda: alice.chunks.add("text"), alice.chunks.count, lambda: alice.search("text"), layer.sync):
        with pytest.raises(StorageError, match="closed"):
            call()
    with pytest.raises(StorageError, match="closed"), alice.transaction() as tx:
        tx.chunks.count()
    assert layer.health()["ok"] is False


def test_refusals_leave_no_row(exact_storage: StorageLayer, alice: UserMemory) -> None:
    with refused(exact_storage, NotFoundError), alice.transaction() as tx:
        tx.chunks.add("one")
        tx.sessions.end("sess_none")


def test_the_callers_own_errors_pass_unchanged(exact_storage: StorageLayer, alice: UserMemory) -> None:
    theirs = exc.IntegrityError("INSERT INTO orders …", {}, Exception("UNIQUE constraint failed: orders.id"))
    before = dump(exact_storage)
    with pytest.raises(exc.IntegrityError) as caught, alice.transaction() as tx:
        tx.chunks.add("one")
        raise theirs
    assert caught.value is theirs
    assert dump(exact_storage) == before
