"""How does a database come to the schema of this package, and how is it told where it stands?

The revisions are Alembic's, in ``alembic/`` beside this package in a checkout and in ``_migrations/`` inside an
installed one. `run` is what their env.py calls: it holds the locks, whoever started the migration.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, NullPool, inspect

from memvault.database.base import VERSION_TABLE, metadata
from memvault.database.engine import READ_ONLY, create_engine, listen, parse_url, require_folder
from memvault.database.translate import database_errors
from memvault.errors import SchemaError

if TYPE_CHECKING:
    from alembic.config import Config

CONNECTION = "memvault_connection"
"""Key of `Config.attributes` for the connection that a migration runs on; env.py makes its own without one."""

_ONE_AT_A_TIME = threading.RLock()
"""Alembic keeps its context in module globals: one migration at a time in a process, whichever the database."""


def ini_path() -> Path:
    """The alembic.ini that goes with this package: pass it to ``alembic -c``."""
    package = Path(__file__).resolve().parents[1]
    for home in (package / "_migrations", package.parent):
        if (home / "alembic" / "env.py").is_file():
            return home / "alembic.ini"
    raise SchemaError(f"the migrations are missing from {package}: memvault is not installed whole, install it again")


def upgrade(target: Engine | URL | str, revision: str = "head") -> None:
    """Migrate a database up to a revision, atomically. At head already, it is only looked at."""
    with _command(target) as (engine, config):
        stands = _stands_at(engine)
        if revision == "head" and stands == _head(config):
            return
        _refuse_unknown(stands, config)
        _run_command("upgrade", engine, config, revision)


def downgrade(target: Engine | URL | str, revision: str) -> None:
    """Migrate a database down to a revision; "base" removes every table of memvault and all that is in them."""
    with _command(target) as (engine, config):
        _run_command("downgrade", engine, config, revision)


def current(target: Engine | URL | str) -> str | None:
    """The revision at which a database stands; None where memvault has never been there."""
    with _command(target) as (engine, _):
        return _stands_at(engine)


def head() -> str:
    """The newest revision of this package."""
    return _head(_config())


def history() -> list[tuple[str, str]]:
    """The revisions of this package, oldest first, each with its first line."""
    from alembic.script import ScriptDirectory

    revisions = ScriptDirectory.from_config(_config()).walk_revisions()
    return [(revision.revision, revision.doc) for revision in reversed(list(revisions))]


def require_head(target: Engine | URL | str) -> None:
    """Raise SchemaError, naming the command that helps, unless the database stands at head."""
    with _command(target) as (engine, config):
        stands, newest = _stands_at(engine), _head(config)
        if stands == newest:
            return
        _refuse_unknown(stands, config)
        raise SchemaError(
            f"the database is at revision {stands or 'none'}, this package needs {newest}; run `memvault db upgrade`"
        )


def _refuse_unknown(stands: str | None, config: Config) -> None:
    if stands is not None and stands not in {revision for revision, _ in history()}:
        raise SchemaError(
            f"the database is at revision {stands}, which this package does not know (its newest is {_head(config)}); "
            "upgrade memvault, or run `memvault db downgrade` with the version that made it"
        )


def run(connection: Connection, migrate: Callable[[], None]) -> None:
    """Run ``migrate`` on a connection under the lock that keeps other processes out; all of it or nothing commits.

    For env.py. On SQLite the transaction begins IMMEDIATE, so that the lock is taken before the revision is read, and
    foreign keys are checked at its end instead of on the way: batch migrations drop and rename parent tables.
    """
    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        _foreign_keys(connection, "OFF")
    try:
        with connection.begin():
            _refuse_foreign_tables(connection)
            migrate()
            if sqlite and (broken := _orphans(connection)):
                raise SchemaError(
                    f"the migration would leave {len(broken)} rows without their parent, e.g. {broken[0]}"
                )
    finally:
        if sqlite:
            _foreign_keys(connection, "ON")


def migration_engine(target: URL | str) -> Engine:
    """An engine for migrations: as memvault's own, without a pool."""
    url = parse_url(target)
    require_folder(url)
    return create_engine(url, poolclass=NullPool)


def _foreign_keys(connection: Connection, state: str) -> None:
    # Inside a transaction the pragma does nothing, and SQLAlchemy would begin one: hence on the driver's connection.
    driver_connection: Any = connection.connection.dbapi_connection
    driver_connection.execute(f"PRAGMA foreign_keys = {state}")


def _orphans(connection: Connection) -> list[Any]:
    """Rows without their parent, where either is ours: a host may keep its own as it likes."""
    rows = connection.exec_driver_sql("PRAGMA foreign_key_check")
    return [row for row in rows if row[0] in metadata.tables or row[2] in metadata.tables]


def _refuse_foreign_tables(connection: Connection) -> None:
    inspector = inspect(connection)
    names = {*inspector.get_table_names(), *inspector.get_view_names()}
    # SQLite's names differ in more than case, or not at all; tables and views share one namespace.
    present = {name.lower() for name in names} if connection.dialect.name == "sqlite" else names
    if VERSION_TABLE in present and connection.exec_driver_sql(f"SELECT 1 FROM {VERSION_TABLE}").first():
        return
    if taken := sorted(present & metadata.tables.keys()):
        raise SchemaError(
            f"tables named {', '.join(taken)} are in this database already, and memvault did not make them (it has no "
            f"{VERSION_TABLE} entry); nothing was changed. Use a database of memvault's own, or rename those tables"
        )


@contextlib.contextmanager
def _command(target: Engine | URL | str) -> Iterator[tuple[Engine, Config]]:
    engine = target if isinstance(target, Engine) else migration_engine(target)
    listen(engine)
    try:
        with _ONE_AT_A_TIME, database_errors():
            yield engine, _config()
    finally:
        if engine is not target:
            engine.dispose()


def _config() -> Config:
    from alembic.config import Config

    # Not read from alembic.ini: a % in the folder's name would break its interpolation.
    config = Config()
    config.set_main_option("script_location", str(ini_path().parent / "alembic").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _run_command(name: str, engine: Engine, config: Config, revision: str) -> None:
    from alembic import command
    from alembic.util import CommandError

    with engine.connect() as connection:
        config.attributes[CONNECTION] = connection
        try:
            getattr(command, name)(config, revision)
        except CommandError as exc:
            raise SchemaError(f"cannot {name} to {revision!r}: {exc}") from exc


def _stands_at(engine: Engine) -> str | None:
    from alembic.runtime.migration import MigrationContext

    with engine.connect() as connection:
        reading = connection.execution_options(**{READ_ONLY: True})
        return MigrationContext.configure(reading, opts={"version_table": VERSION_TABLE}).get_current_revision()


def _head(config: Config) -> str:
    from alembic.script import ScriptDirectory

    newest = ScriptDirectory.from_config(config).get_current_head()
    assert newest is not None
    return newest
