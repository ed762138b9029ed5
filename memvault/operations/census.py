"""Who and what is in a vault, and how does its index stand? Across owners, for operators."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select

from memvault.database.base import OWNERS, owned_tables
from memvault.database.transactions import Database
from memvault.errors import StorageError, VectorIndexError
from memvault.indexing.reach import IndexReach
from memvault.vectors.outbox import OUTBOX, count_owed

PAGE = 1000


def user_ids(database: Database) -> Iterator[str]:
    """Every user id, in order, read in pages so that no transaction stays open between two of them."""
    last: str | None = None
    while True:
        statement = select(OWNERS.c.user_id).order_by(OWNERS.c.user_id).limit(PAGE)
        if last is not None:
            statement = statement.where(OWNERS.c.user_id > last)
        with database.reading() as connection:
            page = list(connection.execute(statement).scalars())
        yield from page
        if len(page) < PAGE:
            return
        last = page[-1]


def owed(database: Database, index_id: int, user_id: str) -> int:
    """How many debts the index has for one user."""
    with database.reading() as connection:
        return count_owed(connection, index_id, user_id)


def health(database: Database, reach: IndexReach) -> dict[str, Any]:
    report: dict[str, Any] = {
        "ok": True,
        "debts": None,
        "oldest_debt_s": None,
        "last_error": None if reach.last_error is None else str(reach.last_error),
        "index_owned_elsewhere": reach.owned_elsewhere,
        "index_owner_pid": reach.owner_pid,
    }
    try:
        with database.reading() as connection:
            count, oldest = connection.execute(
                select(func.count(), func.min(OUTBOX.c.marked_at)).where(OUTBOX.c.index_id == reach.row.id)
            ).one()
            failure = connection.execute(
                select(OUTBOX.c.last_error)
                .where(OUTBOX.c.index_id == reach.row.id, OUTBOX.c.last_error.is_not(None))
                .order_by(OUTBOX.c.not_before.desc())
                .limit(1)
            ).scalar_one_or_none()
    except StorageError as exc:
        return {**report, "ok": False, "last_error": str(exc)}
    age = None if oldest is None else max(0.0, (datetime.now(UTC) - oldest).total_seconds())
    # What the index last refused, for as long as that is owed; or why it cannot be asked at all.
    return {**report, "debts": count, "oldest_debt_s": age, "last_error": report["last_error"] or failure}


def stats(database: Database, reach: IndexReach) -> dict[str, Any]:
    """``users``, ``rows`` by table, ``vectors``, ``model``, ``dimension``, ``index``, ``index_records`` (None where it
    cannot be reached), ``debts``.
    """
    with database.reading() as connection:
        rows = {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in reversed(owned_tables())
        }
        users = connection.execute(select(func.count()).select_from(OWNERS)).scalar_one()
        debts = count_owed(connection, reach.row.id)
    records: int | None = None
    for _ in range(2):  # one that has failed unnoticed is opened again
        if (index := reach.acquire(now=True)) is None:
            break
        try:
            records = index.count()
            break
        except VectorIndexError as exc:
            reach.lost(exc)
    return {
        "users": users,
        "rows": rows,
        "vectors": rows["memory_vectors"],
        "model": reach.row.model,
        "dimension": reach.row.dimension,
        "index": reach.row.spec,
        "index_records": records,
        "debts": debts,
    }
