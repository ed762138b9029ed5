"""Can this process use the vault's index right now?

An embedded index has one owner, others can be down or broken. Whoever cannot reach the index owes it and searches
exactly; nobody's write or search fails for its sake.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace

from sqlalchemy import Connection, select, update

from memvault import forking
from memvault.database.transactions import Database
from memvault.errors import ConfigurationError, IndexMismatchError, IndexOwnershipError, VectorIndexError
from memvault.indexing.reconcile import reconcile
from memvault.indexing.vault import Vault
from memvault.vectors.base import DoubtfulIndex, IndexSpec, TransactionalIndex, VectorIndex, is_exclusive
from memvault.vectors.canonical import VECTORS, mark_all
from memvault.vectors.outbox import INDEXES, LiveIndex, live_index

log = logging.getLogger("memvault.index")

RETRY_SECONDS = 1.0
"""How long an index that failed is left alone. Trying is a file lock or a failed connection: cheap."""

SLOW_S = 1.0
REST_S = 15.0
"""The same after a failure that took longer than `SLOW_S`, such as a server's that does not answer. `sync` asks it all
the same."""

RECORD_S = 0.002
"""What a record may take an index to write before a failure counts as slow: several times what it does take."""


class IndexReach:
    """The vault's live index as this process sees it.

    An index that failed is out of reach until it was opened anew, which the payer tries from time to time: until then
    searches are exact and writes owe, at once, and nobody waits for it.
    """

    def __init__(self, database: Database, vault: Vault, index: VectorIndex, *, creates: bool = True) -> None:
        """``creates``: whether an index in the database, for which that takes DDL, is made where it is missing."""
        self._database = database
        self._vault = vault
        self._row = vault.index
        self.index = index
        self._creates = creates or not isinstance(index, TransactionalIndex)
        self._lock = threading.Lock()
        self._opened = False
        self._closed = False
        self._retry_at = 0.0
        self.last_error: VectorIndexError | None = None
        self.tended = False
        """Whether a payer opens the index again after a failure; where none does, searches try."""
        forking.follow(self)

    @property
    def row(self) -> LiveIndex:
        """The index's row, with the dimension once it is fixed."""
        return self._row

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def promising(self) -> bool:
        """Whether a debt may well be paid in a moment: the index has not failed."""
        return not self._closed and (self._opened or self.last_error is None)

    def for_search(self) -> VectorIndex | None:
        """The index, if it is open in this process; who searches does not wait for it to be opened again."""
        if self._opened:
            return self.index
        if self.tended:
            return None
        try:
            return self.acquire()
        except IndexMismatchError as exc:
            self.lost(exc)
            return None

    @property
    def owned_elsewhere(self) -> bool:
        """Whether the last attempt to open an embedded index found that another process owns it."""
        return isinstance(self.last_error, IndexOwnershipError)

    @property
    def owner_pid(self) -> int | None:
        """The process that owns an embedded index: this one, or another where it is known."""
        if self._opened and is_exclusive(self.index):
            return os.getpid()
        return self.last_error.owner_pid if isinstance(self.last_error, IndexOwnershipError) else None

    def acquire(self, *, now: bool = False) -> VectorIndex | None:
        """The index, opened if that can be done; None where it cannot be reached.

        ``now``: try even if the last attempt failed a moment ago. Raises IndexMismatchError.
        """
        with self._lock:
            if self._closed:
                return None
            if self._opened:
                return self.index
            if self._dimension() is None or (time.monotonic() < self._retry_at and not now):
                return None
            began = time.monotonic()
            try:
                self._open(creating=self._creates)
            except IndexMismatchError:
                raise
            except VectorIndexError as exc:
                self._failed(exc, time.monotonic() - began)
                return None
            self.is_there()
            return self.index

    def create(self, dimension: int | None = None) -> bool:
        """Make the index where it is missing, and say whether it was. ``dimension``: fixes that of a vault without
        an embedder, which its first vector would fix otherwise.

        Raises ConfigurationError where the dimension is another, or is not known; VectorIndexError.
        """
        with self._lock:
            fixed = dimension is not None and self._fix_in_sql(dimension)
            if self._dimension() is None:
                raise ConfigurationError(
                    "this vault has no embedder, and no vector that would tell the index's dimension; give it: "
                    "`memvault index create --dimension 384`"
                )
            if self._opened and not isinstance(self.index, TransactionalIndex):
                return False  # others are asking it
            try:
                made = self._open(creating=True)
            except BaseException:
                if fixed:
                    self._unfix_in_sql()
                raise
            self.is_there()
            return made

    def rebuild(self) -> None:
        """Remove the index, and make it anew, empty, with every vector owed to it. Raises VectorIndexError."""
        with self._lock:
            dimension = self._dimension()
            assert dimension is not None
            with self._database.writing() as connection:
                mark_all(connection, self._row)  # first: whatever happens then, nothing that is lost is not owed
            self.index.open(IndexSpec(self._vault.id, self._row.model, dimension))
            self.index.purge()
            self._open(creating=True)
            self.is_there()

    def _unfix_in_sql(self) -> None:
        """The index could not be made with that dimension; where no vector has come since, another may do."""
        with self._database.writing() as connection:
            unused = ~select(VECTORS.c.id).exists()
            connection.execute(update(INDEXES).where(INDEXES.c.id == self._row.id, unused).values(dimension=None))
        self._row = replace(self._row, dimension=None)

    def _fix_in_sql(self, dimension: int) -> bool:
        """Whether this call fixed it; ConfigurationError where it is another already."""
        with self._database.writing() as connection:
            free = update(INDEXES).where(INDEXES.c.id == self._row.id, INDEXES.c.dimension.is_(None))
            fixed = connection.execute(free.values(dimension=dimension)).rowcount == 1
        if self._dimension() != dimension:
            raise ConfigurationError(f"this vault's vectors have dimension {self._row.dimension}, not {dimension}")
        return fixed

    def bind(self, connection: Connection) -> None:
        """Tell a transactional index its model and dimension, in a write that may be the first one to know them."""
        if self.index.spec is None and (live := live_index(connection)) is not None and live.dimension is not None:
            self.index.open(IndexSpec(self._vault.id, live.model, live.dimension))

    def fix_dimension(self, dimension: int) -> None:
        """Note the dimension that the vault's first vector has just fixed."""
        self._row = replace(self._row, dimension=dimension)

    def is_there(self) -> None:
        """Note that the index was seen, whoever made it, and can be asked."""
        if isinstance(self.last_error, VectorIndexError) and not self._row.transactional:
            log.info("the vector index %s is in use again", self._row.spec)
        self._opened = True
        self.last_error = None

    @property
    def is_resting(self) -> bool:
        """Whether the index failed so slowly that it is left alone for a while."""
        return not self._opened and self._retry_at - time.monotonic() > RETRY_SECONDS

    def lost(self, error: VectorIndexError, after_s: float = 0.0, records: int = 0) -> None:
        """Note that the open index failed, after how long, and with how many records: it has to be opened anew."""
        self._failed(error, after_s - records * RECORD_S)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._opened = False
            self.index.close()

    def _open(self, *, creating: bool) -> bool:
        """Whether the index was made for it."""
        dimension = self._dimension()
        assert dimension is not None
        if self.index.open(IndexSpec(self._vault.id, self._row.model, dimension)):
            if isinstance(self.index, DoubtfulIndex) and (doubt := self.index.doubt) is not None:
                reconcile(self._database, self._row, self.index, doubt)
                self.index.doubt = None
            return False
        if not creating:
            raise VectorIndexError(
                f"the index {self._row.spec!r} is not in the database yet; run `memvault index create`, or open the "
                'vault with schema="upgrade". Until then searches are exact'
            )
        if not self._row.transactional:
            # Owed before it is made: a crash in between leaves debts, not an empty index that owes nothing.
            with self._database.writing() as connection:
                mark_all(connection, self._row)
        self.index.create()
        return True

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self.tended = False
        if not self._row.transactional:
            self._opened, self._retry_at, self.last_error = False, 0.0, None

    def _dimension(self) -> int | None:
        if self._row.dimension is None:
            with self._database.reading() as connection:
                self._row = live_index(connection) or self._row
        return self._row.dimension

    def _failed(self, error: VectorIndexError, after_s: float) -> None:
        self._opened = False
        if self._closed:
            return  # what was under way has failed for that
        rests = after_s > SLOW_S and not is_exclusive(self.index)  # one that hangs here has been ended, and replaced
        self._retry_at = time.monotonic() + (REST_S if rests else RETRY_SECONDS)
        if str(error) != str(self.last_error):
            if isinstance(error, IndexOwnershipError):
                log.info("%s; this process leaves debts to the owner and searches exactly", error)
            else:
                log.warning("the vector index failed, searches go on exactly and debts are kept: %s", error)
        self.last_error = error
