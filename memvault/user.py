"""What may be done for one user? Everything here reads and writes that user's rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memvault.database.transactions import OwnTransactions, Transactions
from memvault.embedding.base import Matrix
from memvault.errors import ConfigurationError, ValidationError
from memvault.filters import Filter
from memvault.memory.chunks import ChunkStore
from memvault.memory.drafts import Drafting
from memvault.memory.procedural import ProceduralStore
from memvault.memory.sessions import SessionStore
from memvault.operations.jobs import JobStore
from memvault.search.pipeline import Search
from memvault.text import check_content, shown
from memvault.values import Hit


class UserMemory:
    """The memory of one user: ``chunks``, ``sessions``, ``procedural``, ``jobs``, and the search over them."""

    def __init__(self, transactions: Transactions, drafting: Drafting, search: Search) -> None:
        self.user_id = transactions.user_id
        self.chunks = ChunkStore(transactions, drafting)
        self.sessions = SessionStore(transactions)
        self.procedural = ProceduralStore(transactions)
        self.jobs = JobStore(transactions)
        self._transactions = transactions
        self._drafting = drafting
        self._search = search

    def __repr__(self) -> str:
        return f"UserMemory({self.user_id!r})"

    def search(
        self,
        query: str | None = None,
        *,
        embedding: Any = None,
        k: int = 10,
        where: Filter | None = None,
        mode: str = "hybrid",
        min_similarity: float | None = None,
        include_compressed: bool = False,
    ) -> list[Hit]:
        """The user's ``k`` memories nearest to a query, best first; fewer where there are fewer.

        ``embedding`` (shape (dimension,)) is compared in place of the query's own. Without both: the newest memories
        under the filter, with score 1. ``where`` holds for every hit; compressed memories are left out unless
        ``include_compressed`` is true or the filter names ``compressed``. ``min_similarity`` is a cosine, from -1 to
        1. Memories of type procedural have no vector and are found by listing.

        Until words are indexed, mode "hybrid" is the vector answer, and "keyword" a ValidationError. Raises
        ConfigurationError where a query has to be embedded in a vault without an embedder.
        """
        return self._search.run(
            self._transactions,
            query,
            embedding=embedding,
            k=k,
            where=where,
            mode=mode,
            min_similarity=min_similarity,
            include_compressed=include_compressed,
        )

    def embed(self, texts: Sequence[str], *, progress: Callable[[int, int], None] | None = None) -> Matrix:
        """The vectors of texts, as float32 of shape (len(texts), dimension) and unit norm.

        To be passed as ``embedding=`` in a transaction, which then need not wait for the embedder. ``progress`` is
        called with (done, total) after each batch.
        """
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise ValidationError(f"texts must be a list of str, got {shown(texts)}")
        checked = [check_content(text, f"texts[{place}]") for place, text in enumerate(texts)]
        return self._drafting.embed(checked, None if progress is None else lambda done: progress(done, len(checked)))

    @contextmanager
    def transaction(self) -> Iterator[UserMemory]:
        """Several writes, one commit: all that is done through the handle it yields happens, or nothing does.

        It begins with the first call that reaches the database; what `add` embeds before that is embedded outside.
        One call that fails undoes itself only, and may be caught. The handle is for one thread, and ends with the
        block.
        """
        if not isinstance(self._transactions, OwnTransactions):
            raise ConfigurationError(
                "a transaction is open already; use its handle, each call undoes itself when it fails"
            )
        with self._transactions.joined() as joined:
            yield UserMemory(joined, self._drafting, self._search)
