"""What does Alembic need to know of memvault? Where the database is, which tables are ours, and which locks to hold."""

import os
from logging.config import fileConfig
from typing import Any

import sqlalchemy as sa
from alembic import context
from alembic.util import CommandError

from memvault.database import base, engine, migrate, migration_locks, postgres
from memvault.database.translate import database_errors
from memvault.errors import MemvaultError
from memvault.models import metadata  # every table, declared

assert metadata is base.metadata

config = context.config
connection: sa.Connection | None = config.attributes.get(migrate.CONNECTION)


def database_url() -> str:
    url = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("MEMVAULT_DATABASE_URL")
    if not url:
        raise CommandError("which database? Set MEMVAULT_DATABASE_URL, or give -x url=sqlite:///memvault.db")
    return url


def schema_name() -> str | None:
    """The PostgreSQL schema of our tables, as a command line gives it."""
    name = context.get_x_argument(as_dictionary=True).get("schema_name") or os.environ.get("MEMVAULT_SCHEMA_NAME")
    return name or None


def ours(name: str | None, kind: str, _parents: Any) -> bool:
    """Compare our own tables only: a host application's, and SQLite's shadow tables, are none of our business."""
    return kind != "table" or name in base.table_names()


def render(kind: str, value: Any, _context: Any) -> str | bool:
    """Spell our column types in SQLAlchemy's words, so that a revision outlives what it was generated from."""
    if kind == "type" and isinstance(value, base.UtcDateTime):
        return "sa.DateTime(timezone=True)"
    return False


OPTIONS: dict[str, Any] = {
    "target_metadata": base.plain_metadata(),
    "version_table": base.VERSION_TABLE,
    "include_name": ours,
    "render_item": render,
    "render_as_batch": True,
    "compare_server_default": True,
    "transactional_ddl": True,
}


def migrate_on(connection: sa.Connection) -> None:
    context.configure(connection=connection, version_table_schema=engine.schema_of(connection), **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


def offline() -> None:
    """Print the SQL: for a database that only an administrator may change."""
    url, schema = engine.parse_url(database_url()), schema_name()
    context.configure(url=url, literal_binds=True, version_table_schema=schema, **OPTIONS)
    with context.begin_transaction():
        if schema is not None:
            quoted = migration_locks.quoted(postgres.check_schema_name(schema))
            context.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted}")
            context.execute(f"SET LOCAL search_path TO {quoted}")
        context.run_migrations()


def from_command_line() -> None:
    if config.config_file_name is not None:
        fileConfig(config.config_file_name, disable_existing_loggers=False)
    try:
        if context.is_offline_mode():
            offline()
            return
        own_engine = migrate.migration_engine(database_url(), schema_name())
        with database_errors(), own_engine.connect() as own:
            migrate.run(own, lambda: migrate_on(own))
    except MemvaultError as exc:
        raise CommandError(str(exc)) from exc


if connection is None:
    from_command_line()
else:
    given = connection
    migrate.run(given, lambda: migrate_on(given))
