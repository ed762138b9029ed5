"""What does one search do, from its arguments to its hits?"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from memvault.database.transactions import Transactions
from memvault.database.unit import Unit
from memvault.embedding.base import check_vector
from memvault.errors import ValidationError
from memvault.filters import NOTHING, Filter, check_filter
from memvault.memory.chunk_table import CHUNKS, chunk_value, select_chunks, without_compressed
from memvault.memory.drafts import Drafting
from memvault.search.nearest import NearestSearch, Wanted
from memvault.text import check_choice, check_content, check_integer, shown
from memvault.values import Chunk, Hit

MODES = ("hybrid", "vector", "keyword")


class Search:
    """Search for any user of one vault."""

    def __init__(self, nearest: NearestSearch, drafting: Drafting) -> None:
        self._nearest = nearest
        self._drafting = drafting

    def run(
        self,
        transactions: Transactions,
        query: str | None,
        *,
        embedding: Any,
        k: int,
        where: Filter | None,
        mode: str,
        min_similarity: float | None,
        include_compressed: bool,
    ) -> list[Hit]:
        """As `UserMemory.search` promises."""
        check_integer(k, "k", minimum=1)
        check_choice(mode, "mode", MODES)
        if mode == "keyword":
            raise ValidationError(
                "mode 'keyword' is not there yet, because words are not indexed; use 'vector', or 'hybrid', which is "
                "the vector answer until then"
            )
        condition = check_filter(where)
        if not include_compressed:
            condition = without_compressed(condition)
        least = _check_similarity(min_similarity)
        if query is not None:
            check_content(query, "query")
        vector = None if embedding is None else check_vector(embedding, "embedding", self._drafting.dimension)
        if condition is NOTHING:
            return []
        if vector is None:
            if query is None:
                # A listing compares no vectors, and min_similarity drops what has no similarity.
                return [] if least is not None else _listing(transactions, condition, k)
            if _only_punctuation(query):
                return []
            vector = self._drafting.embed_query(query)
        wanted = Wanted(vector, k, condition, least)
        neighbors = self._nearest.run(transactions, wanted)
        return [
            Hit(
                chunk=chunk,
                score=(1 + similarity) / 2,
                similarity=similarity,
                why={"tier": tier, "vector": {"rank": rank, "similarity": similarity}},
            )
            for rank, (chunk, similarity, tier) in enumerate(neighbors, start=1)
        ]


def _listing(transactions: Transactions, where: Filter, k: int) -> list[Hit]:
    """Without anything to compare with: the newest chunks under the filter, each with score 1."""

    def work(unit: Unit) -> Sequence[Chunk]:
        newest = select_chunks(unit, where).order_by(CHUNKS.c.created_at.desc(), CHUNKS.c.id.desc()).limit(k)
        return [chunk_value(row) for row in unit.execute(newest)]

    return [Hit(chunk=chunk, score=1.0, similarity=None, why={"tier": "listing"}) for chunk in transactions.read(work)]


def _check_similarity(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 1:
        raise ValidationError(f"min_similarity must be a cosine, from -1 to 1, got {shown(value)}")
    return float(value)


def _only_punctuation(text: str) -> bool:
    """No letter, digit, or pictograph anywhere: there is no word to look for."""
    return all(
        unicodedata.category(character)[0] in "PZCM" or unicodedata.category(character) in ("Sk", "Sm", "Sc")
        for character in text
    )
