"""Which of a user's chunks are nearest in meaning?

Up to `exact_limit` vectors, or where the index cannot be reached, exactly: a product with all of them. Above, the
index proposes, and what it owes is scored from SQL. Either way the filter holds for the answer, the similarities are
those of the vectors in SQL, and the chunks come from SQL with the owner in the WHERE.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Select, bindparam, func, true

from memvault.database.base import OWNERS
from memvault.database.prepared import Prepared
from memvault.database.transactions import Transactions
from memvault.database.unit import Unit
from memvault.database.where import compile_where
from memvault.embedding.base import Vector, check_vector
from memvault.errors import VectorIndexError
from memvault.filters import EVERYTHING, Filter
from memvault.indexing.reach import IndexReach
from memvault.memory.chunk_table import (
    CHUNK_COLUMNS,
    CHUNKS,
    FEW,
    NOT_COMPRESSED,
    matching_ids,
    padded,
    read_chunks,
)
from memvault.search.matrices import VectorCache
from memvault.values import Chunk
from memvault.vectors.base import TransactionalIndex, VectorIndex, VectorMatch, pushdown
from memvault.vectors.canonical import OwnerState, load_vectors, owner_state, stored_vectors
from memvault.vectors.exact import best, nearest, similarities
from memvault.vectors.outbox import live_index, owed_ids

Tier = Literal["exact", "index"]

ROUNDING = 1e-5
"""By how much an index's similarity may differ from the same vectors' in SQL."""

PAGE = 4096
"""Vectors that are in memory at once where all of a large user's are compared."""

WIDENINGS = 3
"""How often the index is asked again for four times as many before all is scored exactly."""


class Neighbor(NamedTuple):
    """A chunk, its cosine, and which tier found it."""

    chunk: Chunk
    similarity: float
    tier: Tier


@dataclass(frozen=True)
class Wanted:
    """What is looked for: the ``k`` nearest to ``vector`` under ``where`` of at least ``min_similarity``."""

    vector: Vector
    k: int
    where: Filter
    min_similarity: float | None


class NearestSearch:
    """Finds neighbours for any user of one vault."""

    def __init__(self, reach: IndexReach, exact_limit: int, cache_bytes: int) -> None:
        self._reach = reach
        self._exact_limit = exact_limit
        self._cache = VectorCache(cache_bytes)

    def run(self, transactions: Transactions, wanted: Wanted) -> list[Neighbor]:
        """The nearest chunks, nearest first, ties by id."""
        if (found := self._at_a_glance(transactions, wanted)) is not None:
            return found
        try:
            return transactions.read(lambda unit: self.find(unit, wanted))
        except VectorIndexError as exc:
            if not self._reach.row.transactional:
                raise
            # An index in the database has spoilt the transaction with its failure.
            self._reach.lost(exc)
            return transactions.read(lambda unit: self.find(unit, wanted, exactly=True))

    def _at_a_glance(self, transactions: Transactions, wanted: Wanted) -> list[Neighbor] | None:
        """By what is kept of the user, and one statement that reads both the owner's row and the chunks: if the row is
        that of the state that was kept, all of it is one snapshot. None where it is not, or where that is not enough.
        """
        kept = self._cache.peek(transactions.user_id, self._reach.row.model, wanted.vector.size)
        prepared = _GLANCES.get(wanted.where)
        if kept is None or prepared is None or not 0 < kept.count <= self._exact_limit or wanted.k > FEW:
            return None
        ranked = nearest(kept.ids, kept.matrix, wanted.vector, wanted.k)
        if wanted.min_similarity is not None:
            ranked = [match for match in ranked if match.similarity >= wanted.min_similarity]
        if not ranked:
            return None
        rows = transactions.glance(prepared, padded([match.id for match in ranked]))
        if not rows or (rows[0][0], rows[0][1]) != (kept.state.incarnation, kept.state.epoch):
            return None
        chunks = {row[2]: Chunk.of_row(row[2:]) for row in rows}
        if len(chunks) < len(ranked) == wanted.k < kept.count:
            return None  # some did not pass the filter, and others may
        return [Neighbor(chunks[match.id], match.similarity, "exact") for match in ranked if match.id in chunks]

    def find(self, unit: Unit, wanted: Wanted, *, exactly: bool = False) -> list[Neighbor]:
        """As `run`, within a transaction. ``exactly``: without the index."""
        state = owner_state(unit)  # before anything else is read: what is kept is valid for this state, or is not
        if state is None or state.vector_count == 0:
            return []
        self._check_dimension(unit, wanted.vector)
        if state.vector_count <= self._exact_limit:
            vectors = self._cache.get(unit, state, self._reach.row.model, wanted.vector.size)
            return self._exactly(unit, wanted, vectors.ids, similarities(vectors.matrix, wanted.vector))
        found: list[Neighbor] | None = None
        if not exactly:
            if isinstance(inside := self._reach.index, TransactionalIndex):
                found = self._within(unit, inside, wanted)
            elif not self._reach.row.transactional and (index := self._reach.for_search()) is not None:
                found = self._by_index(unit, index, wanted, state.vector_count)
        if found is None:
            found = self._exactly(unit, wanted, *self._streamed(unit, state, wanted.vector))
        return found

    def _check_dimension(self, unit: Unit, vector: Vector) -> None:
        """Another process, or this very transaction, may have fixed the dimension of a vault without embedder."""
        if (dimension := self._reach.row.dimension) is None and (live := live_index(unit.connection)) is not None:
            dimension = live.dimension
        check_vector(vector, "embedding", dimension)

    def _streamed(self, unit: Unit, state: OwnerState, vector: Vector) -> tuple[list[str], NDArray[np.float64]]:
        """All of the user's chunks and their similarities, with few of the vectors in memory at a time."""
        ids: list[str] = []
        scores: list[NDArray[np.float64]] = []
        after: int | None = None
        while True:
            page = stored_vectors(unit, state, self._reach.row.model, after=after, limit=PAGE)
            ids += page.ids
            scores.append(similarities(page.matrix(vector.size), vector))
            if len(page.ids) < PAGE:
                return ids, np.concatenate(scores)
            after = page.keys[-1]

    def _exactly(self, unit: Unit, wanted: Wanted, ids: Sequence[str], scores: NDArray[np.float64]) -> list[Neighbor]:
        if wanted.min_similarity is not None:
            ids, scores = _keep(ids, scores, scores >= wanted.min_similarity)
        # Most filters let most through: walk down the ranking first, and list what matches only if that fails.
        tried = 0
        found: list[Neighbor] = []
        for width in (wanted.k, 4 * wanted.k + 32, 16 * wanted.k + 128):
            ranked = best(ids, scores, width)
            found += _hydrated(unit, ranked[tried:], wanted.where, "exact")
            tried = len(ranked)
            if len(found) >= wanted.k or tried == len(scores):
                return found[: wanted.k]
        allowed = matching_ids(unit, wanted.where)
        count = len(scores)
        ids, scores = _keep(ids, scores, np.fromiter((id in allowed for id in ids[:count]), bool, count))
        return _hydrated(unit, best(ids, scores, wanted.k), wanted.where, "exact")

    def _within(self, unit: Unit, index: TransactionalIndex, wanted: Wanted) -> list[Neighbor] | None:
        """By the index that this very transaction reads: it is never behind, and joins with the chunks itself."""
        self._reach.bind(unit.connection)  # it may have been made since this process opened the vault
        if index.spec is None or not index.exists(unit.connection):
            return None
        self._reach.is_there()
        matches = index.query(unit.user_id, wanted.vector, wanted.k, wanted.where, connection=unit.connection)
        ids, scores = self._scored(unit, [match.id for match in matches], wanted)
        return _hydrated(unit, best(ids, scores, len(ids)), wanted.where, "index")

    def _scored(self, unit: Unit, ids: Sequence[str], wanted: Wanted) -> tuple[list[str], NDArray[np.float64]]:
        """Those of the chunks that are similar enough, by SQL's own vectors: an index rounds its own way."""
        ids, matrix = load_vectors(unit, self._reach.row.model, wanted.vector.size, ids)
        scores = similarities(matrix, wanted.vector)
        if wanted.min_similarity is not None:
            return _keep(ids, scores, scores >= wanted.min_similarity)
        return ids, scores

    def _by_index(self, unit: Unit, index: VectorIndex, wanted: Wanted, count: int) -> list[Neighbor] | None:
        """None where the index cannot answer whole."""
        # Before the index is asked: a debt paid in between is then merely scored twice, and never missed.
        dirty = set(owed_ids(unit, self._reach.row.id))
        if len(dirty) > self._exact_limit:
            return None
        pushed = pushdown(wanted.where)
        least = -1.0 if wanted.min_similarity is None else wanted.min_similarity
        width = wanted.k + len(dirty)
        for _ in range(WIDENINGS):
            width = min(width, count + len(dirty))  # what was deleted may still be in the index
            asked_at = time.monotonic()
            try:
                matches = index.query(unit.user_id, wanted.vector, width, pushed)
            except VectorIndexError as exc:
                self._reach.lost(exc, time.monotonic() - asked_at)
                return None
            candidates = sorted({match.id for match in matches} | dirty)
            ids, scores = self._scored(unit, candidates, wanted)  # a dirty chunk's similarity would be stale, too
            found = _hydrated(unit, best(ids, scores, len(ids)), wanted.where, "index")[: wanted.k]
            exhausted = len(matches) < width or width == count + len(dirty)
            # Whatever the index did not name is no nearer than the last that it named.
            floor = matches[-1].similarity if matches else -1.0
            if floor < least - ROUNDING:
                return found
            if len(found) == wanted.k and (exhausted or found[-1].similarity >= floor - ROUNDING):
                return found
            if exhausted:
                break
            width *= 4
        if wanted.min_similarity is None and len(found) == _count_matching(unit, wanted.where):
            return found
        return None


def _build_glance(where: Filter) -> Prepared:
    def build(unit: Unit, ids: Sequence[str]) -> Select[Any]:
        both = OWNERS.join(CHUNKS, true())
        statement = unit.select(OWNERS.c.incarnation, OWNERS.c.epoch, *CHUNK_COLUMNS, frm=both, by_key=True)
        return statement.where(
            OWNERS.c.user_id == bindparam("of_owner", unit.user_id), CHUNKS.c.id.in_(ids), compile_where(where, CHUNKS)
        )

    return Prepared(build)


_GLANCES = {where: _build_glance(where) for where in (EVERYTHING, NOT_COMPRESSED)}


def _hydrated(unit: Unit, ranked: Sequence[VectorMatch], where: Filter, tier: Tier) -> list[Neighbor]:
    chunks = read_chunks(unit, [match.id for match in ranked], where)
    return [Neighbor(chunks[match.id], match.similarity, tier) for match in ranked if match.id in chunks]


def _keep(
    ids: Sequence[str], scores: NDArray[np.float64], kept: NDArray[np.bool_]
) -> tuple[list[str], NDArray[np.float64]]:
    return [ids[place] for place in np.flatnonzero(kept).tolist()], scores[kept]


def _count_matching(unit: Unit, where: Filter) -> int:
    """How many chunks with a vector pass the filter."""
    statement = unit.select(func.count(), frm=CHUNKS).where(
        compile_where(where, CHUNKS), CHUNKS.c.chroma_id.is_not(None)
    )
    return int(unit.execute(statement).scalar_one())
