"""What has to be right, and embedded, before a new chunk may be written?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from memvault.embedding.base import NO_EMBEDDER, Embedder, Matrix, Vector, check_vector, embed_checked
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


def quarter_of_characters(text: str) -> int:
    """The default token counter: a token is about four characters of English (OpenAI's rule of thumb)."""
    return math.ceil(len(text) / 4)


@dataclass(frozen=True)
class Draft:
    """A checked chunk on its way into the database. ``vector`` is float32 at unit norm, or None."""

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

    @property
    def content_hash(self) -> str:
        return hash_content(self.content)


def hash_content(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


class Drafting:
    """The vault's rules for new content: its embedder, its dimension, its token counter."""

    def __init__(self, embedder: Embedder | None, token_counter: TokenCounter | None) -> None:
        self.embedder = embedder
        self.dimension = None if embedder is None else embedder.dimension
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

    def with_embeddings(self, chunks: Sequence[NewChunk]) -> list[NewChunk]:
        """The chunks, with the embedder's vector wherever one is due and none was given. Raises EmbeddingError."""
        drafts = self.embed_drafts(self.draft(chunks))
        return [replace(chunk, embedding=draft.vector) for chunk, draft in zip(chunks, drafts, strict=True)]

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

    def embed_drafts(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts, with a vector wherever one is due: asks the embedder. Raises EmbeddingError."""
        lacking = [
            place for place, draft in enumerate(drafts) if draft.vector is None and draft.memory_type != PROCEDURAL
        ]
        if self.embedder is None or not lacking:
            return list(drafts)
        vectors = self.embed([drafts[place].content for place in lacking])
        embedded = list(drafts)
        for place, vector in zip(lacking, vectors, strict=True):
            embedded[place] = replace(drafts[place], vector=vector)
        return embedded

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Vectors of documents, (n, dimension) float32 at unit norm. Raises EmbeddingError."""
        embedder = self._embedder()
        return embed_checked(embedder.embed_documents, texts, embedder)

    def embed_query(self, text: str) -> Vector:
        """The vector of a query, (dimension,). Raises EmbeddingError."""
        embedder = self._embedder()
        vector: Vector = embed_checked(embedder.embed_queries, [text], embedder)[0]
        return vector

    def _embedder(self) -> Embedder:
        if self.embedder is None:
            raise ConfigurationError(
                'this vault has no embedder (embedder="none"): give the text\'s vector by embedding=, or open a vault '
                'with embedder="static"'
            )
        return self.embedder


def _check_embedding(embedding: object, memory_type: str, dimension: int | None, argument: str) -> Vector | None:
    if embedding is None:
        return None
    if memory_type == PROCEDURAL:
        raise ValidationError(f"{argument}: a chunk of type procedural has no vector; leave it out")
    return check_vector(embedding, argument, dimension)
