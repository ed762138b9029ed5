"""How does an index in the vault's own database follow a write? Within it: both are committed, or neither."""

from __future__ import annotations

from memvault.database.unit import Unit
from memvault.indexing.reach import IndexReach
from memvault.vectors.base import TransactionalIndex


class Mirror:
    """Makes a transactional index equal to what a transaction has changed, as the last thing in it."""

    def __init__(self, reach: IndexReach) -> None:
        self._reach = reach

    def __call__(self, unit: Unit) -> None:
        index = self._reach.index
        if not isinstance(index, TransactionalIndex) or unit.fixed_dimension is not None:
            return  # the vault's very first vector: there cannot be an index yet
        self._reach.bind(unit.connection)
        if index.spec is None or not index.exists(unit.connection):
            return  # it will be filled when it is made
        index.follow(unit.connection, unit.user_id, unit.revectored)
