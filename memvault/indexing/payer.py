"""How is paid what an index owes? Read the committed state, make the index equal to it, settle.

Idempotent and free of order: a debt says only that a chunk is owed, never what happened to it. A crash anywhere leaves
the debt, and it is paid again. A debt whose generation rose meanwhile is not settled: it changed under our hands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Select, bindparam, delete, or_, select, update

from memvault.database.batches import batches
from memvault.database.transactions import Database
from memvault.database.unit import Unit
from memvault.errors import StorageError, VectorIndexError
from memvault.indexing.committed import records_of
from memvault.indexing.reach import IndexReach
from memvault.values import SyncReport
from memvault.vectors.base import VectorIndex, VectorRecord
from memvault.vectors.outbox import OUTBOX, count_owed

log = logging.getLogger("memvault.index")

BATCH = 5000
"""Debts of a write that are paid at once: as many as one transaction of `add_many` leaves."""

OTHERS_BATCH = 200
"""Debts of others that are paid between two looks at the clock: about .2 s of embedded Chroma."""

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 300.0
"""Back-off of a debt whose payment failed: doubled with each attempt, between these."""


@dataclass(frozen=True)
class _Debt:
    chunk_id: str
    user_id: str
    generation: int
    attempts: int


class Payer:
    """Pays the debts of one vault's live index, one payment at a time."""

    def __init__(self, database: Database, reach: IndexReach) -> None:
        self._database = database
        self._reach = reach
        self._paying = threading.Lock()

    def pay_after_commit(self, chunk_ids: Collection[str], wait_s: float) -> None:
        """Pay what a write has just owed, then others' debts for at most ``wait_s`` seconds.

        The write is committed: whatever goes wrong here is logged, and stays owed.
        """
        try:
            with self._paying:
                if (index := self._reach.acquire()) is None:
                    return
                for some in batches(chunk_ids, BATCH):
                    self._pay(index, self._named(some))
                deadline = time.monotonic() + wait_s
                while time.monotonic() < deadline and (debts := self._due()):
                    if not self._pay(index, debts):
                        return
        except (VectorIndexError, StorageError) as exc:
            log.warning("a committed write is still owed to the index: %s", exc)
        except Exception:
            log.exception("a committed write is still owed to the index, which failed in an unforeseen way")

    def pay_all(self) -> SyncReport:
        """Pay every debt, however recently its last attempt failed."""
        paid = failed = 0
        with self._paying:
            index = self._reach.acquire(now=True)
            last = ""
            while index is not None and (debts := self._after(last)):
                last = debts[-1].chunk_id
                if self._pay(index, debts):
                    paid += len(debts)
                else:
                    failed += len(debts)
        with self._database.reading() as connection:
            owed = count_owed(connection, self._reach.row.id)
        return SyncReport(paid=paid, failed=failed, owed=owed)

    # Which debts.

    def _named(self, chunk_ids: Sequence[str]) -> list[_Debt]:
        debts: list[_Debt] = []
        for some in batches(chunk_ids):
            debts += self._read(self._select().where(OUTBOX.c.chunk_id.in_(some)))
        return debts

    def _due(self) -> list[_Debt]:
        due = or_(OUTBOX.c.not_before.is_(None), OUTBOX.c.not_before <= datetime.now(UTC))
        return self._read(self._select().where(due).limit(OTHERS_BATCH))

    def _after(self, chunk_id: str) -> list[_Debt]:
        statement = self._select().where(OUTBOX.c.chunk_id > chunk_id)
        return self._read(statement.order_by(OUTBOX.c.chunk_id).limit(BATCH))

    def _select(self) -> Select[Any]:
        columns = (OUTBOX.c.chunk_id, OUTBOX.c.user_id, OUTBOX.c.generation, OUTBOX.c.attempts)
        return select(*columns).where(OUTBOX.c.index_id == self._reach.row.id)

    def _read(self, statement: Select[Any]) -> list[_Debt]:
        with self._database.reading() as connection:
            return [_Debt(*row) for row in connection.execute(statement)]

    # Paying them.

    def _pay(self, index: VectorIndex, debts: Sequence[_Debt]) -> bool:
        """Whether the debts were paid; if not, the next attempt is put off."""
        if not debts:
            return True
        records = {record.id: record for record in self._committed(debts)}
        try:
            index.upsert(list(records.values()))
            index.delete([debt.chunk_id for debt in debts if debt.chunk_id not in records])
        except VectorIndexError as exc:
            self._reach.lost(exc)
            self._put_off(debts, exc)
            return False
        self._reach.works()
        self._settle(debts)
        return True

    def _committed(self, debts: Sequence[_Debt]) -> Iterator[VectorRecord]:
        """What the index should hold of these chunks; those without a vector now are left out."""
        by_owner: dict[str, list[str]] = defaultdict(list)
        for debt in debts:
            by_owner[debt.user_id].append(debt.chunk_id)
        with self._database.reading() as connection:
            for user_id, ids in by_owner.items():
                yield from records_of(Unit(connection, user_id), ids, self._reach.row.model)

    def _settle(self, debts: Sequence[_Debt]) -> None:
        by_generation: dict[int, list[str]] = defaultdict(list)
        for debt in debts:
            by_generation[debt.generation].append(debt.chunk_id)
        with self._database.writing() as connection:
            for generation, ids in by_generation.items():
                for some in batches(ids):
                    connection.execute(
                        delete(OUTBOX).where(
                            OUTBOX.c.index_id == self._reach.row.id,
                            OUTBOX.c.chunk_id.in_(some),
                            OUTBOX.c.generation == generation,
                        )
                    )

    def _put_off(self, debts: Sequence[_Debt], error: VectorIndexError) -> None:
        now = datetime.now(UTC)
        statement = (
            update(OUTBOX)
            .where(OUTBOX.c.index_id == bindparam("index"), OUTBOX.c.chunk_id == bindparam("chunk"))
            .values(attempts=OUTBOX.c.attempts + 1, last_error=str(error)[:1000], not_before=bindparam("next_try"))
        )
        rows = []
        for debt in debts:
            delay = min(FIRST_DELAY_S * 2.0 ** min(debt.attempts, 30), LONGEST_DELAY_S)
            rows.append(
                {
                    "index": self._reach.row.id,
                    "chunk": debt.chunk_id,
                    "next_try": now + timedelta(seconds=delay),
                }
            )
        with self._database.writing() as connection:
            connection.execute(statement, rows)
