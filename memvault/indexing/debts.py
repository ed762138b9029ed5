"""Which debts has an index, and who is paying them? The outbox as a payer sees it.

Where several processes can write to an index at once, a debt is claimed before it is paid: whoever holds it alone reads
the chunk and writes it to the index, so that no older state is written over a newer one. A claim ends by itself, lest a
process that was killed keep its debts for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, bindparam, delete, or_, select, update

from memvault.database.batches import batches
from memvault.database.transactions import Database
from memvault.errors import VectorIndexError
from memvault.vectors.outbox import OUTBOX, count_owed, mark

LEASE_S = 60.0
"""How long a claim holds: several times what one batch takes an index whose requests time out after 10 s."""

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 300.0
"""Back-off of a debt whose payment failed: doubled with each attempt, between these."""

_COLUMNS = (OUTBOX.c.chunk_id, OUTBOX.c.user_id, OUTBOX.c.generation, OUTBOX.c.attempts)


@dataclass(frozen=True)
class Debt:
    """A chunk that is owed, as it was read: ``generation`` tells whether it has changed since."""

    chunk_id: str
    user_id: str
    generation: int
    attempts: int


class Debts:
    """The debts of one index."""

    def __init__(self, database: Database, index_id: int) -> None:
        self._database = database
        self._of_index = OUTBOX.c.index_id == index_id
        self._index_id = index_id

    # Which there are; those that another payer has claimed are left to it.

    def named(self, chunk_ids: Sequence[str]) -> list[Debt]:
        debts: list[Debt] = []
        for some in batches(chunk_ids):
            debts += self._read(self._select().where(OUTBOX.c.chunk_id.in_(some)))
        return debts

    def due(self, limit: int) -> list[Debt]:
        """Those whose last payment, if there was one, failed long enough ago."""
        due = or_(OUTBOX.c.not_before.is_(None), OUTBOX.c.not_before <= datetime.now(UTC))
        return self._read(self._select().where(due).limit(limit))

    def after(self, chunk_id: str, limit: int) -> list[Debt]:
        """All of them, in pages by chunk."""
        return self._read(self._select().where(OUTBOX.c.chunk_id > chunk_id).order_by(OUTBOX.c.chunk_id).limit(limit))

    def count(self) -> int:
        with self._database.reading() as connection:
            return count_owed(connection, self._index_id)

    # What becomes of them.

    def claim(self, debts: Sequence[Debt], token: str) -> list[Debt]:
        """Those of the debts that nobody else has claimed, as they are now; ours until `settle`, or for `LEASE_S`."""
        until = datetime.now(UTC) + timedelta(seconds=LEASE_S)
        claimed: list[Debt] = []
        with self._database.writing() as connection:
            for some in batches(sorted(debt.chunk_id for debt in debts)):
                statement = update(OUTBOX).where(self._of_index, OUTBOX.c.chunk_id.in_(some), _unclaimed())
                taking = statement.values(lease_token=token, leased_until=until).returning(*_COLUMNS)
                claimed += [Debt(*row) for row in connection.execute(taking)]
        return claimed

    def settle(self, debts: Sequence[Debt], token: str | None) -> None:
        """Strike out those that have not changed since they were read, and let go of the others."""
        by_generation: dict[int, list[str]] = defaultdict(list)
        for debt in debts:
            by_generation[debt.generation].append(debt.chunk_id)
        with self._database.writing() as connection:
            for generation, ids in by_generation.items():
                for some in batches(sorted(ids)):
                    settled = delete(OUTBOX).where(
                        self._of_index, OUTBOX.c.chunk_id.in_(some), OUTBOX.c.generation == generation
                    )
                    if token is not None:
                        settled = settled.where(OUTBOX.c.lease_token == token)
                    connection.execute(settled)
            if token is not None:
                self._let_go(connection, debts, token)

    def let_go(self, debts: Sequence[Debt], token: str) -> None:
        """End a claim: the debts were not paid, or not for the last time."""
        with self._database.writing() as connection:
            self._let_go(connection, debts, token)

    def _let_go(self, connection: Connection, debts: Sequence[Debt], token: str) -> None:
        for some in batches(sorted(debt.chunk_id for debt in debts)):
            held = update(OUTBOX).where(self._of_index, OUTBOX.c.chunk_id.in_(some), OUTBOX.c.lease_token == token)
            connection.execute(held.values(lease_token=None, leased_until=None))

    def note(self, debts: Sequence[Debt], error: VectorIndexError) -> None:
        """Note a failed payment that was not the debts' own fault: they stay due."""
        with self._database.writing() as connection:
            for some in batches(sorted(debt.chunk_id for debt in debts)):
                failed = update(OUTBOX).where(self._of_index, OUTBOX.c.chunk_id.in_(some))
                connection.execute(failed.values(attempts=OUTBOX.c.attempts + 1, last_error=str(error)[:1000]))

    def put_off(self, debts: Sequence[Debt], error: VectorIndexError) -> None:
        """Note that the index refused the debts, let go, and wait longer each time before the next attempt."""
        now = datetime.now(UTC)
        statement = (
            update(OUTBOX)
            .where(self._of_index, OUTBOX.c.chunk_id == bindparam("chunk"))
            .values(
                attempts=OUTBOX.c.attempts + 1,
                last_error=str(error)[:1000],
                not_before=bindparam("next_try"),
                lease_token=None,
                leased_until=None,
            )
        )
        rows = []
        for debt in sorted(debts, key=lambda debt: debt.chunk_id):
            delay = min(FIRST_DELAY_S * 2.0 ** min(debt.attempts, 30), LONGEST_DELAY_S)
            rows.append({"chunk": debt.chunk_id, "next_try": now + timedelta(seconds=delay)})
        with self._database.writing() as connection:
            connection.execute(statement, rows)

    def owe_again(self, debts: Sequence[Debt]) -> None:
        """Owe them anew, whoever settled them meanwhile: what was written to the index may have been out of date."""
        by_owner: dict[str, list[str]] = defaultdict(list)
        for debt in debts:
            by_owner[debt.user_id].append(debt.chunk_id)
        with self._database.writing() as connection:
            for user_id, ids in by_owner.items():
                mark(connection, self._index_id, user_id, ids)

    def _select(self) -> Select[Any]:
        return select(*_COLUMNS).where(self._of_index, _unclaimed())

    def _read(self, statement: Select[Any]) -> list[Debt]:
        with self._database.reading() as connection:
            return [Debt(*row) for row in connection.execute(statement)]


def _unclaimed() -> ColumnElement[bool]:
    return or_(OUTBOX.c.leased_until.is_(None), OUTBOX.c.leased_until < datetime.now(UTC))
