"""Is SQL itself in order, before an index is compared with it? Chunks, their vectors, and the counts of owners.

Nothing that memvault does leaves it otherwise; statements written by hand, and half-restored backups, do.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import func, select

from memvault.database.base import OWNERS
from memvault.database.transactions import OwnTransactions
from memvault.database.unit import Unit
from memvault.embedding.base import Matrix, Vector
from memvault.indexing.diagnosis import BATCH, Diagnosis, Finding
from memvault.memory.chunk_table import CHUNKS
from memvault.vectors.base import VectorIndex
from memvault.vectors.canonical import CONTENT, VECTORS, ChunkVector, apply
from memvault.vectors.outbox import LiveIndex

Embed = Callable[[Sequence[str]], Matrix]
Begin = Callable[[str], OwnTransactions]
"""A user's transactions."""


class Truth:
    """Examines what SQL holds for one model, in pages."""

    def __init__(self, begin: Begin, reading: Any, row: LiveIndex, embed: Embed | None) -> None:
        """``embed``: makes the vectors of texts anew; None in a vault whose vectors are the caller's."""
        self._begin = begin
        self._reading = reading
        self._row = row
        self._embed = embed

    def examine(self, diagnosis: Diagnosis, *, repair: bool, index: VectorIndex) -> None:
        """``index``: where a vector that SQL has lost, and nobody can make anew, may still be."""
        miscounted = self._miscounted()  # before it is mended in passing
        for user_id in miscounted:
            diagnosis.note("stale", f"the count of {user_id}")
        for page in self._pages():
            wrong: dict[str, dict[str, Finding]] = defaultdict(dict)
            for row in page:
                if (finding := self._finding(row)) is not None:
                    diagnosis.note(finding, row.id)
                    wrong[row.user_id][row.id] = finding
            for user_id, findings in wrong.items() if repair else ():
                diagnosis.mended += self._mend(user_id, findings, index)
        for user_id in miscounted if repair else ():
            self._begin(user_id).write(self._recount)
            diagnosis.mended += 1

    def _finding(self, row: Any) -> Finding | None:
        if row.dimension is None:
            return None if row.chroma_id is None else "missing"
        if row.vector_user_id != row.user_id:
            return "foreign"
        if row.dimension != self._row.dimension or row.size != 4 * row.dimension:
            return "mismatched"
        return None if row.content_hash == _digest(row.content) else "stale"

    def _pages(self) -> Iterator[Sequence[Any]]:
        joined = CHUNKS.outerjoin(
            VECTORS,
            (VECTORS.c.chunk_id == CHUNKS.c.id) & (VECTORS.c.model == self._row.model) & (VECTORS.c.field == CONTENT),
        )
        columns = (
            *(CHUNKS.c.id, CHUNKS.c.user_id, CHUNKS.c.chroma_id, CHUNKS.c.content),
            VECTORS.c.user_id.label("vector_user_id"),
            *(VECTORS.c.dimension, VECTORS.c.content_hash, func.length(VECTORS.c.vector).label("size")),
        )
        statement = select(*columns).select_from(joined).order_by(CHUNKS.c.id).limit(BATCH)
        last = ""
        while True:
            with self._reading() as connection:
                page = connection.execute(statement.where(CHUNKS.c.id > last)).all()
            if not page:
                return
            yield page
            last = page[-1].id

    def _miscounted(self) -> list[str]:
        counted = (
            select(VECTORS.c.user_id, func.count().label("count"))
            .where(VECTORS.c.model == self._row.model, VECTORS.c.field == CONTENT)
            .group_by(VECTORS.c.user_id)
            .subquery()
        )
        statement = (
            select(OWNERS.c.user_id)
            .select_from(OWNERS.outerjoin(counted, counted.c.user_id == OWNERS.c.user_id))
            .where(OWNERS.c.vector_count != func.coalesce(counted.c.count, 0))
            .order_by(OWNERS.c.user_id)
        )
        with self._reading() as connection:
            return list(connection.execute(statement).scalars())

    def _mend(self, user_id: str, findings: Mapping[str, Finding], index: VectorIndex) -> int:
        """How many are in order now. Vectors are made before the transaction, and written if the text is still that."""
        transactions = self._begin(user_id)
        texts = transactions.read(lambda unit: _texts(unit, list(findings)))
        vectors = self._vectors(user_id, texts, findings, index)

        def work(unit: Unit) -> int:
            put = [
                ChunkVector(id, _digest(content), *vectors[id])
                for id, content in _texts(unit, list(vectors)).items()
                if content == texts[id]
            ]
            # What stands there under another user is none of this one's for `apply`, and would be in its way.
            unit.execute(VECTORS.delete().where(VECTORS.c.chunk_id.in_([one.chunk_id for one in put])))
            apply(unit, put=put)
            self._recount(unit)
            return len(put)

        return transactions.write(work) if vectors else 0

    def _vectors(
        self, user_id: str, texts: Mapping[str, str], findings: Mapping[str, Finding], index: VectorIndex
    ) -> dict[str, tuple[Vector, bool]]:
        """By chunk, with whether the embedder has made it. One that SQL has lost is taken from the index, where that
        has it of this text: it may have been the caller's own."""
        found: dict[str, tuple[Vector, bool]] = {}
        if not self._row.transactional:
            for record in index.fetch([id for id in texts if findings[id] in ("missing", "mismatched")]):
                if record.user_id == user_id and record.document == texts[record.id]:
                    found[record.id] = np.asarray(record.vector, np.float32), False
        if self._embed is not None and (rest := [id for id in texts if id not in found]):
            vectors = self._embed([texts[id] for id in rest])
            found.update((id, (vector, True)) for id, vector in zip(rest, vectors, strict=True))
        return found

    def _recount(self, unit: Unit) -> None:
        owner = unit.lock_owner()
        statement = unit.select(func.count(), frm=VECTORS).where(
            VECTORS.c.model == self._row.model, VECTORS.c.field == CONTENT
        )
        owner.vector_count = unit.execute(statement).scalar_one()
        owner.next_epochs(1, removing=True)  # whoever keeps vectors in memory counts them anew


def _texts(unit: Unit, ids: Sequence[str]) -> dict[str, str]:
    statement = unit.select(CHUNKS.c.id, CHUNKS.c.content, frm=CHUNKS, by_key=True).where(CHUNKS.c.id.in_(ids))
    return {row.id: row.content for row in unit.execute(statement)}


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
