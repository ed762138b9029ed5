"""How is paid what an index owes? Read the committed state, make the index equal to it, settle.

Idempotent and free of order: a debt says only that a chunk is owed, never what happened to it. A crash anywhere leaves
the debt, and it is paid again. A debt whose generation rose meanwhile is not settled: it changed under our hands.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memvault.database.transactions import Database
from memvault.database.unit import Unit
from memvault.errors import IndexMismatchError, VectorIndexError
from memvault.indexing.committed import records_of
from memvault.indexing.debts import LEASE_S, Debt, Debts
from memvault.indexing.reach import IndexReach
from memvault.vectors.base import VectorIndex, VectorRecord, is_exclusive

BATCH = 1000
"""Debts that are paid at once, in half a second of embedded Chroma: who closes the vault, or forks, waits for it."""

SHARED_BATCH = 250
"""The same, where they have to be claimed: paying them, at up to 1 MiB each, must take less time than a claim holds."""

DUE_BATCH = 500
"""Debts that nobody waits for, which are paid between two looks at what was handed over meanwhile: .2 s of Chroma."""

MOST_REFUSALS = 32
"""An index that refuses so often in one payment is taken for one that is out of reach. One record among 5,000 that it
refuses is found in 13."""


@dataclass(frozen=True)
class Outcome:
    """What became of some debts; ``lost``: the index is out of reach, nor would it take others."""

    paid: int = 0
    failed: int = 0
    lost: bool = False


class Payment:
    """Pays debts of one vault's live index. One thread of a process at a time."""

    def __init__(self, database: Database, reach: IndexReach) -> None:
        self._database = database
        self._reach = reach
        self._debts = Debts(database, reach.row.id)
        self._shared = not is_exclusive(reach.index)
        self.batch = SHARED_BATCH if self._shared else BATCH

    # Which debts there are; those that another process has claimed are left to it.

    def named(self, chunk_ids: Sequence[str]) -> list[Debt]:
        return self._debts.named(chunk_ids)

    def due(self) -> list[Debt]:
        """Some of those whose last payment, if there was one, was not refused a moment ago."""
        return self._debts.due(min(DUE_BATCH, self.batch))

    def after(self, chunk_id: str) -> list[Debt]:
        """All of them, in pages by chunk."""
        return self._debts.after(chunk_id, self.batch)

    def count(self) -> int:
        return self._debts.count()

    def pay(self, index: VectorIndex, debts: Sequence[Debt]) -> Outcome:
        """Pay what can be paid of the debts.

        Where the index fails, and is out of reach afterwards, they stay due. Where it is not, it has refused one of
        them, or several: they are found by halves, the others are paid, and the refused are put off.
        """
        paid = failed = refusals = 0
        waiting = [debts]
        while waiting:
            some = waiting.pop()
            asked_at = time.monotonic()
            try:
                paid += self._pay(index, some)
                continue
            except VectorIndexError as exc:
                error = exc
            if self._reach.is_closed:
                return Outcome(paid, failed + len(some), lost=True)
            self._reach.lost(error, time.monotonic() - asked_at, records=len(some))
            refusals += 1
            if refusals > MOST_REFUSALS or not self._is_back():
                self._debts.note(some, error)
                self._reach.lost(error)
                return Outcome(paid, failed + len(some), lost=True)
            if len(some) == 1:
                self._debts.put_off(some, error)
                failed += 1
            else:
                middle = len(some) // 2
                waiting += [some[middle:], some[:middle]]
        return Outcome(paid, failed)

    def _is_back(self) -> bool:
        """Whether the index that has just failed can be opened again at once."""
        try:
            return not self._reach.is_resting and self._reach.acquire(now=True) is not None
        except IndexMismatchError as exc:
            self._reach.lost(exc)
            return False

    def _pay(self, index: VectorIndex, debts: Sequence[Debt]) -> int:
        token = secrets.token_hex(16) if self._shared else None
        claimed_at = time.monotonic()
        if token is not None and debts:
            debts = self._debts.claim(debts, token)
        if not debts:
            return 0
        try:
            records = {record.id: record for record in self._committed(debts)}
            index.upsert(list(records.values()))
            index.delete([debt.chunk_id for debt in debts if debt.chunk_id not in records])
        except BaseException:
            if token is not None:
                self._debts.let_go(debts, token)  # rather than have them wait for the claim's end
            raise
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
