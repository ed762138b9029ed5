"""Which vault is a command about, and is it there?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from sqlalchemy import URL

from memvault import ConfigurationError, NotFoundError, StorageLayer, create_engine
from memvault.config import PREFIX, settings_from_env
from memvault.database import migrate
from memvault.database.engine import parse_url, sqlite_file
from memvault.database.transactions import Database
from memvault.indexing.vault import find_vault

URL_VARIABLE = f"{PREFIX}DATABASE_URL"

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        envvar=URL_VARIABLE,
        metavar="URL",
        help="The vault's database, such as sqlite:///memvault.db.",
        show_default=False,
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def require_url(database_url: str | None) -> URL:
    """The URL that the option or the environment gave; ConfigurationError where neither did."""
    if not database_url:
        raise ConfigurationError(
            f"which database? Give --database-url sqlite:///memvault.db, or set {URL_VARIABLE} to such a URL"
        )
    return parse_url(database_url)


def require_database(database_url: str | None) -> URL:
    """As `require_url`; NotFoundError where it is a SQLite file that does not exist: opening it would make it."""
    url = require_url(database_url)
    if url.get_backend_name() != "sqlite":
        return url  # connecting tells whether it is there
    if not (path := sqlite_file(url)).is_file():
        raise NotFoundError(f"there is no database at {path}; `memvault import` or `memvault db upgrade` makes one")
    return url


def schema_name() -> str | None:
    """The PostgreSQL schema that the environment gives, for a database that it or an option gives."""
    return os.environ.get(f"{PREFIX}SCHEMA_NAME") or None


@contextmanager
def open_vault(database_url: str | None, **otherwise: Any) -> Iterator[StorageLayer]:
    """The vault as `StorageLayer.from_env` opens it: founded where there is none. ``otherwise``: for what the
    environment leaves open."""
    require_url(database_url)
    with StorageLayer.open(**{**otherwise, **_settings(database_url)}) as storage:
        yield storage


@contextmanager
def existing_vault(database_url: str | None) -> Iterator[StorageLayer]:
    """The vault, for commands that only look: none is founded, and none migrated unless MEMVAULT_SCHEMA says so.

    What they write, or find owed, is paid when they sync, and not beside it.
    """
    url = require_database(database_url)
    settings = {"schema": "check", **_settings(database_url), "indexing": "manual"}
    _require_founded(url, settings["schema"])
    with StorageLayer.open(**settings) as storage:
        yield storage


def _settings(database_url: str | None) -> dict[str, Any]:
    return settings_from_env({**os.environ, URL_VARIABLE: database_url or ""})


def _require_founded(url: URL, schema: str) -> None:
    engine = create_engine(url, schema_name=schema_name())
    try:
        if schema == "check":
            migrate.require_head(engine)
        elif schema == "upgrade":
            migrate.upgrade(engine)
        if find_vault(Database(engine)) is None:
            raise NotFoundError(
                f"there is no vault yet in {url.render_as_string(hide_password=True)}: it is founded by the first "
                "`memvault import` or StorageLayer.open, which choose its index and embedder"
            )
    finally:
        engine.dispose()
