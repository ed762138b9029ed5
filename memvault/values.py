"""What crosses the API: frozen read models, and the one write model, `NewChunk`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MemoryType = Literal["episodic", "semantic", "working", "procedural"]
MEMORY_TYPES = ("episodic", "semantic", "working", "procedural")
JOB_STATUSES = ("queued", "running", "completed", "failed")

T = TypeVar("T")


_PUT_DICT, _PUT_FIELDS_SET, _PUT_EXTRA, _PUT_PRIVATE = (
    vars(BaseModel)[slot].__set__
    for slot in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True)

    @classmethod
    def of_row(cls, values: Sequence[Any]) -> Self:
        """Made of the values of all fields, in their order and trusted to be right: as by pydantic's `model_construct`,
        of which a search would spend half of its time in."""
        made = cls.__new__(cls)
        fields = cls.__pydantic_fields__
        # Past __setattr__, which a frozen model refuses: these four are what an instance consists of.
        _PUT_DICT(made, dict(zip(fields, values, strict=True)))
        _PUT_FIELDS_SET(made, set(fields))
        _PUT_EXTRA(made, None)
        _PUT_PRIVATE(made, None)
        return made


class Chunk(_Value):
    """One memory. Times are aware and in UTC; ``version`` starts at 1 and rises with every update."""

    id: str
    user_id: str
    session_id: str
    memory_type: MemoryType
    content: str
    importance: float
    token_count: int
    compressed: bool
    compression_source: str | None
    source_session_id: str | None
    chroma_id: str | None
    created_at: datetime
    updated_at: datetime
    metadata: dict[str, Any]
    version: int


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A memory to be stored; checked by `add` and `add_many`.

    ``id`` None: one is generated. ``session_id`` None: the user's default session. ``embedding`` None: the vault's
    embedder is asked. ``created_at`` None: now; chunks of one batch are then spaced by a microsecond, in their order.
    """

    content: str
    id: str | None = None
    session_id: str | None = None
    memory_type: str = "episodic"
    importance: float = 0.5
    metadata: dict[str, Any] | None = None
    embedding: Sequence[float] | NDArray[np.floating[Any]] | None = None
    created_at: datetime | None = None


class MemorySession(_Value):
    """One conversation of a user; ``memory_count`` and ``total_tokens`` count its chunks."""

    id: str
    user_id: str
    started_at: datetime
    last_activity: datetime
    ended_at: datetime | None
    compressed: bool
    memory_count: int
    total_tokens: int


class Preference(_Value):
    """One entry of procedural memory: how to act for this user; ``value`` is any JSON value."""

    id: str
    user_id: str
    key: str
    value: Any
    confidence: float
    updated_at: datetime
    source_chunk_id: str | None


class Job(_Value):
    """One compression job."""

    id: str
    user_id: str
    status: Literal["queued", "running", "completed", "failed"]
    sessions_compressed: int
    memories_created: int
    error: str | None
    created_at: datetime
    completed_at: datetime | None


class Hit(_Value):
    """One answer of a search.

    ``score`` is in [0, 1] and ranks within one answer. ``similarity`` is the cosine, in [-1, 1], and compares across
    answers; None where no vector was compared.
    """

    chunk: Chunk
    score: float
    similarity: float | None
    why: dict[str, Any] = Field(default_factory=dict, repr=False)

    def explain(self) -> dict[str, Any]:
        """Why this hit is here: the tier that answered, and each leg's rank and score."""
        return {"score": self.score, "similarity": self.similarity, **self.why}


class Page(_Value, Generic[T]):
    """A part of a list; ``next`` is the cursor to pass as ``after=``, None on the last page."""

    items: list[T]
    next: str | None = None


class SyncReport(_Value):
    """What a payment of debts did: how many it ``paid``, how many ``failed``, how many are still ``owed``."""

    paid: int = 0
    failed: int = 0
    owed: int = 0


class DoctorReport(_Value):
    """What an examination of the index found, in records.

    ``missing`` from the index; ``orphaned``: of a chunk that SQL has not got; ``stale``: another text, vector or
    metadata than SQL's; ``foreign``: under another user than SQL's; ``unfindable``: held, but not found by a search;
    ``mismatched``: of another dimension, or the whole index is of another dimension, metric, model or vault, as
    ``reason`` says. ``compared``: records that the index holds. ``repaired``: of those found, how many are right now;
    ``owed``: how many will be once the index is paid. ``examples``: some ids of each kind.

    ``clean``: nothing was found; an index that was just repaired is clean the next time.
    """

    clean: bool
    missing: int = 0
    orphaned: int = 0
    stale: int = 0
    foreign: int = 0
    unfindable: int = 0
    mismatched: int = 0
    repaired: int = 0
    owed: int = 0
    compared: int = 0
    reason: str | None = None
    examples: dict[str, list[str]] = Field(default_factory=dict)


class CompactReport(_Value):
    """Bytes on the disk, of the database's file and of the index's folder, before and after; None where there is no
    such file: on a server."""

    database_before: int | None
    database_after: int | None
    index_before: int | None
    index_after: int | None


class ErasureReport(_Value):
    """What an erasure removed: rows by table, and the deletions that the index still owes."""

    user_id: str
    counts: dict[str, int]
    owed: int


class ImportReport(_Value):
    """What an import did: ``added`` and ``skipped`` (already there) chunks, and the ``users`` they belong to."""

    added: int = 0
    skipped: int = 0
    users: int = 0
