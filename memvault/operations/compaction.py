"""How is the disk space given back that deleted memories have left behind?

A SQLite file keeps the pages of what was deleted, sqlite-vec the places of the vectors, Chroma the texts. What is
derived from SQL is made anew from it, and then the file is written anew. PostgreSQL looks after itself.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from memvault.database.engine import sqlite_file
from memvault.database.transactions import Database
from memvault.database.translate import database_errors
from memvault.errors import VectorIndexError
from memvault.indexing.reach import IndexReach
from memvault.values import CompactReport, SyncReport
from memvault.vectors.base import SizedIndex, TransactionalIndex


def compact(database: Database, reach: IndexReach, pay_all: Callable[[], SyncReport]) -> CompactReport:
    """As `StorageLayer.compact` promises."""
    engine = database.engine
    index = reach.acquire(now=True)
    if index is None and reach.last_error is not None and not reach.row.transactional:
        raise reach.last_error
    database_before, index_before = _database_size(engine), _index_size(index)
    if isinstance(index, SizedIndex):
        reach.rebuild()
        if (report := pay_all()).owed:
            raise VectorIndexError(
                f"{report.owed:,} records are not in the new index yet, and stay owed; searches are right all the same"
            )
    elif isinstance(index, TransactionalIndex) and engine.dialect.name == "sqlite":
        index.purge()  # until it is made, searches are exact
        index.create()
    if engine.dialect.name == "sqlite":
        _rewrite(engine)
    return CompactReport(
        database_before=database_before,
        database_after=_database_size(engine),
        index_before=index_before,
        index_after=_index_size(index),
    )


def _rewrite(engine: Engine) -> None:
    errors = engine.dialect.loaded_dbapi.Error
    with database_errors():
        pooled = engine.raw_connection()
        try:
            cursor = pooled.cursor()
            cursor.execute("VACUUM")  # as one transaction, beside readers
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # now the file is shorter
        except errors as exc:
            raise DBAPIError.instance("VACUUM", None, exc, errors, hide_parameters=True) from exc
        finally:
            pooled.close()


def _database_size(engine: Engine) -> int | None:
    if engine.dialect.name != "sqlite":
        return None
    path = sqlite_file(engine.url)
    return sum(file.stat().st_size for file in (path, path.with_name(f"{path.name}-wal")) if file.exists())


def _index_size(index: object) -> int | None:
    return index.size() if isinstance(index, SizedIndex) else None
