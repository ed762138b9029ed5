"""How do the driver's errors become ours? The one boundary; errors of programmers pass unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import exc

from memvault.database.postgres import forget_values, is_retryable
from memvault.errors import StorageError

_RETRYABLE_SQLITE = (5, 6)
"""SQLITE_BUSY and SQLITE_LOCKED: the low byte of the error's code."""


@contextmanager
def database_errors() -> Iterator[None]:
    """Raise what SQLAlchemy raises for the database's sake as StorageError, chained."""
    try:
        yield
    except exc.TimeoutError as error:
        raise StorageError(
            "no database connection became free in time; raise engine_options pool_size, or look for transactions "
            "that are left open",
            retryable=True,
        ) from error
    except exc.IntegrityError as error:
        forget_values(error)
        raise StorageError(f"the database refused the change: {error.orig}") from error
    except exc.DBAPIError as error:
        forget_values(error)
        reason = str(error.orig)
        on_postgres = type(error.orig).__module__.startswith("psycopg")
        if not on_postgres and "readonly" in reason.replace(" ", ""):
            reason += " (may this process write the file and its folder?)"
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        raise StorageError(
            f"the database failed: {reason}",
            retryable=error.connection_invalidated
            or code in _RETRYABLE_SQLITE
            or (on_postgres and is_retryable(error)),
        ) from error
