"""How is a user erased, whole?"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import delete

from memvault.database.base import OWNERS, owned_tables
from memvault.database.transactions import OwnTransactions
from memvault.database.unit import Unit
from memvault.memory.chunk_table import CHUNKS
from memvault.values import ErasureReport
from memvault.vectors import canonical


def erase_user(transactions: OwnTransactions, owed_now: Callable[[], int]) -> ErasureReport:
    """Delete everything of a user in one transaction, and the index's copies as the debts are paid.

    ``owed_now`` tells, after the payment, how many deletions the index still owes.
    """
    counts = transactions.write(_erase)
    return ErasureReport(user_id=transactions.user_id, counts=counts, owed=owed_now())


def _erase(unit: Unit) -> dict[str, int]:
    ids = list(unit.execute(unit.select(CHUNKS.c.id, frm=CHUNKS)).scalars())
    vectors = unit.lock_owner().vector_count
    # Every chunk is owed, with or without a vector now: the index may hold what SQL no longer tells of.
    canonical.apply(unit, dropped=ids)
    counts = {table.name: unit.execute(unit.delete(table)).rowcount for table in owned_tables()}
    counts[canonical.VECTORS.name] += vectors - unit.lock_owner().vector_count
    unit.execute(delete(OWNERS).where(OWNERS.c.user_id == unit.user_id))
    unit.forget_owner()
    return counts
