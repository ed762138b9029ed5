"""What has to be right, and embedded, before a new chunk may be written?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from memvault.embedding.base import NO_EMBEDDER, Embedder, Matrix, Vector, check_vector
from memvault.embedding.calling import TIMEOUT_S, EmbedderCalls, Progress
from memvault.errors import ConfigurationError, ValidationError
from memvault.ids import new_chunk_id
from memvault.text import (
    check_choice,
    check_content,
    check_fraction,
    check_identifier,
    check_integer,
    check_metadata,
    check_time,
    shown,
)
from memvault.values import MEMORY_TYPES, NewChunk

PROCEDURAL = "procedural"
"""The type whose chunks have no vector: they are found by words, key and listing."""

TokenCounter = Callable[[str], int]

Known = Callable[[Sequence[str]], dict[str, Vector]]
"""Finds, for hashes of contents, the vectors that the embedder once made of them, for the same user."""


def quarter_of_characters(text: str) -> int:
    """The default token counter: a token is about four characters of English (OpenAI's rule of thumb)."""
    return math.ceil(len(text) / 4)


@dataclass(frozen=True)
class Draft:
    """A checked chunk on its way into the database. ``vector`` is float32 at unit norm, or None.

    ``embedded``: the vault's embedder made the vector, from the content alone.
    """

    id: str
    id_given: bool
    session_id: str | None
    memory_type: str
    content: str
    importance: float
    token_count: int
    created_at: datetime
    vector: Vector | None
    metadata: dict[str, Any] = field(default_factory=dict)
    embedded: bool = False

    @property
    def lacks_vector(self) -> bool:
        """Whether one is due that nobody has given."""
        return self.vector is None and self.memory_type != PROCEDURAL

    @property
    def content_hash(self) -> str:
        # A cached_property would take its lock, which takes longer than to hash a short text again.
        return hash_content(self.content)


def hash_content(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


class Drafting:
    """The vault's rules for new content: its embedder, its dimension, its token counter."""

    def __init__(
        self, embedder: Embedder | None, token_counter: TokenCounter | None, embed_timeout: float = TIMEOUT_S
    ) -> None:
        self.embedder = embedder
        self._calls = None if embedder is None else EmbedderCalls(embedder, embed_timeout)
        self.dimension = None if self._calls is None else self._calls.dimension()
        """Shape of the vault's vectors; None until the first one fixes it, where the caller brings them."""
        self._count = token_counter or quarter_of_characters

    @property
    def model(self) -> str:
        return NO_EMBEDDER if self.embedder is None else self.embedder.model

    def draft(self, chunks: Sequence[NewChunk]) -> list[Draft]:
        """Check new chunks, without any I/O. Raises ValidationError, naming the place where there are several."""
        now = datetime.now(UTC)
        drafts: list[Draft] = []
        dimension = self.dimension
        for place, chunk in enumerate(chunks):
            prefix = f"chunks[{place}]." if len(chunks) > 1 else ""
            drafts.append(self._draft(chunk, now + timedelta(microseconds=place), dimension, prefix))
            if dimension is None and (vector := drafts[-1].vector) is not None:
                dimension = vector.size  # as the vault will have it once these are stored
        return drafts

    def check(self, chunk: NewChunk) -> None:
        """Raise ValidationError where `draft` would."""
        self.draft([chunk])

    def _draft(self, chunk: NewChunk, now: datetime, dimension: int | None, prefix: str) -> Draft:
        if not isinstance(chunk, NewChunk):
            raise ValidationError(f"{prefix or 'chunk'} must be a NewChunk, got {shown(chunk)}")
        memory_type = check_choice(chunk.memory_type, f"{prefix}memory_type", MEMORY_TYPES)
        content = check_content(chunk.content, f"{prefix}content")
        return Draft(
            id=new_chunk_id() if chunk.id is None else check_identifier(chunk.id, f"{prefix}id"),
            id_given=chunk.id is not None,
            session_id=None if chunk.session_id is None else check_identifier(chunk.session_id, f"{prefix}session_id"),
            memory_type=memory_type,
            content=content,
            importance=check_fraction(chunk.importance, f"{prefix}importance"),
            token_count=self.count_tokens(content),
            created_at=now if chunk.created_at is None else check_time(chunk.created_at, f"{prefix}created_at"),
            vector=_check_embedding(chunk.embedding, memory_type, dimension, f"{prefix}embedding"),
            metadata={} if chunk.metadata is None else check_metadata(chunk.metadata, f"{prefix}metadata"),
        )

    def check_embedding(self, embedding: object, memory_type: str) -> Vector | None:
        """The caller's vector at unit norm, where there is one and may be one."""
        return _check_embedding(embedding, memory_type, self.dimension, "embedding")

    def count_tokens(self, content: str) -> int:
        return check_integer(self._count(content), "token_counter's answer", minimum=0)

    def embed_drafts(self, drafts: Sequence[Draft], known: Known, progress: Progress | None = None) -> list[Draft]:
        """The drafts, with a vector wherever one is due. Raises EmbeddingError.

        A text that this user has already, or that stands there twice, is not embedded again. ``progress`` is called
        with the number of drafts that need no more embedding, before the last of them.
        """
        texts = {draft.content_hash: draft.content for draft in drafts if draft.lacks_vector}
        if self._calls is None or not texts:
            return list(drafts)

        def left(count: int) -> None:
            if progress is not None and count:
                progress(len(drafts) - count)

        vectors = self._vectors(self._calls, texts, known, left)
        return [
            replace(draft, vector=vectors[draft.content_hash], embedded=True) if draft.lacks_vector else draft
            for draft in drafts
        ]

    def embed_content(self, content: str, known: Known) -> Vector | None:
        """The vector of one content, known or made; None where there is no embedder. Raises EmbeddingError."""
        if self._calls is None:
            return None
        digest = hash_content(content)
        return self._vectors(self._calls, {digest: content}, known)[digest]

    @staticmethod
    def _vectors(
        calls: EmbedderCalls, texts: Mapping[str, str], known: Known, left: Progress | None = None
    ) -> dict[str, Vector]:
        """The vectors of texts by their hashes, known or made. ``left``: told how many are still to be made."""
        vectors = {} if calls.cheap else known(list(texts))
        missing = [digest for digest in texts if digest not in vectors]
        told = None if left is None else lambda done: left(len(missing) - done)
        vectors.update(zip(missing, calls.documents([texts[digest] for digest in missing], told), strict=True))
        return vectors

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Matrix:
        """Vectors of documents, (n, dimension) float32 at unit norm. Raises EmbeddingError."""
        return self._asked().documents(texts, progress)

    def embed_query(self, text: str) -> Vector:
        """The vector of a query, (dimension,). Raises EmbeddingError."""
        return self._asked().query(text)

    def _asked(self) -> EmbedderCalls:
        if self._calls is None:
            raise ConfigurationError(
                'this vault has no embedder (embedder="none"): give the text\'s vector by embedding=, or open a vault '
                'with embedder="static"'
            )
        return self._calls


def _check_embedding(embedding: object, memory_type: str, dimension: int | None, argument: str) -> Vector | None:
    if embedding is None:
        return None
    if memory_type == PROCEDURAL:
        raise ValidationError(f"{argument}: a chunk of type procedural has no vector; leave it out")
    return check_vector(embedding, argument, dimension)
