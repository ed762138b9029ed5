"""What does an examination of the index report, and what is done about an index that cannot be examined at all?"""

from __future__ import annotations

from memvault.database.transactions import Database
from memvault.errors import IndexMismatchError, IndexOwnershipError, VectorIndexError
from memvault.indexing.diagnosis import Diagnosis
from memvault.indexing.doctor import Doctor, Progress
from memvault.indexing.payer import Payer
from memvault.indexing.reach import IndexReach
from memvault.indexing.truth import Truth
from memvault.values import DoctorReport
from memvault.vectors.base import VectorIndex


def check_up(
    database: Database, reach: IndexReach, payer: Payer, truth: Truth, *, repair: bool, progress: Progress | None
) -> DoctorReport:
    """As `StorageLayer.doctor` promises."""
    rebuilt = False

    def examine() -> Diagnosis:
        found = Diagnosis()
        if (index := _reached(reach)) is not None:
            truth.examine(found, repair=repair, index=index)
            Doctor(database, reach.row, index, found, repair=repair).examine(progress)
        return found

    try:
        try:
            found = examine()
        except VectorIndexError as exc:
            if not repair or isinstance(exc, IndexMismatchError | IndexOwnershipError):
                raise
            reach.lost(exc)
            rebuilt = _reopen(reach, payer)
            found = examine()
    except IndexMismatchError as exc:
        return DoctorReport(clean=False, mismatched=1, reason=str(exc))
    owed = min(payer.pay_all().owed, found.owed) if found.owed and not reach.row.transactional else 0
    counts = found.counts
    return DoctorReport(
        clean=found.found == 0 and not rebuilt,
        missing=counts["missing"],
        orphaned=counts["orphaned"],
        stale=counts["stale"],
        foreign=counts["foreign"],
        unfindable=counts["unfindable"],
        mismatched=counts["mismatched"],
        repaired=found.mended + found.owed - owed,
        owed=owed,
        compared=found.compared,
        reason="the index could not be read, and was made anew from SQL" if rebuilt else None,
        examples={str(finding): ids for finding, ids in found.examples.items()},
    )


def _reached(reach: IndexReach) -> VectorIndex | None:
    """The index, opened here. Raises what kept it from being opened."""
    if (index := reach.acquire(now=True)) is not None:
        return index
    if reach.last_error is not None:
        raise reach.last_error
    if reach.row.dimension is not None:
        raise VectorIndexError("this StorageLayer is closed; open another")
    return None


def _reopen(reach: IndexReach, payer: Payer) -> bool:
    """Make an index that could not be read one that can be; whether it was made anew.

    Opening it may have mended it already: after a crash it is probed. What fails though it opens is not worth keeping.
    """
    index = _reached(reach)
    if index is None or reach.row.transactional:
        return False
    try:
        for _ in index.scan():
            pass
        index.count()
        rebuilt = False
    except VectorIndexError as exc:
        reach.lost(exc)
        reach.rebuild()
        rebuilt = True
    payer.pay_all()
    return rebuilt
