"""How is the engine made? The one place that picks the SQLite driver and sets what every connection needs."""

from __future__ import annotations

import importlib
import sqlite3
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

from sqlalchemy import URL, Connection, Dialect, Engine, event, make_url
from sqlalchemy import create_engine as sa_create_engine
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from memvault.database import postgres
from memvault.database.base import SCHEMA
from memvault.errors import ConfigurationError
from memvault.text import dump_json, load_json

READ_ONLY = "memvault_read_only"
"""Execution option of a connection whose transactions only read: on SQLite they begin DEFERRED, and wait for nobody."""

_TRANSLATIONS = "schema_translate_map"

_prepared: WeakSet[Dialect] = WeakSet()
"""Of the engines that `listen` was given. An engine and those made of it by execution_options share their dialect."""

BUSY_TIMEOUT_MS = 30_000
WAL_RETRY_SECONDS = 30.0


@cache
def sqlite_driver() -> ModuleType:
    """The SQLite library for everything in this process: two of them on one file would break each other's locks.

    The standard library's, where it can load extensions; else pysqlite3, else sqlean.py, where installed; else the
    standard library's all the same, which serves every index but sqlite-vec.
    """
    if hasattr(sqlite3.Connection, "enable_load_extension"):
        return sqlite3
    for name in ("pysqlite3", "sqlean"):
        try:
            return importlib.import_module(f"{name}.dbapi2")
        except ImportError:
            continue
    return sqlite3


def parse_url(url: str | URL) -> URL:
    """A database URL that this version can open, or a ConfigurationError; the password is in no message."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as exc:
        # SQLAlchemy's message repeats the URL, password and all; so would the chained exception.
        raise ConfigurationError("the database URL cannot be parsed; write it like sqlite:///memvault.db") from (
            None if isinstance(url, str) and "@" in url else exc
        )
    if parsed.get_backend_name() in ("postgresql", "postgres"):
        if parsed.drivername not in postgres.NAMES:
            raise ConfigurationError(f"no driver {parsed.get_driver_name()!r}: write postgresql://…, it is psycopg 3")
        return postgres.with_hidden_password(parsed.set(drivername=postgres.DRIVER))
    if parsed.get_backend_name() != "sqlite":
        raise ConfigurationError(
            f"no database of kind {parsed.get_backend_name()!r}: memvault stores on SQLite (sqlite:///relative.db or "
            "sqlite:////absolute.db) and on PostgreSQL (postgresql://user:password@host/database)"
        )
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise ConfigurationError(f"no driver {parsed.get_driver_name()!r}: write sqlite:///…, the driver is picked")
    if parsed.host or parsed.username or parsed.password or parsed.port:
        raise ConfigurationError("a SQLite URL names a file, no host: sqlite:///relative.db or sqlite:////absolute.db")
    database = parsed.database or ""
    if database in ("", ":memory:") or database.startswith("file::memory:") or parsed.query.get("mode") == "memory":
        raise ConfigurationError('an in-memory SQLite database is one connection\'s only; open ":memory:" instead')
    return parsed


def require_folder(url: URL) -> None:
    """Raise ConfigurationError where the folder of a SQLite file does not exist: SQLite would not say which."""
    if url.get_backend_name() != "sqlite":
        return
    if not (folder := sqlite_file(url).parent).is_dir():
        raise ConfigurationError(f"the folder of the database does not exist: {folder}; make it first")


def sqlite_file(url: URL) -> Path:
    """The file that a SQLite URL names, absolute; also where it is written as a ``file:`` URI."""
    assert url.database is not None
    name = unquote(urlsplit(url.database).path) if url.database.startswith("file:") else url.database
    return Path(name).absolute()


def create_engine(url: str | URL, *, schema_name: str | None = None, **options: Any) -> Engine:
    """An engine as memvault needs it: driver, pragmas, explicit BEGIN, JSON, no values in error messages.

    ``schema_name``: the PostgreSQL schema of memvault's tables; tables of others stay where they are. ``options`` go
    to `sqlalchemy.create_engine` and win over ours.
    """
    parsed = parse_url(url)
    settings: dict[str, Any] = {"hide_parameters": True, "json_serializer": dump_json, "json_deserializer": load_json}
    on_sqlite = parsed.get_backend_name() == "sqlite"
    if not {"pool", "poolclass"} & options.keys():
        settings["pool_use_lifo"] = True  # the connection that was used last has the most in its caches
    if on_sqlite:
        settings["module"] = sqlite_driver()
    else:
        postgres.require_psycopg()
        # A server closes idle connections, and a failed call cannot always be repeated.
        settings["pool_pre_ping"] = True
    try:
        engine = sa_create_engine(parsed, **{**settings, **options})
    except (NoSuchModuleError, TypeError, ArgumentError) as exc:
        raise ConfigurationError(f"the engine cannot be made: {exc}") from exc
    if not on_sqlite:
        event.listen(engine, "connect", postgres.prepare)
    listen(engine)
    _translate(engine, schema_name)
    return engine


def listen(engine: Engine) -> None:
    """Give an engine what memvault needs of it: once an engine, whoever made it."""
    if engine.dialect in _prepared:
        return
    _prepared.add(engine.dialect)
    if schema_of(engine) is None:
        _translate(engine, None)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "before_cursor_execute", postgres.fetch_binary)
    elif engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin)
        engine.dispose()  # connections of before would go without


def is_ours(engine: Engine) -> bool:
    """Whether `create_engine` made this engine, or a vault was opened on it."""
    return engine.dialect in _prepared


def schema_of(place: Engine | Connection) -> str | None:
    """The schema that our tables are looked for in; None for the database's default."""
    name: str | None = place.get_execution_options().get(_TRANSLATIONS, {}).get(SCHEMA)
    return name


def in_schema(engine: Engine, schema_name: str | None) -> Engine:
    """The engine, on the same connections, for a vault in this schema; None: in the one that the engine has."""
    listen(engine)
    if schema_name is None or schema_name == schema_of(engine):
        return engine
    return engine.execution_options(**{_TRANSLATIONS: _translations(engine, schema_name)})


def translate_on(connection: Connection, schema_name: str | None) -> None:
    """Tell a connection that somebody else opened where our tables are; theirs are not concerned."""
    connection.execution_options(**{_TRANSLATIONS: _translations(connection, schema_name)})


def _translate(engine: Engine, schema_name: str | None) -> None:
    engine.update_execution_options(**{_TRANSLATIONS: _translations(engine, schema_name)})


def _translations(place: Engine | Connection, schema_name: str | None) -> dict[str | None, str | None]:
    if schema_name is not None:
        if place.dialect.name != "postgresql":
            raise ConfigurationError(f"schema_name={schema_name!r} is for PostgreSQL: a SQLite file is one schema")
        postgres.check_schema_name(schema_name)
    return {**place.get_execution_options().get(_TRANSLATIONS, {}), SCHEMA: schema_name}


def _prepare(dbapi_connection: Any, _record: object) -> None:
    # The driver's legacy transaction control commits behind our back and lets two writers read before either writes.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    _set_wal(cursor)
    for pragma in (
        "synchronous = NORMAL",
        "foreign_keys = ON",
        "secure_delete = ON",
        "wal_autocheckpoint = 20000",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _set_wal(cursor: Any) -> None:
    """Two connections that switch a fresh file at once: one is refused without the busy handler being asked."""
    deadline = time.monotonic() + WAL_RETRY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite_driver().OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get(READ_ONLY, False):
        # Past SQLAlchemy, which takes longer than SQLite: it waits for nobody, and cannot fail.
        driver_connection: Any = connection.connection.dbapi_connection
        driver_connection.execute("BEGIN")
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
