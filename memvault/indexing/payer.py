"""How is paid what an index owes? Read the committed state, make the index equal to it, settle.

Idempotent and free of order: a debt says only that a chunk is owed, never what happened to it. A crash anywhere leaves
the debt, and it is paid again. A debt whose generation rose meanwhile is not settled: it changed under our hands.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from memvault.database.batches import batches
from memvault.database.transactions import Database
from memvault.database.unit import Unit
from memvault.errors import StorageError, VectorIndexError
from memvault.indexing.committed import records_of
from memvault.indexing.debts import LEASE_S, Debt, Debts
from memvault.indexing.reach import IndexReach
from memvault.values import SyncReport
from memvault.vectors.base import VectorIndex, VectorRecord, is_exclusive

log = logging.getLogger("memvault.index")

BATCH = 5000
"""Debts of a write that are paid at once: as many as one transaction of `add_many` leaves."""

SHARED_BATCH = 250
"""The same, where they have to be claimed: paying them, at up to 1 MiB each, must take less time than a claim holds."""

OTHERS_BATCH = 200
"""Debts of others that are paid between two looks at the clock: about .2 s of embedded Chroma."""


class Payer:
    """Pays the debts of one vault's live index, one payment at a time."""

    def __init__(self, database: Database, reach: IndexReach) -> None:
        self._database = database
        self._reach = reach
        self._debts = Debts(database, reach.row.id)
        self._shared = not is_exclusive(reach.index)
        self._batch = SHARED_BATCH if self._shared else BATCH
        self._paying = threading.Lock()

    def pay_after_commit(self, chunk_ids: Collection[str], wait_s: float) -> None:
        """Pay what a write has just owed, then others' debts for at most ``wait_s`` seconds.

        The write is committed: whatever goes wrong here is logged, and stays owed.
        """
        try:
            with self._paying:
                if (index := self._reach.acquire()) is None:
                    return
                for some in batches(chunk_ids, self._batch):
                    if self._pay(index, self._debts.named(some)) is None:
                        return  # nor would the rest be taken
                deadline = time.monotonic() + wait_s
                while time.monotonic() < deadline and (debts := self._debts.due(OTHERS_BATCH)):
                    if not self._pay(index, debts):
                        return
        except (VectorIndexError, StorageError) as exc:
            log.warning("a committed write is still owed to the index: %s", exc)
        except Exception:
            log.exception("a committed write is still owed to the index, which failed in an unforeseen way")

    def pay_all(self) -> SyncReport:
        """Pay every debt, however recently its last attempt failed; but for those that another process is paying."""
        paid = failed = 0
        with self._paying:
            index = self._reach.acquire(now=True)
            last = ""
            while index is not None and (debts := self._debts.after(last, self._batch)):
                last = debts[-1].chunk_id
                if (settled := self._pay(index, debts)) is None:
                    failed += len(debts)
                else:
                    paid += settled
        return SyncReport(paid=paid, failed=failed, owed=self._debts.count())

    def _pay(self, index: VectorIndex, debts: Sequence[Debt]) -> int | None:
        """How many were paid; None where the index failed, and the next attempt was put off."""
        token = secrets.token_hex(16) if self._shared else None
        claimed_at = time.monotonic()
        if token is not None and debts:
            debts = self._debts.claim(debts, token)
        if not debts:
            return 0
        asked_at = time.monotonic()
        try:
            records = {record.id: record for record in self._committed(debts)}
            index.upsert(list(records.values()))
            index.delete([debt.chunk_id for debt in debts if debt.chunk_id not in records])
        except VectorIndexError as exc:
            self._reach.lost(exc, time.monotonic() - asked_at)
            self._debts.put_off(debts, exc)
            return None
        except BaseException:
            if token is not None:
                self._debts.let_go(debts, token)  # rather than have them wait for the claim's end
            raise
        self._reach.works()
        if token is not None and time.monotonic() - claimed_at > LEASE_S:
            self._debts.owe_again(debts)  # somebody else may have written a newer state before ours
            return 0
        self._debts.settle(debts, token)
        return len(debts)

    def _committed(self, debts: Sequence[Debt]) -> Iterator[VectorRecord]:
        """What the index should hold of these chunks; those without a vector now are left out."""
        by_owner: dict[str, list[str]] = defaultdict(list)
        for debt in debts:
            by_owner[debt.user_id].append(debt.chunk_id)
        with self._database.reading() as connection:
            for user_id, ids in by_owner.items():
                yield from records_of(Unit(connection, user_id), ids, self._reach.row.model)
