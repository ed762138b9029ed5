"""Is a unit of work whole or not at all, is the owner locked and counted right, and is nobody else's row touched?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest
from sqlalchemy import Connection, event, exc, insert, select

from memvault.database.base import OWNERS, STORE_META
from memvault.database.engine import create_engine
from memvault.database.transactions import Database, JoinedTransaction, OwnTransactions
from memvault.database.unit import EPOCHS_PER_OWNER, LockedOwner, Unit
from memvault.errors import ConfigurationError, StorageError
from memvault.memory.chunk_table import CHUNKS
from memvault.memory.sessions import SESSIONS
from tests.support import statements

NOW = datetime(2024, 5, 1, tzinfo=UTC)

Row = dict[str, Any]


class Trouble(Exception):
    """What goes wrong in the middle of the work."""


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Every table, and at the end every connection is back."""
    engine = create_engine(database_url, pool_size=20)
    yield Database(engine)
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
    engine.dispose()


@pytest.fixture
def paid() -> list[set[str]]:
    """What each committed transaction owed."""
    return []


@pytest.fixture
def own(database: Database, paid: list[set[str]]) -> OwnTransactions:
    return OwnTransactions(database, "alice", lambda unit: paid.append(set(unit.owed)))


def session_row(id: str) -> Row:
    return {
        "id": id,
        "started_at": NOW,
        "last_activity": NOW,
        "ended_at": None,
        "compressed": False,
        "memory_count": 0,
        "total_tokens": 0,
    }


def chunk_row(id: str, session_id: str = "s") -> Row:
    return {
        "id": id,
        "session_id": session_id,
        "memory_type": "semantic",
        "content": id,
        "importance": 0.5,
        "token_count": 1,
        "compressed": False,
        "compression_source": None,
        "source_session_id": None,
        "chroma_id": None,
        "created_at": NOW,
        "updated_at": NOW,
        "metadata": {},
        "version": 1,
    }


def note(key: str, *, owing: bool = True, epochs: int = 1) -> Callable[[Unit], range]:
    """Work that writes a row, draws epochs and owes the index something."""

    def work(unit: Unit) -> range:
        unit.execute(insert(STORE_META).values(key=key, value=""))
        if owing:
            unit.owed.add(key)
        return unit.lock_owner().next_epochs(epochs)

    return work


def failing(work: Callable[[Unit], object], error: BaseException | None = None) -> Callable[[Unit], None]:
    """The same work, which then raises."""

    def fails(unit: Unit) -> None:
        work(unit)
        raise error or Trouble

    return fails


def notes(database: Database) -> list[str]:
    with database.reading() as connection:
        return sorted(connection.execute(select(STORE_META.c.key)).scalars())


def owner_rows(database: Database) -> list[Row]:
    with database.reading() as connection:
        return [dict(row._mapping) for row in connection.execute(select(OWNERS).order_by(OWNERS.c.number))]


def epoch(database: Database) -> int:
    (row,) = owner_rows(database)
    found: int = row["epoch"]
    return found


class TestOwner:
    def test_sixteen_threads_create_it_once(self, database: Database) -> None:
        together = threading.Barrier(16)

        def work(_: int) -> tuple[int, str]:
            together.wait(timeout=30)
            with database.writing() as connection:
                owner = Unit(connection, "alice").lock_owner()
                return owner.number, owner.incarnation

        with ThreadPoolExecutor(16) as pool:
            found = set(pool.map(work, range(16)))
        (row,) = owner_rows(database)
        assert found == {(row["number"], row["incarnation"])}
        assert (row["epoch"], row["removed_epoch"], row["vector_count"]) == (0, 0, 0)
        assert row["default_session_id"] is None

    def test_owners_are_told_apart_exactly(self, database: Database) -> None:
        names = ["a", "A", "ab", "a ", "%", "*", 'u"1', "Ä", "ä", "A\u0308", "john_doe", "john-doe", "🙂"]
        for name in names * 2:
            with database.writing() as connection:
                Unit(connection, name).lock_owner()
        rows = owner_rows(database)
        assert [row["user_id"] for row in rows] == names
        assert len({row["number"] for row in rows}) == len({row["incarnation"] for row in rows}) == len(names)

    def test_a_number_is_never_given_out_twice(self, database: Database) -> None:
        with database.writing() as connection:
            first = Unit(connection, "alice").lock_owner().number
        with database.writing() as connection:
            connection.execute(OWNERS.delete())
        with database.writing() as connection:
            assert Unit(connection, "alice").lock_owner().number > first

    def test_it_is_read_once_a_transaction(self, database: Database) -> None:
        with database.writing() as connection:
            unit = Unit(connection, "alice")
            assert unit.lock_owner() is unit.lock_owner()

    def test_changes_are_saved_when_there_are_any(self, database: Database) -> None:
        sent: list[str] = []
        event.listen(database.engine, "before_cursor_execute", lambda _c, _cursor, sql, *_: sent.append(sql))
        with database.writing() as connection:
            unit = Unit(connection, "alice")
            unit.save_owner()
            owner = unit.lock_owner()
            unit.save_owner()
            assert not any(sql.startswith("UPDATE") for sql in sent)
            owner.next_epochs(3, removing=True)
            owner.vector_count, owner.default_session_id = 2, "sess_1"
            unit.save_owner()
            unit.save_owner()
            assert sum(sql.startswith("UPDATE") for sql in sent) == 1
        (row,) = owner_rows(database)
        assert (row["epoch"], row["removed_epoch"], row["vector_count"]) == (3, 3, 2)
        assert row["default_session_id"] == "sess_1"

    def test_a_deleted_owner_comes_back_as_another_incarnation(self, database: Database) -> None:
        with database.writing() as connection:
            unit = Unit(connection, "alice")
            before = unit.lock_owner().incarnation
            connection.execute(OWNERS.delete().where(OWNERS.c.user_id == "alice"))
            unit.forget_owner()
            unit.save_owner()
            assert unit.lock_owner().incarnation != before


class TestEpochs:
    def test_ranges(self) -> None:
        owner = LockedOwner(1, "i", 10, 5, 0, None)
        assert owner.next_epochs(3) == range(11, 14)
        assert (owner.epoch, owner.removed_epoch) == (13, 5)
        assert owner.next_epochs(2, removing=True) == range(14, 16)
        assert (owner.epoch, owner.removed_epoch) == (15, 15)
        assert list(owner.next_epochs(0, removing=True)) == []
        assert (owner.epoch, owner.removed_epoch) == (15, 15)

    def test_the_last_one_is_refused(self, database: Database, own: OwnTransactions) -> None:
        own.write(note("a"))
        with database.writing() as connection:
            connection.execute(OWNERS.update().values(epoch=EPOCHS_PER_OWNER - 2))
        own.write(note("b"))
        with pytest.raises(StorageError, match="4 billion"):
            own.write(note("c"))
        assert notes(database) == ["a", "b"]
        assert epoch(database) == EPOCHS_PER_OWNER - 1

    def test_they_are_contiguous_and_in_the_order_of_commits(self, database: Database, own: OwnTransactions) -> None:
        committed: list[int] = []
        together = threading.Barrier(8)

        def thread(seed: int) -> list[range]:
            random = Random(seed)
            together.wait(timeout=30)
            drawn = []
            for number in range(12):
                work = note(f"{seed} {number}", epochs=random.randrange(4))
                if random.random() < 0.2:
                    with pytest.raises(Trouble):
                        own.write(failing(work))
                else:
                    drawn.append(own.write(work))
            return drawn

        def commit(connection: Connection) -> None:
            committed.append(connection.execute(select(OWNERS.c.epoch)).scalar_one())

        own.write(note("first", epochs=0))
        event.listen(database.engine, "commit", commit)
        with ThreadPoolExecutor(8) as pool:
            ranges = [drawn for some in pool.map(thread, range(8)) for drawn in some]
        event.remove(database.engine, "commit", commit)
        numbers = sorted(number for some in ranges for number in some)
        assert numbers == list(range(1, epoch(database) + 1))
        assert committed == sorted(committed)


class TestSavepoint:
    def test_what_fails_inside_leaves_no_trace(self, database: Database) -> None:
        def change_everything(unit: Unit) -> None:
            note("inside", epochs=5)(unit)
            unit.lock_owner().default_session_id = "inside"
            unit.fixed_dimension = 256
            unit.save_owner()

        with database.writing() as connection:
            unit = Unit(connection, "alice")
            note("before")(unit)
            with pytest.raises(Trouble), unit.savepoint():
                failing(change_everything)(unit)
            assert unit.owed == {"before"}
            assert unit.fixed_dimension is None
            assert unit.lock_owner().default_session_id is None
            note("after")(unit)
            unit.save_owner()
        assert notes(database) == ["after", "before"]
        assert unit.owed == {"before", "after"}

    def test_what_was_not_saved_before_is_not_lost(self, database: Database) -> None:
        # Or the same epochs would be drawn a second time, and a cache would miss what has them.
        def draw_and_save(unit: Unit) -> None:
            unit.lock_owner().next_epochs(10)
            unit.save_owner()

        with database.writing() as connection:
            unit = Unit(connection, "alice")
            owner = unit.lock_owner()
            assert owner.next_epochs(3) == range(1, 4)
            owner.default_session_id = "mine"
            with pytest.raises(Trouble), unit.savepoint():
                failing(draw_and_save)(unit)
            assert unit.lock_owner().next_epochs(2) == range(4, 6)
            assert unit.lock_owner().default_session_id == "mine"
            unit.save_owner()
        (row,) = owner_rows(database)
        assert (row["epoch"], row["default_session_id"]) == (5, "mine")

    def test_an_owner_at_hand_stays_the_unit_s(self, database: Database) -> None:
        with database.writing() as connection:
            unit = Unit(connection, "alice")
            owner = unit.lock_owner()
            with pytest.raises(Trouble), unit.savepoint():
                raise Trouble
            owner.next_epochs(7)
            unit.save_owner()
        assert epoch(database) == 7

    def test_an_owner_created_inside_is_gone(self, database: Database) -> None:
        with database.writing() as connection:
            unit = Unit(connection, "alice")
            with pytest.raises(Trouble), unit.savepoint():
                failing(Unit.lock_owner)(unit)
            assert connection.execute(select(OWNERS)).all() == []
            unit.lock_owner().next_epochs(1)
            unit.save_owner()
        assert epoch(database) == 1

    def test_one_that_ends_well_keeps_everything(self, database: Database) -> None:
        with database.writing() as connection:
            unit = Unit(connection, "alice")
            with unit.savepoint():
                note("inside")(unit)
                with pytest.raises(Trouble), unit.savepoint():
                    failing(note("deeper"))(unit)
            unit.save_owner()
        assert notes(database) == ["inside"]
        assert unit.owed == {"inside"}
        assert epoch(database) == 1

    def test_a_refused_row_leaves_the_transaction_usable(self, database: Database) -> None:
        with database.writing() as connection:
            unit = Unit(connection, "alice")
            note("taken")(unit)
            with pytest.raises(exc.IntegrityError), unit.savepoint():
                note("taken", epochs=4)(unit)
            note("free")(unit)
            unit.save_owner()
        assert notes(database) == ["free", "taken"]
        assert epoch(database) == 2


def defer_foreign_keys(unit: Unit) -> None:
    """Have them checked at the commit, as in a schema whose foreign keys are deferred."""
    unit.connection.exec_driver_sql(
        {
            "sqlite": "PRAGMA defer_foreign_keys = ON",
            "postgresql": "ALTER TABLE memory_chunks ALTER CONSTRAINT fk_memory_chunks_session_id INITIALLY DEFERRED",
        }[unit.connection.dialect.name]
    )


class TestOwnTransactions:
    def test_what_follows_a_commit_sees_it(self, database: Database) -> None:
        seen: list[tuple[set[str], list[str], int]] = []

        def committed(unit: Unit) -> None:
            seen.append((unit.owed, notes(database), epoch(database)))

        own = OwnTransactions(database, "alice", committed)
        assert own.write(note("a")) == range(1, 2)
        assert seen == [({"a"}, ["a"], 1)]

    def test_what_follows_a_commit_may_write(self, database: Database) -> None:
        own = OwnTransactions(database, "alice", lambda _: None)

        def committed(_: Unit) -> None:
            own.write(note("paid"))

        OwnTransactions(database, "alice", committed).write(note("a"))
        assert notes(database) == ["a", "paid"]

    def test_nothing_follows_a_read(self, own: OwnTransactions, paid: list[set[str]]) -> None:
        own.read(lambda unit: unit.execute(select(OWNERS)).all())
        assert paid == []

    @pytest.mark.parametrize(
        "error", [Trouble(), KeyboardInterrupt(), ValueError("x")], ids=lambda error: type(error).__name__
    )
    def test_a_write_that_raises_leaves_nothing(
        self, database: Database, own: OwnTransactions, paid: list[set[str]], error: BaseException
    ) -> None:
        with pytest.raises(type(error)) as caught:
            own.write(failing(note("a"), error))
        assert caught.value is error
        assert (notes(database), owner_rows(database), paid) == ([], [], [])
        own.write(note("b"))
        assert (notes(database), epoch(database), paid) == (["b"], 1, [{"b"}])

    def test_a_write_that_the_database_refuses_leaves_nothing(
        self, database: Database, own: OwnTransactions, paid: list[set[str]]
    ) -> None:
        own.write(note("a"))

        def taken(unit: Unit) -> None:
            note("b")(unit)
            note("a")(unit)

        with pytest.raises(StorageError, match="(?i)unique constraint"):
            own.write(taken)
        assert (notes(database), epoch(database), paid) == (["a"], 1, [{"a"}])

    def test_a_commit_that_fails_pays_nothing(
        self, database: Database, own: OwnTransactions, paid: list[set[str]]
    ) -> None:
        def orphan(unit: Unit) -> None:
            defer_foreign_keys(unit)
            unit.insert(CHUNKS, [chunk_row("mem_1", session_id="absent")])
            unit.owed.add("mem_1")

        with pytest.raises(StorageError, match="(?i)foreign key constraint"):
            own.write(orphan)
        assert (owner_rows(database), paid) == ([], [])
        own.write(note("a"))
        assert paid == [{"a"}]


class TestJoinedTransaction:
    def test_all_is_committed_at_the_end(self, database: Database, own: OwnTransactions, paid: list[set[str]]) -> None:
        with own.joined() as joined:
            assert joined.write(note("a")) == range(1, 2)
            assert joined.write(note("b")) == range(2, 3)
            assert sorted(joined.read(lambda unit: unit.execute(select(STORE_META.c.key)).scalars().all())) == [
                "a",
                "b",
            ]
            assert notes(database) == []  # nobody else sees it yet
            assert paid == []
        assert (notes(database), epoch(database), paid) == (["a", "b"], 2, [{"a", "b"}])

    def test_an_error_undoes_all(self, database: Database, own: OwnTransactions, paid: list[set[str]]) -> None:
        error = Trouble()

        def write_and_raise() -> None:
            with own.joined() as joined:
                joined.write(note("a"))
                raise error

        with pytest.raises(Trouble) as caught:
            write_and_raise()
        assert caught.value is error
        assert (notes(database), owner_rows(database), paid) == ([], [], [])

    def test_a_failed_part_that_is_caught_is_undone_alone(
        self, database: Database, own: OwnTransactions, paid: list[set[str]]
    ) -> None:
        with own.joined() as joined:
            joined.write(note("a"))
            with pytest.raises(Trouble):
                joined.write(failing(note("b", epochs=9)))
            with pytest.raises(StorageError, match="(?i)unique constraint"):
                joined.write(note("a", epochs=9))
            joined.write(note("c"))
        assert (notes(database), epoch(database), paid) == (["a", "c"], 2, [{"a", "c"}])

    def test_unused_it_never_begins(self, database: Database, own: OwnTransactions, paid: list[set[str]]) -> None:
        with own.joined():
            own.write(note("a"))  # would wait for ever for one that had begun
        assert paid == [{"a"}]

    def test_afterwards_it_is_refused(self, own: OwnTransactions) -> None:
        with own.joined() as used:
            used.write(note("a"))
        with pytest.raises(Trouble), own.joined() as failed:
            raise Trouble
        for ended in (used, failed):
            with pytest.raises(ConfigurationError, match="has ended"):
                ended.write(note("b"))
            with pytest.raises(ConfigurationError, match="has ended"):
                ended.read(lambda unit: unit.execute(select(OWNERS)).all())

    def test_a_failed_commit_is_an_error_and_pays_nothing(
        self, database: Database, own: OwnTransactions, paid: list[set[str]]
    ) -> None:
        def orphan(unit: Unit) -> None:
            defer_foreign_keys(unit)
            unit.insert(CHUNKS, [chunk_row("mem_1", session_id="absent")])
            unit.owed.add("mem_1")

        with pytest.raises(StorageError, match="(?i)foreign key constraint"), own.joined() as joined:
            joined.write(orphan)
        assert paid == []
        own.write(note("a"))

    @pytest.mark.usefixtures("vault_path")
    def test_a_full_disk_undoes_all_of_it(self, database: Database, own: OwnTransactions, paid: list[set[str]]) -> None:
        # SQLite then rolls back the whole transaction by itself: what follows must not be committed piece by piece.
        own.write(note("acknowledged"))
        with database.reading() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

        def limit(connection: Any, _record: object, _proxy: object) -> None:
            connection.execute(f"PRAGMA max_page_count = {pages + 20}")

        def too_much(unit: Unit) -> None:
            unit.execute(insert(STORE_META).values(key="big", value="x" * 1_000_000))

        def overfill(*, goes_on: bool) -> None:
            with own.joined() as joined:
                joined.write(note("lost"))
                with pytest.raises(StorageError, match="full"):
                    joined.write(too_much)
                if goes_on:
                    joined.write(note("after"))

        event.listen(database.engine, "checkout", limit)
        for goes_on in (True, False):
            with pytest.raises(StorageError):
                overfill(goes_on=goes_on)
            assert notes(database) == ["acknowledged"]
        assert paid == [{"acknowledged"}]
        own.write(note("later"))
        assert notes(database) == ["acknowledged", "later"]

    @pytest.mark.usefixtures("vault_path")
    def test_a_lock_that_is_not_had_leaves_it_endable(self, database: Database, own: OwnTransactions) -> None:
        def hurry(connection: Any, _record: object, _proxy: object) -> None:
            connection.execute("PRAGMA busy_timeout = 50")

        event.listen(database.engine, "checkout", hurry)
        holding, release = threading.Event(), threading.Event()

        def hold() -> None:
            with database.writing():
                holding.set()
                release.wait(timeout=30)

        with ThreadPoolExecutor(1) as elsewhere:
            held = elsewhere.submit(hold)
            assert holding.wait(timeout=30)
            with own.joined() as joined:
                with pytest.raises(StorageError, match="locked") as caught:
                    joined.write(note("a"))
                assert caught.value.retryable
            release.set()
            held.result(timeout=30)
        own.write(note("b"))
        assert notes(database) == ["b"]


class TestDatabase:
    def test_a_second_transaction_in_the_thread_is_refused(self, database: Database, own: OwnTransactions) -> None:
        with database.writing():
            with pytest.raises(ConfigurationError, match="a transaction is open in this thread"):
                own.write(note("a"))
            assert notes(database) == []  # reading is fine
        with own.joined() as joined:
            joined.write(note("b"))
            with pytest.raises(ConfigurationError, match="a transaction is open in this thread"):
                own.write(note("a"))
        assert notes(database) == ["b"]

    def test_it_is_not_refused_for_good(self, database: Database, own: OwnTransactions) -> None:
        with pytest.raises(Trouble), database.writing():
            raise Trouble
        with pytest.raises(StorageError), database.writing() as connection:
            connection.exec_driver_sql("SELECT * FROM absent")
        own.write(note("a"))
        assert notes(database) == ["a"]

    def test_another_thread_waits_its_turn(self, database: Database, own: OwnTransactions) -> None:
        with ThreadPoolExecutor(1) as elsewhere:
            with database.writing() as connection:
                waiting = elsewhere.submit(own.write, note("second"))
                connection.execute(insert(STORE_META).values(key="first", value=""))
            assert waiting.result(timeout=30) == range(1, 2)
        assert notes(database) == ["first", "second"]

    def test_a_transaction_may_change_threads(self, database: Database, own: OwnTransactions) -> None:
        # As it does off an event loop, where each call may run on another thread of a pool.
        def begin() -> JoinedTransaction:
            joined = JoinedTransaction(database, "alice")
            joined.write(note("a", owing=False))
            return joined

        with ThreadPoolExecutor(1) as elsewhere:
            joined = elsewhere.submit(begin).result(timeout=30)
            joined.write(note("b", owing=False))
            joined.end(None)
            elsewhere.submit(own.write, note("c")).result(timeout=30)
        own.write(note("d"))
        assert notes(database) == ["a", "b", "c", "d"]

    def test_closed(self, database: Database, own: OwnTransactions) -> None:
        database.closed = True
        with pytest.raises(StorageError, match="closed") as caught:
            own.write(note("a"))
        assert not caught.value.retryable
        with pytest.raises(StorageError, match="closed"):
            own.read(lambda unit: unit.execute(select(OWNERS)).all())
        with pytest.raises(StorageError, match="closed"), own.joined() as joined:
            joined.write(note("a"))
        database.closed = False
        assert notes(database) == []


class TestOwnerGuard:
    """Every statement that a unit builds is about its user's rows, and no other's."""

    @pytest.fixture
    def units(self, database: Database) -> Iterator[dict[str, Unit]]:
        names = ["alice", "bob", "ALICE", "alic", "%", 'u"1', "' OR 1=1 --"]
        with database.writing() as connection:
            made = {name: Unit(connection, name) for name in names}
            for number, unit in enumerate(made.values()):
                unit.insert(SESSIONS, [session_row(f"s{number}")])
                unit.insert(CHUNKS, [chunk_row(f"{kind}{number}", f"s{number}") for kind in ("x", "y")])
            yield made

    @staticmethod
    def everything(unit: Unit) -> list[tuple[Any, ...]]:
        statement = select(CHUNKS.c.id, CHUNKS.c.user_id, CHUNKS.c.content).order_by(CHUNKS.c.id)
        return [tuple(row) for row in unit.connection.execute(statement)]

    @pytest.mark.parametrize("by_key", [False, True])
    def test_select(self, units: dict[str, Unit], by_key: bool) -> None:
        for number, unit in enumerate(units.values()):
            statement = unit.select(CHUNKS.c.id, frm=CHUNKS, by_key=by_key).order_by(CHUNKS.c.id)
            assert unit.execute(statement).scalars().all() == [f"x{number}", f"y{number}"]
            assert unit.execute(statement.where(CHUNKS.c.id.in_(["x0", "x1"]))).scalars().all() == (
                [f"x{number}"] if number < 2 else []
            )

    def test_both_sides_of_a_join(self, units: dict[str, Unit]) -> None:
        statement = units["bob"].select(
            CHUNKS.c.user_id, SESSIONS.c.user_id, frm=CHUNKS.join(SESSIONS, CHUNKS.c.id != SESSIONS.c.id)
        )
        assert [tuple(row) for row in units["bob"].execute(statement)] == [("bob", "bob")] * 2

    @pytest.mark.parametrize("by_key", [False, True])
    def test_update(self, units: dict[str, Unit], by_key: bool) -> None:
        bob = units["bob"]
        before = self.everything(bob)
        statement = bob.update(CHUNKS, by_key=by_key).values(content="changed")
        assert bob.execute(statement.where(CHUNKS.c.id.in_(["x0", "x1", "x2"]))).rowcount == 1
        changed = set(self.everything(bob)) - set(before)
        assert changed == {("x1", "bob", "changed")}

    @pytest.mark.parametrize("by_key", [False, True])
    def test_delete(self, units: dict[str, Unit], by_key: bool) -> None:
        bob = units["bob"]
        before = self.everything(bob)
        assert bob.execute(bob.delete(CHUNKS, by_key=by_key)).rowcount == 2
        assert self.everything(bob) == [row for row in before if row[1] != "bob"]

    def test_inserted_rows_are_the_user_s_whatever_they_say(self, units: dict[str, Unit]) -> None:
        units["bob"].insert(SESSIONS, [{**session_row("forged"), "user_id": "alice"}])
        assert units["bob"].insert_new(SESSIONS, [{**session_row("forged too"), "user_id": "alice"}]) == 1
        assert units["bob"].owners_of(SESSIONS, ["forged", "forged too", "s0", "absent"]) == {
            "forged": "bob",
            "forged too": "bob",
            "s0": "alice",
        }

    def test_insert_new_counts_and_overwrites_nothing(self, units: dict[str, Unit]) -> None:
        alice = units["alice"]
        before = self.everything(alice)
        rows = [chunk_row(id, "s0") | {"content": "new"} for id in ("x1", "free", "x0", "free", "also free")]
        assert alice.insert_new(CHUNKS, rows) == 2
        assert [row for row in self.everything(alice) if row[2] == "new"] == [
            ("also free", "alice", "new"),
            ("free", "alice", "new"),
        ]
        assert set(before) <= set(self.everything(alice))
        assert alice.insert_new(CHUNKS, [chunk_row("free", "s0")]) == 0
        assert alice.insert_new(CHUNKS, [chunk_row("one more", "s0")]) == 1

    def test_no_rows_no_statement(self, units: dict[str, Unit]) -> None:
        sent: list[str] = []
        engine = units["alice"].connection.engine
        event.listen(engine, "before_cursor_execute", lambda _c, _cursor, sql, *_: sent.append(sql))
        units["alice"].insert(CHUNKS, [])
        assert units["alice"].insert_new(CHUNKS, []) == 0
        assert units["alice"].owners_of(CHUNKS, []) == {}
        assert sent == []

    @pytest.mark.usefixtures("vault_path")
    def test_by_key_goes_by_the_key(self, units: dict[str, Unit]) -> None:
        alice = units["alice"]
        statement = alice.select(CHUNKS.c.content, frm=CHUNKS, by_key=True).where(CHUNKS.c.id.in_(["a", "b"]))
        with statements(alice.connection.engine) as sent:
            alice.execute(statement)
        plan = alice.connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sent[0]}", ("alice", "a", "b")).all()
        assert any("(id=?)" in row[3] for row in plan)
