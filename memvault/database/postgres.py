"""What is particular to PostgreSQL? Its driver, what every connection is told, and how its errors are read."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, exc

from memvault.errors import ConfigurationError, MissingDependencyError

DRIVER = "postgresql+psycopg"
NAMES = ("postgresql", "postgres", DRIVER)
"""What a URL may begin with: hosting services hand out ``postgres://``, which SQLAlchemy does not know."""

LOCK_TIMEOUT_MS = 30_000
"""As long as SQLite waits for a lock here."""

MAX_IDENTIFIER_BYTES = 63

INSUFFICIENT_PRIVILEGE = "42501"
_ROLLED_BACK = ("40001", "40P01")
"""serialization_failure and deadlock_detected: nothing of the transaction stays, and it may be run again."""

_RETRYABLE = (*_ROLLED_BACK, "55P03", "57P01", "57P02", "57P03", "53300")
"""Also: no lock in time, the server shuts down, starts, or has no connection left."""

_NOT_NOW = ("starting up", "shutting down", "recovery mode", "too many clients", "connection slots")
"""What a server says that answers, and lets nobody in for the moment."""

READING: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
WRITING: dict[str, Any] = {"isolation_level": "READ COMMITTED", "postgresql_readonly": False}
"""Of our own transactions, whatever an engine that was handed to us does by itself. Writers need no more: each holds
its owner's row from the beginning, and must see what the last holder committed."""


def require_psycopg() -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f'PostgreSQL needs psycopg 3: pip install "memvault[postgres]" ({error})'
        ) from error


def with_hidden_password(url: URL) -> URL:
    """libpq takes a password among the options, too, where SQLAlchemy shows it whenever it shows the URL."""
    given = url.query.get("password")
    if given is None:
        return url
    if url.password is not None or not isinstance(given, str):
        raise ConfigurationError("the database URL gives the password more than once; leave it out of the options")
    return url.difference_update_query(["password"]).set(password=given)


def prepare(connection: Any, _record: object) -> None:
    """For a new connection: times at the edges of the calendar have no local equivalent in every zone."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET TIME ZONE 'UTC'; SET lock_timeout = {LOCK_TIMEOUT_MS}")
    connection.commit()


BINARY = "memvault_binary"
"""Execution option of a statement that fetches many bytes: as text, which is the default, they are hexadecimal."""


def fetch_binary(_conn: object, cursor: Any, statement: str, parameters: Any, context: Any, _many: bool) -> None:
    """For the event before each statement."""
    if context is not None and context.execution_options.get(BINARY):
        cursor.format = 1  # psycopg.pq.Format.BINARY


def check_schema_name(name: object) -> str:
    """The name of a schema that our tables may lie in. Raises ConfigurationError."""
    if not isinstance(name, str) or not name.strip() or "\x00" in name:
        raise ConfigurationError(f"schema_name must be a name, got {name!r}")
    if len(name.encode(errors="replace")) > MAX_IDENTIFIER_BYTES:
        raise ConfigurationError(f"schema_name must have at most {MAX_IDENTIFIER_BYTES} bytes, got {name!r}")
    if name.startswith("pg_") or name in ("information_schema", "$user"):
        raise ConfigurationError(f"schema_name {name!r} is PostgreSQL's own; choose another")
    return name


def sqlstate(error: BaseException | None) -> str | None:
    """The five characters by which PostgreSQL names an error; None where it was not PostgreSQL's."""
    if isinstance(error, exc.DBAPIError):
        error = error.orig
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else None


def forget_values(error: exc.DBAPIError) -> None:
    """Reduce an error to what went wrong: PostgreSQL's details quote the whole row, somebody's memories included."""
    diagnosis = getattr(error.orig, "diag", None)
    primary = getattr(diagnosis, "message_primary", None)
    if error.orig is not None and primary is not None:
        error.orig.args = (primary,)
        error.args = (f"({type(error.orig).__module__}.{type(error.orig).__name__}) {primary}",)


def is_retryable(error: BaseException | None) -> bool:
    """Whether the same call may succeed unchanged later."""
    if isinstance(error, exc.OperationalError) and sqlstate(error) is None:  # there is no connection to name a state
        reason = str(error.orig)
        return "FATAL:" not in reason or any(words in reason for words in _NOT_NOW)
    return sqlstate(error) in _RETRYABLE


def was_rolled_back(error: BaseException | None) -> bool:
    """Whether the server undid the transaction for the sake of another one: running it again is safe and right."""
    return sqlstate(error) in _ROLLED_BACK
