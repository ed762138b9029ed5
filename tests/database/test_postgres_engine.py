"""What is particular to transactions on PostgreSQL: its errors as ours, its snapshots, its connections that break?"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event, exc, insert, select, update
from sqlmodel import Session

from memvault import ConfigurationError, StorageError, StorageLayer, create_engine
from memvault.database.base import OWNERS, STORE_META
from memvault.database.engine import parse_url
from memvault.database.transactions import ATTEMPTS, Database, OwnTransactions
from memvault.database.unit import Unit
from memvault.memory.chunk_table import CHUNKS
from tests.database.test_engine import keys, put, said
from tests.database.test_unit import chunk_row
from tests.postgres import Postgres

SECRET = "nobody's business"

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(postgres_url: str) -> Iterator[MakeEngine]:
    """`create_engine` on the test's database; every connection is back at the end, whatever went wrong."""
    made: list[Engine] = []

    def make(url: str = postgres_url, *, settings: tuple[str, ...] = (), **options: Any) -> Engine:
        engine = create_engine(url, **options)

        def prepare(connection: Any, _record: object) -> None:
            for setting in settings:
                connection.execute(f"SET {setting}")
            connection.commit()

        event.listen(engine, "connect", prepare)  # after memvault's own
        made.append(engine)
        return engine

    yield make
    for engine in made:
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        engine.dispose()


@pytest.fixture
def database(make_engine: MakeEngine) -> Database:
    return Database(make_engine())


def own(database: Database, user_id: str = "alice") -> OwnTransactions:
    return OwnTransactions(database, user_id, lambda _: None)


def pid(connection: Connection) -> int:
    number: int = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    return number


class TestUrls:
    @pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
    def test_one_driver_by_any_name(self, scheme: str) -> None:
        assert parse_url(f"{scheme}://user@host/name").drivername == "postgresql+psycopg"

    @pytest.mark.parametrize("driver", ["psycopg2", "asyncpg", "pg8000", "nonsense"])
    def test_another_driver_is_refused(self, driver: str) -> None:
        with pytest.raises(ConfigurationError, match=rf"{driver}.*postgresql://"):
            create_engine(f"postgresql+{driver}://user:s3cret@host/name")


class TestRefusals:
    """What the database refuses is told without the values, which are somebody's memories."""

    def refused(self, database: Database, statement: Any, parameters: Any = None) -> StorageError:
        with pytest.raises(StorageError) as caught, database.writing() as connection:
            connection.execute(statement, parameters)
        assert SECRET not in said(caught.value)
        assert not caught.value.retryable
        return caught.value

    def test_a_taken_key(self, database: Database) -> None:
        put(database, SECRET)
        error = self.refused(database, insert(STORE_META).values(key=SECRET, value=SECRET))
        assert "pk_store_meta" in str(error)
        assert isinstance(error.__cause__, exc.IntegrityError)
        assert keys(database) == [SECRET]

    def test_one_of_many_rows(self, database: Database) -> None:
        rows = [{"key": key, "value": SECRET} for key in ("a", SECRET, SECRET)]
        assert "pk_store_meta" in str(self.refused(database, insert(STORE_META), rows))
        assert keys(database) == []

    def test_a_missing_value(self, database: Database) -> None:
        assert '"value"' in str(self.refused(database, insert(STORE_META).values(key=SECRET, value=None)))

    def test_a_check(self, database: Database) -> None:
        row = {"user_id": SECRET, "incarnation": "", "epoch": 0, "removed_epoch": 0, "vector_count": -1}
        assert "ck_owners_vector_count_not_negative" in str(self.refused(database, insert(OWNERS), [row]))

    def test_a_parent_that_is_absent(self, database: Database) -> None:
        row = {**chunk_row("mem_1", session_id=SECRET), "user_id": "alice"}
        assert "fk_memory_chunks_session_id" in str(self.refused(database, insert(CHUNKS), [row]))

    def test_a_missing_table(self, database: Database) -> None:
        assert "no_such_table" in str(self.refused(database, sa.text("SELECT * FROM no_such_table")))


class TestRunAgain:
    """What PostgreSQL undoes for another transaction's sake."""

    def test_a_deadlock_is_nobodys_error(self, database: Database) -> None:
        for key in ("one", "other"):
            put(database, key)
        together, begun = threading.Barrier(2, timeout=30), []

        def change(first: str, second: str) -> Callable[[Unit], None]:
            def work(unit: Unit) -> None:
                begun.append(first)
                unit.execute(update(STORE_META).where(STORE_META.c.key == first).values(value=unit.user_id))
                if begun.count(first) == 1:
                    together.wait()
                unit.execute(update(STORE_META).where(STORE_META.c.key == second).values(value=unit.user_id))

            return work

        with ThreadPoolExecutor(2) as pool:
            alice = pool.submit(own(database, "alice").write, change("one", "other"))
            bob = pool.submit(own(database, "bob").write, change("other", "one"))
            for done in (alice, bob):
                done.result(timeout=60)
        assert len(begun) == 3
        with database.reading() as connection:
            values = connection.execute(select(STORE_META.c.value)).scalars().all()
        assert len(set(values)) == 1  # all of one, then all of the other

    @pytest.mark.parametrize("state", ["40001", "40P01"])
    @pytest.mark.parametrize("failures", [1, ATTEMPTS - 1, ATTEMPTS])
    def test_so_often_and_no_more(self, database: Database, state: str, failures: int) -> None:
        attempts: list[int] = []

        def work(unit: Unit) -> str:
            attempts.append(unit.lock_owner().epoch)
            unit.execute(insert(STORE_META).values(key="a", value=""))
            if len(attempts) <= failures:
                unit.connection.exec_driver_sql(f"DO $$ BEGIN RAISE 'undone' USING ERRCODE = '{state}'; END $$")
            return "done"

        if failures < ATTEMPTS:
            assert own(database).write(work) == "done"
            assert (attempts, keys(database)) == ([0] * (failures + 1), ["a"])
        else:
            with pytest.raises(StorageError, match="undone") as caught:
                own(database).write(work)
            assert caught.value.retryable
            assert (attempts, keys(database)) == ([0] * ATTEMPTS, [])

    def test_in_a_joined_transaction_it_is_the_callers_turn(self, database: Database) -> None:
        def undone(unit: Unit) -> None:
            unit.connection.exec_driver_sql("DO $$ BEGIN RAISE 'undone' USING ERRCODE = '40001'; END $$")

        with pytest.raises(StorageError, match="undone") as caught, own(database).joined() as joined:
            joined.write(lambda unit: unit.execute(insert(STORE_META).values(key="a", value="")))
            joined.write(undone)
        assert caught.value.retryable
        assert keys(database) == []

    def test_a_session_of_the_callers_that_cannot_be_serialized(self, postgres_url: str) -> None:
        with StorageLayer.open(postgres_url, vectors="exact", embedder="none") as storage:
            alice = storage.for_user("alice")
            alice.procedural.set("style", "old")
            strict = storage.engine.execution_options(isolation_level="REPEATABLE READ")
            with Session(strict) as session:
                theirs = storage.for_user("alice", sql_session=session)
                assert theirs.procedural.list().items[0].value == "old"
                alice.procedural.set("style", "new")
                with pytest.raises(StorageError, match="could not serialize") as caught:
                    theirs.procedural.set("style", "late")
                assert caught.value.retryable
                session.rollback()
                theirs.procedural.set("style", "later")
                session.commit()
            assert alice.procedural.list().items[0].value == "later"
            assert storage.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool

    def test_eight_threads_lose_nothing(self, database: Database) -> None:
        together = threading.Barrier(8, timeout=30)

        def work(number: int) -> None:
            writer = own(database, f"user {number % 2}")
            together.wait()
            for _ in range(25):
                writer.write(lambda unit: unit.lock_owner().next_epochs(1))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        with database.reading() as connection:
            assert connection.execute(select(OWNERS.c.epoch)).scalars().all() == [100, 100]


class TestLocks:
    def test_one_that_is_not_had_in_time_is_retryable(self, database: Database, make_engine: MakeEngine) -> None:
        impatient = Database(make_engine(settings=("lock_timeout = '50ms'",)))
        own(database).write(lambda _: None)
        with ThreadPoolExecutor(1) as elsewhere, database.writing() as connection:
            Unit(connection, "alice").lock_owner()
            with pytest.raises(StorageError, match="lock timeout") as caught:
                elsewhere.submit(own(impatient).write, lambda _: None).result(timeout=30)
            assert caught.value.retryable
            elsewhere.submit(own(impatient, "bob").write, lambda _: None).result(timeout=30)  # waits for nobody
        own(impatient).write(lambda _: None)

    def test_nobody_waits_for_ever(self, database: Database) -> None:
        with database.reading() as connection:
            assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "30s"


class TestBrokenConnections:
    def kill(self, server: Postgres, victim: int) -> None:
        assert server.execute(f"SELECT pg_terminate_backend({victim}, 10000)") == [(True,)]

    def test_one_that_breaks_in_a_write(self, database: Database, postgres18: Postgres) -> None:
        def work(unit: Unit) -> None:
            unit.execute(insert(STORE_META).values(key="a", value=""))
            self.kill(postgres18, pid(unit.connection))
            unit.execute(insert(STORE_META).values(key="b", value=""))

        with pytest.raises(StorageError) as caught:
            own(database).write(work)
        assert caught.value.retryable
        assert keys(database) == []
        put(database, "c")
        assert keys(database) == ["c"]

    def test_one_that_breaks_in_a_read(self, database: Database, postgres18: Postgres) -> None:
        put(database, "a")

        def work(unit: Unit) -> None:
            self.kill(postgres18, pid(unit.connection))
            unit.execute(select(STORE_META))

        with pytest.raises(StorageError) as caught:
            own(database).read(work)
        assert caught.value.retryable
        assert keys(database) == ["a"]

    def test_one_that_breaks_before_the_commit(self, database: Database, postgres18: Postgres) -> None:
        def break_it() -> None:
            with database.writing() as connection:
                connection.execute(insert(STORE_META).values(key="a", value=""))
                self.kill(postgres18, pid(connection))

        with pytest.raises(StorageError) as caught:
            break_it()
        assert caught.value.retryable
        assert keys(database) == []

    @pytest.mark.parametrize("caught_inside", [True, False])
    def test_a_joined_transaction_does_not_go_on_without_its_beginning(
        self, database: Database, postgres18: Postgres, caught_inside: bool
    ) -> None:
        def break_it(unit: Unit) -> None:
            self.kill(postgres18, pid(unit.connection))
            unit.execute(select(STORE_META))

        def add(key: str) -> Callable[[Unit], None]:
            def work(unit: Unit) -> None:
                unit.execute(insert(STORE_META).values(key=key, value=""))

            return work

        def attempt() -> None:
            with own(database).joined() as joined:
                joined.write(add("before"))
                try:
                    joined.write(break_it)
                except StorageError:
                    if not caught_inside:
                        raise
                joined.write(add("after"))

        with pytest.raises(StorageError):
            attempt()
        assert keys(database) == []
        put(database, "later")
        assert keys(database) == ["later"]

    def test_idle_ones_are_replaced_unnoticed(self, make_engine: MakeEngine, postgres18: Postgres) -> None:
        database = Database(make_engine(pool_size=3))
        with database.reading() as one, database.reading() as two, database.reading() as three:
            victims = [pid(one), pid(two), pid(three)]
        for victim in victims:
            self.kill(postgres18, victim)
        put(database, "a")
        assert keys(database) == ["a"]


@contextmanager
def stopped(server: Postgres) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


@pytest.mark.parametrize("server", ["postgres15"], indirect=True)
class TestServer:
    def test_a_stop_and_a_start(self, server: Postgres, fresh: str) -> None:
        with StorageLayer.open(fresh, vectors="exact", embedder="none", schema="upgrade") as storage:
            alice = storage.for_user("alice")
            alice.procedural.set("before", 1)
            calls: list[Callable[[], object]] = [
                lambda: alice.procedural.set("during", 1),
                lambda: alice.procedural.get("before"),
            ]
            with stopped(server):
                for call in calls:
                    with pytest.raises(StorageError) as caught:
                        call()
                    assert caught.value.retryable
                health = storage.health()
                assert health["ok"] is False
                assert health["last_error"]
                assert storage.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
            alice.procedural.set("after", 1)
            assert [one.key for one in alice.procedural.list().items] == ["after", "before"]
            assert storage.health()["ok"] is True

    def test_none_there(self, server: Postgres, fresh: str) -> None:
        with stopped(server), pytest.raises(StorageError) as caught:
            StorageLayer.open(fresh, vectors="exact")
        assert caught.value.retryable

    def test_no_such_database(self, server: Postgres) -> None:
        with pytest.raises(StorageError, match="no_such_database") as caught:
            StorageLayer.open(server.url("no_such_database"), vectors="exact")
        assert not caught.value.retryable


class TestTransactions:
    CHARACTER = sa.text(
        "SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only'), "
        "current_setting('TimeZone')"
    )

    @pytest.mark.parametrize("level", [None, "SERIALIZABLE", "AUTOCOMMIT"])
    def test_are_what_memvault_needs_on_any_engine(self, make_engine: MakeEngine, level: str | None) -> None:
        options = {} if level is None else {"isolation_level": level}
        database = Database(make_engine(pool_size=1, max_overflow=0, **options))
        for _ in range(2):
            with database.reading() as connection:
                assert tuple(connection.execute(self.CHARACTER).one()) == ("repeatable read", "on", "UTC")
            with database.writing() as connection:
                assert tuple(connection.execute(self.CHARACTER).one()) == ("read committed", "off", "UTC")
        with pytest.raises(KeyError), database.writing() as connection:
            connection.execute(insert(STORE_META).values(key="a", value=""))
            raise KeyError
        assert keys(database) == []

    def test_a_reader_cannot_write(self, database: Database) -> None:
        with pytest.raises(StorageError, match="read-only"), database.reading() as connection:
            connection.execute(insert(STORE_META).values(key="a", value=""))
        assert keys(database) == []

    def test_a_reader_is_not_held_up_and_keeps_its_snapshot(self, database: Database) -> None:
        put(database, "before")
        with ThreadPoolExecutor(1) as elsewhere, database.writing() as writer:
            writer.execute(insert(STORE_META).values(key="during", value=""))
            assert elsewhere.submit(keys, database).result(timeout=30) == ["before"]
        with ThreadPoolExecutor(1) as elsewhere, database.reading() as reader:
            statement = select(STORE_META.c.key).order_by(STORE_META.c.key)
            assert reader.execute(statement).scalars().all() == ["before", "during"]
            elsewhere.submit(put, database, "after").result(timeout=30)
            assert reader.execute(statement).scalars().all() == ["before", "during"]
        assert keys(database) == ["after", "before", "during"]


INSTANTS = [
    datetime(2024, 5, 1, 12, tzinfo=UTC),
    datetime(2024, 5, 1, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=9))),
    datetime(2024, 3, 31, 1, 30, tzinfo=UTC),  # in no hour of Europe's spring
    datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(1, 1, 2, tzinfo=UTC),
    datetime(9999, 12, 30, 23, 59, 59, 999999, tzinfo=UTC),
]
EDGES = [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
"""In no zone but UTC is there room for them: on an engine of memvault's making."""


class TestTimestamps:
    @pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York", "UTC"])
    @pytest.mark.parametrize("made_by", ["memvault", "the caller"])
    def test_whatever_the_zone_of_the_server_or_the_session(self, postgres_url: str, zone: str, made_by: str) -> None:
        url = parse_url(postgres_url).update_query_dict({"options": f"-c TimeZone={zone}"})
        engine = create_engine(url) if made_by == "memvault" else sa.create_engine(url)
        instants = [*INSTANTS, *EDGES] if made_by == "memvault" else INSTANTS
        with StorageLayer.open(engine, vectors="exact", embedder="none") as storage:
            alice = storage.for_user("alice")
            for instant in instants:
                added = alice.chunks.add("text", created_at=instant)
                read = alice.chunks.get(added.id)
                assert read is not None
                assert added.created_at == read.created_at == instant
                assert read.created_at.utcoffset() == timedelta(0)
            listed = [chunk.created_at for chunk in alice.chunks.list().items]
            assert listed == sorted(instants)
        engine.dispose()


class TestTexts:
    def test_a_mebibyte_that_does_not_compress(self, postgres_url: str) -> None:
        draw = random.Random(7)
        contents = ["".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range((1 << 20) // 3)) for _ in range(2)]
        with StorageLayer.open(postgres_url, vectors="exact", embedder="none") as storage:
            alice = storage.for_user("alice")
            for content in (*contents, contents[0]):
                added = alice.chunks.add(content, embedding=[1.0, 0.0])
                read = alice.chunks.get(added.id)
                assert read is not None
                assert read.content == content
            assert alice.chunks.count() == 3
            assert len(alice.search(embedding=[1.0, 0.0])) == 3

    def test_the_longest_keys_and_ids(self, postgres_url: str) -> None:
        draw = random.Random(7)
        longest = ["".join(chr(draw.randrange(0x1F300, 0x1FAFF)) for _ in range(255)) for _ in range(3)]
        with StorageLayer.open(postgres_url, vectors="exact", embedder="none") as storage:
            for user_id in longest:
                user = storage.for_user(user_id)
                user.chunks.add("text", id=user_id, embedding=[1.0, 0.0])
                for key in longest:
                    user.procedural.set(key, 1)
                assert [one.key for one in user.procedural.list().items] == sorted(longest)
            assert sorted(storage.user_ids()) == sorted(longest)


ODD_IDS = [
    "a",
    "B",
    "b",
    "A",
    "ä",
    "Z",
    "z",
    "é",
    "e\u0301",
    "_",
    "-",
    "a b",
    "ab",
    "a-b",
    "10",
    "9",
    "ß",
    "ﬁ",
    "🙂",
    "\uffff",
]


class TestOrder:
    def test_is_by_code_point_whatever_the_databases_language(self, server: Postgres, fresh: str) -> None:
        # 15's default collation is a language's: there "a" < "A" < "ä" < "b", and punctuation hardly counts.
        ((is_linguistic,),) = server.execute("SELECT 'a' < 'B' AND 'ä' < 'z'", "fresh")
        assert is_linguistic is (server.version == 15)
        now = datetime(2024, 5, 1, tzinfo=UTC)
        with StorageLayer.open(fresh, vectors="exact", embedder="none", schema="upgrade") as storage:
            alice = storage.for_user("alice")
            for id in ODD_IDS:
                alice.chunks.add("text", id=id, created_at=now, embedding=[1.0, 0.0])
                alice.procedural.set(id, 1)
            ids: list[str] = []
            after = None
            while after is not None or not ids:
                page = alice.chunks.list(limit=3, after=after)
                ids += [chunk.id for chunk in page.items]
                after = page.next
            assert ids == sorted(ODD_IDS)
            assert [one.key for one in alice.procedural.list().items] == sorted(ODD_IDS)
            assert [hit.chunk.id for hit in alice.search(embedding=[1.0, 0.0], k=50)] == sorted(ODD_IDS)
