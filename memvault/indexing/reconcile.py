"""What may an index have lost that was not closed in good order? What it holds is compared with SQL, by ids alone."""

from __future__ import annotations

import logging
from collections import defaultdict

from sqlalchemy import select

from memvault.database.transactions import Database
from memvault.vectors.base import Doubt, VectorIndex
from memvault.vectors.canonical import CONTENT, VECTORS
from memvault.vectors.outbox import LiveIndex, mark

log = logging.getLogger("memvault.index")


def reconcile(database: Database, row: LiveIndex, index: VectorIndex, doubt: Doubt) -> None:
    """Owe the index what it lacks, and remove from it what SQL has not got. Nobody else may be writing to it.

    What is owed already is owed once more, which does no harm. Raises VectorIndexError.
    """
    # The index was read first: what is written to SQL since is merely taken for missing, as its own debt says, too.
    held = set(doubt.listed) - set(doubt.unfindable)
    lacking: dict[str, list[str]] = defaultdict(list)
    known: set[str] = set()
    with database.reading() as connection:
        statement = select(VECTORS.c.chunk_id, VECTORS.c.user_id).where(
            VECTORS.c.model == row.model, VECTORS.c.field == CONTENT
        )
        for chunk_id, user_id in connection.execute(statement):
            known.add(chunk_id)
            if chunk_id not in held:
                lacking[user_id].append(chunk_id)
    orphaned = sorted(set(doubt.listed) - known)
    index.delete(orphaned)
    with database.writing() as connection:
        for user_id, ids in sorted(lacking.items()):
            mark(connection, row.id, user_id, ids)
    count = sum(map(len, lacking.values()))
    if count or orphaned:
        log.warning(
            "the vector index %s lacked %d records, which are owed to it, and had %d that are gone, which were removed",
            row.spec,
            count,
            len(orphaned),
        )
