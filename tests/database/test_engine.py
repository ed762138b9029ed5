"""Is every connection prepared, does nothing get lost between writers, and do the driver's errors become ours?"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    JSON,
    Column,
    Engine,
    Integer,
    MetaData,
    NullPool,
    Table,
    event,
    exc,
    insert,
    select,
    update,
)
from sqlalchemy import create_engine as sa_create_engine

from memvault.database.base import STORE_META, UtcDateTime
from memvault.database.engine import create_engine, listen, parse_url, sqlite_driver
from memvault.database.transactions import Database
from memvault.database.translate import database_errors
from memvault.errors import ConfigurationError, StorageError

PRAGMAS = {
    "busy_timeout": 30_000,
    "journal_mode": "wal",
    "synchronous": 1,  # NORMAL
    "foreign_keys": 1,
    "secure_delete": 1,
    "wal_autocheckpoint": 20_000,
}

TABLES = MetaData()
COUNTERS = Table("counters", TABLES, Column("id", Integer, primary_key=True), Column("value", Integer, nullable=False))
TIMES = Table("times", TABLES, Column("at", UtcDateTime))
STORE_META.to_metadata(TABLES)

MakeEngine = Callable[..., Engine]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.db"


@pytest.fixture
def make_engine(path: Path) -> Iterator[MakeEngine]:
    """`create_engine` on the test's file; every connection is back at the end."""
    made: list[Engine] = []

    def make(url: str = f"sqlite:///{path}", *, pragmas: tuple[str, ...] = (), **options: Any) -> Engine:
        engine = create_engine(url, **options)

        def prepare(connection: Any, _record: object) -> None:
            for pragma in pragmas:
                connection.execute(f"PRAGMA {pragma}")

        event.listen(engine, "connect", prepare)  # after memvault's own
        made.append(engine)
        return engine

    yield make
    for engine in made:
        if not isinstance(engine.pool, NullPool):
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        engine.dispose()


@pytest.fixture
def database(make_engine: MakeEngine) -> Database:
    engine = make_engine()
    TABLES.create_all(engine)
    return Database(engine)


def put(database: Database, key: str, value: str = "") -> None:
    with database.writing() as connection:
        connection.execute(insert(STORE_META).values(key=key, value=value))


def put_and_raise(database: Database, error: BaseException) -> None:
    with database.writing() as connection:
        connection.execute(insert(STORE_META).values(key="a", value=""))
        raise error


def keys(database: Database) -> list[str]:
    with database.reading() as connection:
        return sorted(connection.execute(select(STORE_META.c.key)).scalars())


class TestConnections:
    @pytest.mark.parametrize("options", [{}, {"poolclass": NullPool}, {"pool_size": 1}], ids=["pool", "none", "one"])
    def test_every_connection_has_the_pragmas(self, make_engine: MakeEngine, options: dict[str, Any]) -> None:
        engine = make_engine(**options)
        with engine.connect() as first, engine.connect() as second, engine.connect() as third:
            for connection in (first, second, third):
                for pragma, expected in PRAGMAS.items():
                    assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == expected, pragma
                connection.rollback()

    def test_a_connection_made_after_one_broke_has_them_too(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        with engine.connect() as connection:
            connection.invalidate()
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1

    def test_listen_prepares_an_engine_of_the_callers_once(self, path: Path) -> None:
        engine = sa_create_engine(f"sqlite:///{path}", module=sqlite_driver())
        with engine.connect() as connection:  # now pooled, and not prepared
            connection.exec_driver_sql("SELECT 1")
        listen(engine)
        listen(engine)
        sent: list[str] = []
        event.listen(
            engine, "before_cursor_execute", lambda _connection, _cursor, statement, *_: sent.append(statement)
        )
        with engine.begin() as connection:
            for pragma, expected in PRAGMAS.items():
                assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == expected, pragma
        assert [statement for statement in sent if "BEGIN" in statement] == ["BEGIN IMMEDIATE"]
        engine.dispose()

    def test_json_is_readable_and_strict(self, make_engine: MakeEngine) -> None:
        documents = Table("documents", MetaData(), Column("document", JSON))
        with make_engine().begin() as connection:
            documents.create(connection)
            connection.execute(insert(documents).values(document={"é": [1, None]}))
            assert connection.exec_driver_sql("SELECT document FROM documents").scalar() == '{"é":[1,null]}'
            with pytest.raises(exc.StatementError, match="JSON"):
                connection.execute(insert(documents).values(document=float("nan")))

    def test_options_win(self, make_engine: MakeEngine) -> None:
        engine = make_engine(pool_size=1, max_overflow=0, hide_parameters=False)
        assert engine.pool.size() == 1  # type: ignore[attr-defined]
        assert engine.hide_parameters is False
        assert make_engine().hide_parameters is True

    def test_an_unknown_option_is_a_configuration_error(self, path: Path) -> None:
        with pytest.raises(ConfigurationError, match="no_such_option"):
            create_engine(f"sqlite:///{path}", no_such_option=1)


class TestBegin:
    @pytest.fixture
    def sent(self, database: Database) -> list[str]:
        """What SQLite itself was told, transaction control included."""
        statements: list[str] = []

        def trace(connection: Any, _record: object, _proxy: object) -> None:
            connection.set_trace_callback(statements.append)

        event.listen(database.engine, "checkout", trace)
        return statements

    def test_writers_begin_immediate(self, database: Database, sent: list[str]) -> None:
        put(database, "a")
        assert [statement.split("(")[0].strip() for statement in sent if "PRAGMA" not in statement] == [
            "BEGIN IMMEDIATE",
            "INSERT INTO main.store_meta",
            "COMMIT",
        ]

    def test_readers_begin_deferred(self, database: Database, sent: list[str]) -> None:
        keys(database)
        control = [statement for statement in sent if not statement.startswith(("SELECT", "PRAGMA"))]
        assert control in (["BEGIN", "COMMIT"], ["BEGIN", "ROLLBACK"])

    def test_a_bare_connection_is_a_writer(self, database: Database, sent: list[str]) -> None:
        # A Session of the caller's that reads and then writes would fail at once if it began deferred.
        with database.engine.connect() as connection:
            connection.execute(select(STORE_META.c.key)).all()
        assert sent[0] == "BEGIN IMMEDIATE"

    def test_an_error_rolls_back(self, database: Database, sent: list[str]) -> None:
        with pytest.raises(KeyError):
            put_and_raise(database, KeyError("mine"))
        assert sent[-1] == "ROLLBACK"
        assert keys(database) == []

    def test_a_reader_is_not_held_up_and_keeps_its_snapshot(self, database: Database) -> None:
        put(database, "before")
        with ThreadPoolExecutor(1) as elsewhere, database.writing() as writer:
            writer.execute(insert(STORE_META).values(key="during", value=""))
            assert elsewhere.submit(keys, database).result(timeout=5) == ["before"]
        with ThreadPoolExecutor(1) as elsewhere, database.reading() as reader:
            assert reader.execute(select(STORE_META.c.key)).scalars().all() == ["before", "during"]
            elsewhere.submit(put, database, "after").result(timeout=5)
            assert reader.execute(select(STORE_META.c.key)).scalars().all() == ["before", "during"]
        assert keys(database) == ["after", "before", "during"]


DRIVER_CHOICE = """
import sqlite3, sys, types
from memvault.database.engine import sqlite_driver

def named(name):
    return types.ModuleType(name)

def choose(capable, *present):
    sqlite3.Connection = type("Connection", (), {"enable_load_extension": None} if capable else {})
    for name in ("pysqlite3", "sqlean"):
        sys.modules[name] = named(name) if name in present else None
        sys.modules[f"{name}.dbapi2"] = named(f"{name}.dbapi2") if name in present else None
    sqlite_driver.cache_clear()
    assert sqlite_driver() is sqlite_driver()
    print(sqlite_driver().__name__)

choose(True, "pysqlite3", "sqlean")
choose(False, "pysqlite3", "sqlean")
choose(False, "sqlean")
choose(False)
"""


def run(code: str) -> list[str]:
    """The lines that a fresh interpreter prints: what is done to its modules stays there."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class TestDriver:
    def test_choice(self) -> None:
        assert run(DRIVER_CHOICE) == ["sqlite3", "pysqlite3.dbapi2", "sqlean.dbapi2", "sqlite3"]

    def test_without_pysqlite3_everything_works_by_the_standard_library(self, path: Path) -> None:
        code = (
            "import sys\n"
            "sys.modules['pysqlite3'] = sys.modules['sqlean'] = None\n"
            "from memvault.database.engine import create_engine\n"
            f"engine = create_engine({f'sqlite:///{path}'!r})\n"
            "with engine.begin() as connection:\n"
            "    connection.exec_driver_sql('CREATE TABLE t (x)')\n"
            "print(engine.dialect.dbapi.__name__.partition('.')[0])\n"
        )
        assert run(code) == ["sqlite3"]

    def test_every_engine_uses_the_chosen_one(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        assert engine.dialect.dbapi is sqlite_driver()
        with engine.connect() as connection:
            assert isinstance(connection.connection.dbapi_connection, sqlite_driver().Connection)


class TestUrls:
    @pytest.mark.parametrize("database", ["memvault.db", "/tmp/memvault.db", "a folder/Zoë %.db", ":memory:.db"])
    def test_files_are_fine(self, database: str) -> None:
        assert parse_url(f"sqlite:///{database}").database == database

    def test_a_parsed_url_is_fine(self) -> None:
        url = parse_url("sqlite:///memvault.db")
        assert parse_url(url) == url

    @pytest.mark.parametrize(
        "url",
        [
            "sqlite://",
            "sqlite:///",
            "sqlite:///:memory:",
            "sqlite:///file::memory:?uri=true",
            "sqlite:///file::memory:?cache=shared&uri=true",
            "sqlite:///file:name?mode=memory&cache=shared&uri=true",
        ],
    )
    def test_in_memory_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match="in-memory"):
            parse_url(url)

    @pytest.mark.parametrize(
        "url", ["", "memvault.db", ":memory:", "sqlite:memvault.db", "sqlite:/memvault.db", None, 3, b"sqlite:///a"]
    )
    def test_what_is_no_url_is_refused(self, url: Any) -> None:
        with pytest.raises(ConfigurationError, match="sqlite:///memvault.db"):
            parse_url(url)

    @pytest.mark.parametrize(
        "url",
        [
            "mysql://u@h/db",
            "oracle://u@h/db",
            "nonsense://x",
            "sqlite+aiosqlite:///a.db",
            "sqlite+pysqlcipher:///a.db",
            "sqlite+nonsense:///a.db",
        ],
    )
    def test_another_database_or_driver_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            create_engine(url)
        assert url.partition("://")[0].rpartition("+")[2] in str(caught.value)

    @pytest.mark.parametrize(
        "password", ["s3cr3t", "s3cr3t%25", "a@s3cr3t", "a/s3cr3t", "a:s3cr3t", "#s3cr3t?", "s3cr3t]["]
    )
    @pytest.mark.parametrize(
        "template",
        [
            "postgresql://user:{}@host:port/db",
            "postgresql//user:{}@host/db",
            "user:{}@host/db",
            "mysql://user:{}@host/db",
            "nonsense://user:{}@host/db",
            "sqlite://user:{}@host/a.db",
            "sqlite+nonsense://user:{}@host/a.db",
            "sqlite+pysqlcipher://:{}@/a.db",
            "postgresql+nonsense://host:port/db?password={}",
            "postgresql//host/db?password={}",
            "sqlite://host/a.db?password={}",
        ],
    )
    def test_no_error_repeats_the_password(self, template: str, password: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            create_engine(template.format(password))
        seen = "".join(traceback.format_exception_only(caught.value))
        cause = caught.value.__cause__
        while cause is not None:
            seen += "".join(traceback.format_exception_only(cause))
            cause = cause.__cause__
        assert "s3cr3t" not in seen


INCREMENTS = 25


def increment(database: Database, times: int) -> None:
    """Read, think, write: what loses updates where two may read before either writes."""
    for _ in range(times):
        with database.writing() as connection:
            value = connection.execute(select(COUNTERS.c.value).where(COUNTERS.c.id == 1)).scalar_one()
            connection.execute(update(COUNTERS).where(COUNTERS.c.id == 1).values(value=value + 1))


INCREMENT_IN_A_PROCESS = f"""
import sys, threading
from sqlalchemy import text
from memvault.database.engine import create_engine
from memvault.database.transactions import Database

database = Database(create_engine(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()

def work():
    for _ in range({INCREMENTS}):
        with database.writing() as connection:
            value = connection.execute(text("SELECT value FROM counters WHERE id = 1")).scalar_one()
            connection.execute(text("UPDATE counters SET value = :value WHERE id = 1"), {{"value": value + 1}})

threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("done", flush=True)
"""


class TestConcurrency:
    @pytest.fixture
    def counter(self, database: Database) -> Callable[[], int]:
        with database.writing() as connection:
            connection.execute(insert(COUNTERS).values(id=1, value=0))

        def value() -> int:
            with database.reading() as connection:
                counted: int = connection.execute(select(COUNTERS.c.value)).scalar_one()
                return counted

        return value

    def test_eight_threads_lose_nothing(self, database: Database, counter: Callable[[], int]) -> None:
        together = threading.Barrier(8)

        def work(_: int) -> None:
            together.wait(timeout=30)
            increment(database, INCREMENTS)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert counter() == 8 * INCREMENTS

    def test_four_processes_of_two_threads_lose_nothing(self, database: Database, counter: Callable[[], int]) -> None:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", INCREMENT_IN_A_PROCESS, str(database.engine.url)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        try:
            for process in started:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for process in started:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            for process in started:
                output, _ = process.communicate(timeout=60)
                assert (process.returncode, output) == (0, "done\n")
        finally:
            for process in started:
                process.kill()
                process.communicate()
        assert counter() == 8 * INCREMENTS

    def test_a_fresh_file_opened_by_many_at_once(self, make_engine: MakeEngine) -> None:
        engines = [make_engine() for _ in range(8)]
        together = threading.Barrier(8)

        def work(engine: Engine) -> str:
            together.wait(timeout=30)
            with engine.connect() as connection:
                return str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(work, engines)) == {"wal"}


def said(error: BaseException) -> str:
    """Every message in a chain of errors."""
    messages = []
    link: BaseException | None = error
    while link is not None:
        messages.append(str(link))
        messages.append(str(getattr(link, "orig", "")))
        link = link.__cause__
    return "\n".join(messages)


SECRET = "-".join(["this", "is", "nobody's", "business"])


class TestErrors:
    def test_locked_is_retryable(self, database: Database, make_engine: MakeEngine) -> None:
        impatient = Database(make_engine(pragmas=("busy_timeout = 50",)))
        keys(impatient)
        with database.writing(), pytest.raises(StorageError, match="locked") as caught:
            put(impatient, "a", SECRET)
        assert caught.value.retryable
        assert isinstance(caught.value.__cause__, exc.OperationalError)
        put(impatient, "a")

    def test_a_snapshot_that_cannot_be_written_from_is_retryable(self, database: Database) -> None:
        put(database, "a")

        def read_then_write() -> None:
            with ThreadPoolExecutor(1) as elsewhere, database.reading() as reader:
                reader.execute(select(STORE_META)).all()
                elsewhere.submit(put, database, "b").result(timeout=5)
                reader.execute(insert(STORE_META).values(key="c", value=""))

        with pytest.raises(StorageError) as caught:
            read_then_write()
        assert caught.value.retryable
        assert keys(database) == ["a", "b"]

    def test_a_taken_key_shows_no_values(self, database: Database) -> None:
        put(database, SECRET)
        with pytest.raises(StorageError, match="UNIQUE constraint failed: store_meta.key") as caught:
            put(database, SECRET, SECRET)
        assert not caught.value.retryable
        assert isinstance(caught.value.__cause__, exc.IntegrityError)
        assert SECRET not in said(caught.value)

    def test_a_missing_value_shows_none_of_the_others(self, database: Database) -> None:
        failed = "NOT NULL constraint failed: store_meta.value"
        with pytest.raises(StorageError, match=failed) as caught, database.writing() as connection:
            connection.execute(insert(STORE_META).values(key=SECRET, value=None))
        assert SECRET not in said(caught.value)

    def test_many_rows_show_no_values_either(self, database: Database) -> None:
        with pytest.raises(StorageError) as caught, database.writing() as connection:
            connection.execute(insert(STORE_META), [{"key": SECRET, "value": SECRET}] * 2)
        assert SECRET not in said(caught.value)

    def test_a_full_disk_keeps_what_was_acknowledged(self, database: Database, make_engine: MakeEngine) -> None:
        with database.reading() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        small = Database(make_engine(pragmas=(f"max_page_count = {pages + 20}",)))
        acknowledged: list[str] = []

        def fill() -> None:
            for number in range(100):
                put(small, f"{number:03}", SECRET * 200)
                acknowledged.append(f"{number:03}")

        with pytest.raises(StorageError, match="full") as caught:
            fill()
        assert not caught.value.retryable
        assert SECRET not in said(caught.value)
        assert 0 < len(acknowledged) < 100
        assert keys(small) == acknowledged
        with small.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        put(database, "later")

    def test_a_read_only_file_can_be_read(self, database: Database, make_engine: MakeEngine, path: Path) -> None:
        put(database, "a")
        read_only = Database(make_engine(f"sqlite:///file:{path}?mode=ro&uri=true"))
        assert keys(read_only) == ["a"]
        with pytest.raises(StorageError, match=r"readonly.*may this process write the file and its folder") as caught:
            put(read_only, "b", SECRET)
        assert not caught.value.retryable
        assert SECRET not in said(caught.value)

    def test_a_read_only_file_that_was_never_prepared_fails_at_once(self, make_engine: MakeEngine, path: Path) -> None:
        connection = sqlite_driver().connect(str(path))
        connection.execute("CREATE TABLE store_meta (key, value)")
        connection.close()
        read_only = Database(make_engine(f"sqlite:///file:{path}?mode=ro&uri=true"))
        before = time.monotonic()
        with pytest.raises(StorageError, match="readonly"):
            put(read_only, "a")
        assert time.monotonic() - before < 5

    def test_what_is_no_database_fails_at_once(self, make_engine: MakeEngine, path: Path) -> None:
        path.write_bytes(b"this is a letter, not a database" * 1000)
        before = time.monotonic()
        with pytest.raises(StorageError, match="not a database") as caught:
            keys(Database(make_engine()))
        assert time.monotonic() - before < 5
        assert not caught.value.retryable

    def test_a_missing_folder_fails_at_once(self, make_engine: MakeEngine, tmp_path: Path) -> None:
        before = time.monotonic()
        with pytest.raises(StorageError, match="unable to open database file"):
            keys(Database(make_engine(f"sqlite:///{tmp_path / 'absent' / 'a.db'}")))
        assert time.monotonic() - before < 5

    def test_a_missing_table_is_not_retryable(self, make_engine: MakeEngine) -> None:
        database = Database(make_engine())
        for table in ("absent", "locked_doors", "busy_people"):
            with pytest.raises(StorageError, match=table) as caught, database.reading() as connection:
                connection.exec_driver_sql(f"SELECT * FROM {table}")
            assert not caught.value.retryable

    def test_no_free_connection_is_retryable(self, make_engine: MakeEngine) -> None:
        engine = make_engine(pool_size=1, max_overflow=0, pool_timeout=0.05)
        with Database(engine).reading(), pytest.raises(StorageError, match="pool_size") as caught:
            keys(Database(engine))
        assert caught.value.retryable

    @pytest.mark.parametrize("error", [KeyError("mine"), ValueError("mine"), RuntimeError("mine"), KeyboardInterrupt()])
    def test_errors_of_programmers_pass_unchanged(self, database: Database, error: BaseException) -> None:
        with pytest.raises(type(error)) as caught:
            put_and_raise(database, error)
        assert caught.value is error
        assert keys(database) == []

    def test_mistakes_in_statements_pass_unchanged(self, database: Database) -> None:
        with pytest.raises(exc.CompileError), database.writing() as connection:
            connection.execute(insert(STORE_META).values(key="a", value="", no_such_column=1))
        with pytest.raises(exc.StatementError, match="naive") as caught, database.writing() as connection:
            connection.execute(insert(TIMES).values(at=datetime(2024, 5, 1)))  # noqa: DTZ001 - what is refused
        assert not isinstance(caught.value, exc.DBAPIError)

    def test_ours_pass_unchanged(self) -> None:
        ours = StorageError("ours", retryable=True)
        with pytest.raises(StorageError) as caught, database_errors():
            raise ours
        assert caught.value is ours
