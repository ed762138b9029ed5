"""How does memvault take part in the caller's own transaction? On both databases, through a Session of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session as PlainSession
from sqlalchemy.orm import registry, scoped_session, sessionmaker
from sqlmodel import Field, Session, SQLModel, select

import memvault
from memvault import ConfigurationError, ConflictError, NewChunk, NotFoundError, StorageLayer, ValidationError, models
from tests.conftest import OpenVault
from tests.support import dump, statements


class HostBase(SQLModel, registry=registry()):
    """The tables of a service that uses memvault."""


class Order(HostBase, table=True):
    """A table of the host's, written in the same transactions."""

    __tablename__ = "host_orders"

    number: int = Field(primary_key=True)
    item: str


@pytest.fixture
def host(storage: StorageLayer) -> Iterator[StorageLayer]:
    """A vault in whose database a host has a table, too."""
    HostBase.metadata.create_all(storage.engine)
    yield storage
    storage.sync()  # what a Session's transaction owes is paid later
    HostBase.metadata.drop_all(storage.engine)


def orders(engine: Engine) -> list[int]:
    with Session(engine.execution_options(memvault_read_only=True)) as session:
        return sorted(order.number for order in session.exec(select(Order)))


def contents(storage: StorageLayer, user_id: str = "user_alice") -> list[str]:
    return [chunk.content for chunk in storage.for_user(user_id).chunks.list().items]


def test_the_callers_commit_commits_all(host: StorageLayer) -> None:
    with Session(host.engine) as session:
        alice = host.for_user("user_alice", sql_session=session)
        session.add(Order(number=1, item="tea"))
        conversation = alice.sessions.start()
        chunk = alice.chunks.add("likes tea", session_id=conversation.id)
        alice.chunks.add_many([NewChunk("plays chess"), NewChunk("rule", memory_type="procedural")])
        alice.chunks.update(chunk.id, importance=0.9)
        alice.procedural.set("key", 1, source_chunk_id=chunk.id)
        job = alice.jobs.enqueue()
        # Within, all of it is there; outside, nothing.
        assert alice.chunks.count() == 3
        assert [hit.chunk.content for hit in alice.search("likes tea", k=1)] == ["likes tea"]
        assert contents(host) == []
        assert orders(host.engine) == []
        session.commit()
    assert contents(host) == ["likes tea", "plays chess", "rule"]
    assert orders(host.engine) == [1]
    outside = host.for_user("user_alice")
    assert outside.search("likes tea", k=1)[0].chunk.importance == 0.9
    assert outside.jobs.get(job.id) == job
    assert outside.sessions.get(conversation.id) is not None
    host.sync()
    assert host.stats()["index_records"] == 2


def test_the_callers_rollback_undoes_all(host: StorageLayer) -> None:
    kept = host.for_user("user_alice").chunks.add("likes tea")
    host.sync()
    before = dump(host)
    with Session(host.engine) as session:
        alice = host.for_user("user_alice", sql_session=session)
        session.add(Order(number=1, item="tea"))
        alice.chunks.add("plays chess")
        alice.chunks.update(kept.id, content="climbs mountains")
        alice.procedural.set("key", 1)
        session.rollback()
        assert dump(host) == before
        # The same handle goes on, in the Session's next transaction.
        alice.chunks.delete(kept.id)
        session.rollback()
    assert dump(host) == before
    assert orders(host.engine) == []
    assert [hit.chunk.content for hit in host.for_user("user_alice").search("likes tea")] == ["likes tea"]
    assert host.sync().owed == 0


def test_a_savepoint_of_the_callers_undoes_what_came_after_it(host: StorageLayer) -> None:
    with Session(host.engine) as session:
        alice = host.for_user("user_alice", sql_session=session)
        alice.chunks.add("before")
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            alice.chunks.add("within")
            session.add(Order(number=1, item="tea"))
            session.flush()
            raise ZeroDivisionError
        assert [chunk.content for chunk in alice.chunks.list().items] == ["before"]
        with session.begin_nested():
            alice.chunks.add("kept")
        alice.chunks.add("after")
        session.commit()
    assert contents(host) == ["before", "kept", "after"]
    assert orders(host.engine) == []
    host.sync()
    assert host.stats()["index_records"] == host.stats()["vectors"] == 3
    assert {hit.chunk.content for hit in host.for_user("user_alice").search("within")} == {"before", "kept", "after"}


@pytest.mark.parametrize(
    "fails",
    [
        lambda alice: alice.chunks.add_many([NewChunk("new"), NewChunk("taken", id="mem_taken")]),
        lambda alice: alice.chunks.add_many([NewChunk("new"), NewChunk("foreign", id="mem_bobs")]),
        lambda alice: alice.sessions.start(id="sess_taken"),
        lambda alice: alice.chunks.update("mem_taken", content="x", expected_version=7),
        lambda alice: alice.chunks.add("text", session_id="sess_none"),
        lambda alice: alice.chunks.add(" "),
    ],
    ids=["id", "foreign id", "session id", "version", "no session", "blank"],
)
def test_a_call_that_fails_undoes_itself_only(host: StorageLayer, fails: Callable[[Any], object]) -> None:
    host.for_user("user_bob").chunks.add("his", id="mem_bobs")
    with Session(host.engine) as session:
        alice = host.for_user("user_alice", sql_session=session)
        session.add(Order(number=1, item="tea"))
        alice.sessions.start(id="sess_taken")
        alice.chunks.add("first", id="mem_taken")
        with pytest.raises((ConflictError, NotFoundError, ValidationError)):
            fails(alice)
        alice.chunks.add("last")
        session.add(Order(number=2, item="cup"))
        session.commit()
    assert contents(host) == ["first", "last"]
    assert contents(host, "user_bob") == ["his"]
    assert orders(host.engine) == [1, 2]
    assert host.for_user("user_alice").chunks.get("mem_bobs") is None
    host.sync()
    assert host.stats()["index_records"] == 3


def test_an_error_of_the_callers_own_passes_unchanged(host: StorageLayer) -> None:
    with Session(host.engine) as session:
        session.add(Order(number=1, item="tea"))
        session.commit()
    with Session(host.engine) as session:
        alice = host.for_user("user_alice", sql_session=session)
        alice.chunks.add("first")
        session.add(Order(number=1, item="again"))
        with pytest.raises(IntegrityError):
            alice.chunks.add("second")
        session.rollback()
        alice.chunks.add("third")
        session.commit()
    assert contents(host) == ["third"]


def test_what_the_caller_has_added_is_seen(host: StorageLayer) -> None:
    with Session(host.engine) as session:
        alice = host.for_user("user_alice", sql_session=session)
        made = alice.sessions.start()
        row = session.get(models.Session, made.id)
        assert row is not None
        session.add(models.Session(**{**row.model_dump(), "id": "sess_orm"}))  # only in the Session so far
        alice.chunks.add("text", session_id="sess_orm")
        session.commit()
        rows = session.exec(select(models.MemoryChunk).where(models.MemoryChunk.user_id == "user_alice")).all()
        assert [(row.content, row.session_id) for row in rows] == [("text", "sess_orm")]


def test_for_user_reads_and_writes_nothing(host: StorageLayer) -> None:
    with Session(host.engine) as session, statements(host.engine) as sent:
        host.for_user("user_alice", sql_session=session)
        with pytest.raises(ValidationError):
            host.for_user(" ", sql_session=session)
        assert not session.in_transaction()
    assert sent == []


def test_nothing_is_paid_before_the_caller_commits(host: StorageLayer) -> None:
    with Session(host.engine) as session:
        alice = host.for_user("user_alice", sql_session=session)
        alice.chunks.add("likes tea")
        session.commit()
    owed = 0 if host.stats()["index"] in ("exact", "sqlite-vec", "pgvector") else 1
    assert host.health()["debts"] == owed
    assert [hit.chunk.content for hit in host.for_user("user_alice").search("tea")] == ["likes tea"]
    assert host.sync().paid == owed


def test_several_users_and_several_transactions(host: StorageLayer) -> None:
    with Session(host.engine) as session:
        alice, bob = (host.for_user(user, sql_session=session) for user in ("user_alice", "user_bob"))
        for turn in range(3):
            alice.chunks.add(f"hers {turn}")
            bob.chunks.add(f"his {turn}")
            if turn == 1:
                session.rollback()
            else:
                session.commit()
        assert {hit.chunk.content for hit in bob.search("his", k=10)} == {"his 0", "his 2"}
    assert contents(host) == ["hers 0", "hers 2"]
    assert contents(host, "user_bob") == ["his 0", "his 2"]


def test_every_kind_of_session_joins(host: StorageLayer, open_vault: OpenVault, database_url: str) -> None:
    own = memvault.create_engine(database_url)
    makers: list[Callable[[], Any]] = [
        lambda: PlainSession(host.engine),
        lambda: Session(own),
        lambda: scoped_session(sessionmaker(host.engine)),
        lambda: PlainSession(binds={models.MemoryChunk: own, models.Owner: own, Order: own}),
    ]
    for number, make in enumerate(makers):
        session = make()
        host.for_user("user_alice", sql_session=session).chunks.add(f"by way {number}")
        session.commit()
        session.close()
    with host.engine.connect() as connection, Session(connection) as session:
        host.for_user("user_alice", sql_session=session).chunks.add("by a connection")
        session.commit()
    own.dispose()
    assert contents(host) == ["by way 0", "by way 1", "by way 2", "by way 3", "by a connection"]


def test_another_engine_is_refused(host: StorageLayer, tmp_path: Path, database_url: str) -> None:
    bare = sqlalchemy.create_engine(host.engine.url)
    elsewhere = memvault.create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    for bad in (
        Session(bare),  # the right database, without what memvault needs of a connection
        Session(elsewhere),
        PlainSession(),  # bound to nothing
        host.engine,
        "session",
    ):
        with pytest.raises(ConfigurationError, match="sql_session"):
            host.for_user("user_alice", sql_session=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as caught:
        host.for_user("user_alice", sql_session=Session(bare))
    assert "storage.engine" in str(caught.value)
    bare.dispose()
    elsewhere.dispose()


def test_a_transaction_within_is_refused(host: StorageLayer) -> None:
    with Session(host.engine) as session:
        alice = host.for_user("user_alice", sql_session=session)
        with pytest.raises(ConfigurationError, match="transaction"), alice.transaction():
            pass


def test_a_session_marked_read_only_reads(host: StorageLayer) -> None:
    host.for_user("user_alice").chunks.add("likes tea")
    before = dump(host)
    with Session(host.engine.execution_options(memvault_read_only=True)) as session:
        alice = host.for_user("user_alice", sql_session=session)
        with statements(host.engine) as sent:
            assert [hit.chunk.content for hit in alice.search("tea")] == ["likes tea"]
            assert alice.chunks.count() == 1
        assert not any("IMMEDIATE" in one for one in sent)
        with pytest.raises(ConfigurationError, match="memvault_read_only"):
            alice.chunks.add("plays chess")
        # Another writer is not held up by it.
        host.for_user("user_bob").chunks.add("his")
    assert dump(host)["memory_chunks"] != before["memory_chunks"]


def test_a_session_on_sqlite_waits_for_the_write_lock_at_its_beginning(vault_path: Path, open_vault: OpenVault) -> None:
    storage = open_vault()
    storage.for_user("user_alice").chunks.add("likes tea")
    with Session(storage.engine) as session, statements(storage.engine) as sent:
        storage.for_user("user_alice", sql_session=session).chunks.count()
        assert sent[0] == "BEGIN IMMEDIATE"
        session.rollback()
    storage.sync()


def test_no_connection_stays_checked_out(host: StorageLayer) -> None:
    for _ in range(20):
        with Session(host.engine) as session:
            alice = host.for_user("user_alice", sql_session=session)
            with pytest.raises(NotFoundError):
                alice.chunks.add("text", session_id="sess_none")
            alice.search("nothing")
    assert host.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool


def test_a_write_beside_an_open_session_is_refused_at_once(vault_path: Path, open_vault: OpenVault) -> None:
    storage = open_vault()
    with Session(storage.engine) as session:
        storage.for_user("user_alice", sql_session=session).chunks.add("likes tea")
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="sql_session"):
                storage.for_user("user_bob").chunks.add("would wait for ever")
        session.commit()
        storage.for_user("user_bob").chunks.add("his")
    storage.sync()
    assert contents(storage, "user_bob") == ["his"]
