"""Every table, for Alembic and for hand-written queries. Rows of these classes are unchecked: write by the stores."""

from memvault.database.base import Owner, StoreMeta, metadata
from memvault.memory.chunk_table import MemoryChunk
from memvault.memory.procedural import ProceduralMemory
from memvault.memory.sessions import Session
from memvault.operations.jobs import CompressionJob
from memvault.vectors.canonical import MemoryVector
from memvault.vectors.outbox import IndexDebt, VectorIndexRow

__all__ = [
    "CompressionJob",
    "IndexDebt",
    "MemoryChunk",
    "MemoryVector",
    "Owner",
    "ProceduralMemory",
    "Session",
    "StoreMeta",
    "VectorIndexRow",
    "metadata",
]
