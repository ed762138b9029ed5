"""What should an index hold of a user's chunks, as a transaction sees them?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memvault.database.batches import batches
from memvault.database.unit import Unit
from memvault.memory.chunk_table import CHUNKS
from memvault.vectors.base import RecordMetadata, VectorRecord
from memvault.vectors.canonical import CONTENT, VECTORS

_JOINED = CHUNKS.join(VECTORS, VECTORS.c.chunk_id == CHUNKS.c.id)
_COLUMNS = (
    CHUNKS.c.id,
    CHUNKS.c.content,
    VECTORS.c.vector,
    *(CHUNKS.c[name] for name in RecordMetadata.__dataclass_fields__),
)


def records_of(unit: Unit, ids: Sequence[str], model: str) -> Iterator[VectorRecord]:
    """The records of those of the chunks that have a vector of this model; the others are to be absent."""
    for some in batches(ids):
        statement = unit.select(*_COLUMNS, frm=_JOINED, by_key=True).where(
            CHUNKS.c.id.in_(some), VECTORS.c.model == model, VECTORS.c.field == CONTENT
        )
        for row in unit.execute(statement):
            yield _record(row)


def _record(row: Any) -> VectorRecord:
    chunk_id, content, vector, *metadata = row
    return VectorRecord(chunk_id, np.frombuffer(vector, dtype="<f4"), content, RecordMetadata(*metadata))
