"""Who pays what an index owes, and when? A thread of the storage layer's, as soon as it can; or whoever calls sync."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from memvault import forking
from memvault.database.batches import batches
from memvault.database.transactions import Database
from memvault.errors import StorageError, VectorIndexError
from memvault.indexing.payment import Payment
from memvault.indexing.reach import IndexReach
from memvault.values import SyncReport

log = logging.getLogger("memvault.index")

POLL_S = 0.5
"""How often the thread looks for debts that nobody handed to it: those of other processes, and of its callers' own
transactions. One indexed read; and where the index is out of reach, one attempt to reach it."""

FORK_WAIT_S = 2.0
"""How long a fork waits for a payment under way."""


@dataclass(eq=False)
class _Ticket:
    """A write's debts, handed to the thread."""

    chunk_ids: Collection[str]
    done: threading.Event = field(default_factory=threading.Event)


class Payer:
    """Pays the debts of one vault's live index, one payment at a time.

    Nothing that goes wrong with the index ever reaches a write: it is logged, and stays owed.
    """

    def __init__(self, database: Database, reach: IndexReach, *, threaded: bool) -> None:
        """``threaded``: pay in a thread, once it is started; without, in `sync` alone."""
        self._database = database
        self._reach = reach
        self._threaded = threaded and not reach.row.transactional
        self._payment = Payment(database, reach)
        self._paying = threading.Lock()
        self._wake = threading.Condition()
        self._tickets: deque[_Ticket] = deque()
        self._woken = False
        self._thread: threading.Thread | None = None
        self._closing = False
        self._until = 0.0
        self._last_error = ""
        forking.follow(self)

    def start(self) -> None:
        """Have the thread run, if there is to be one. Cheap where it runs already."""
        if self._thread is None and self._threaded and not self._closing:
            with self._wake:
                if self._thread is None and not self._closing:
                    self._reach.tended = True
                    self._thread = threading.Thread(target=self._run, name="memvault-payer", daemon=True)
                    self._thread.start()

    def hand_over(self, chunk_ids: Collection[str], wait_s: float) -> None:
        """Have what a write owes paid; wait for it, ``wait_s`` seconds at most, unless the index is out of reach."""
        if not self._threaded:
            return
        self.start()
        if wait_s <= 0 or not self._reach.promising:
            with self._wake:
                self._woken = True
                self._wake.notify()
            return
        ticket = _Ticket(chunk_ids)
        with self._wake:
            if self._closing:
                return
            self._tickets.append(ticket)
            self._wake.notify()
        ticket.done.wait(wait_s)

    def make_index(self) -> None:
        """After the vault's first vector, which tells the dimension: make an index that lies in the database."""
        try:
            self._reach.acquire()
        except (VectorIndexError, StorageError) as exc:
            log.warning("the vector index could not be made: %s", exc)

    def pay_all(self) -> SyncReport:
        """Pay every debt, however recently its last attempt failed; but for those that another process is paying."""
        paid = failed = 0
        last = ""
        while True:
            with self._paying:
                index = self._reach.acquire(now=True)
                debts = [] if index is None else self._payment.after(last)
                if index is None or not debts:
                    break
                last = debts[-1].chunk_id
                done = self._payment.pay(index, debts)
            paid += done.paid
            failed += done.failed
            if done.lost:
                break
        return SyncReport(paid=paid, failed=failed, owed=self._payment.count())

    def close(self, wait_s: float) -> None:
        """Stop the thread: after the payment under way, and what else is owed, for ``wait_s`` at most."""
        with self._wake:
            self._closing = True
            self._until = time.monotonic() + wait_s
            self._woken = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(wait_s + 1.0)

    # The thread.

    def _run(self) -> None:
        more = False
        while True:
            with self._wake:
                if self._closing and (time.monotonic() > self._until or not (self._tickets or self._woken or more)):
                    return
                if not (self._tickets or self._woken or more):
                    self._wake.wait(POLL_S)
                tickets = list(self._tickets)
                self._tickets.clear()
                self._woken = False
            more = False
            try:
                with self._paying:
                    more = self._pay(tickets)
                self._last_error = ""
            except (VectorIndexError, StorageError) as exc:
                self._complain(exc)
            except Exception:
                log.exception("committed writes are still owed to the index, which failed in an unforeseen way")
            finally:
                for ticket in tickets:
                    ticket.done.set()

    def _complain(self, error: Exception) -> None:
        """Once, however often it is tried again."""
        if str(error) != self._last_error and not self._database.closed:
            log.warning("committed writes are still owed to the index: %s", error)
        self._last_error = str(error)

    def _pay(self, tickets: list[_Ticket]) -> bool:
        """Whether there may be more to pay at once."""
        index = self._reach.acquire()
        if index is None:
            return False
        # Together: of many small writes at once, Chroma takes ten in hardly more time than one.
        handed = dict.fromkeys(chunk_id for ticket in tickets for chunk_id in ticket.chunk_ids)
        for some in batches(handed, self._payment.batch):
            if self._payment.pay(index, self._payment.named(some)).lost:
                return False
        for ticket in tickets:
            ticket.done.set()
        debts = self._payment.due()
        if not debts:
            return False
        done = self._payment.pay(index, debts)
        return not done.lost and done.paid > 0

    # Around a fork.

    def before_fork(self) -> None:
        """No payment is under way in the moment of a fork, if it can be helped."""
        self._held = self._paying.acquire(timeout=FORK_WAIT_S)

    def after_fork_in_parent(self) -> None:
        if self._held:
            self._paying.release()

    def after_fork_in_child(self) -> None:
        self._paying = threading.Lock()
        self._wake = threading.Condition()
        self._tickets.clear()
        self._thread = None
