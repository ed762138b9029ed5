"""Agent memory on SQL, with a pluggable vector index."""

from memvault.database.engine import create_engine
from memvault.errors import (
    ConfigurationError,
    ConflictError,
    EmbeddingError,
    IndexMismatchError,
    IndexOwnershipError,
    MemvaultError,
    MissingDependencyError,
    NotFoundError,
    SchemaError,
    StorageError,
    ValidationError,
    VectorIndexError,
)
from memvault.filters import F
from memvault.storage import StorageLayer
from memvault.user import UserMemory
from memvault.values import (
    Chunk,
    ErasureReport,
    Hit,
    ImportReport,
    Job,
    MemorySession,
    NewChunk,
    Page,
    Preference,
    SyncReport,
)

__all__ = [
    "Chunk",
    "ConfigurationError",
    "ConflictError",
    "EmbeddingError",
    "ErasureReport",
    "F",
    "Hit",
    "ImportReport",
    "IndexMismatchError",
    "IndexOwnershipError",
    "Job",
    "MemorySession",
    "MemvaultError",
    "MissingDependencyError",
    "NewChunk",
    "NotFoundError",
    "Page",
    "Preference",
    "SchemaError",
    "StorageError",
    "StorageLayer",
    "SyncReport",
    "UserMemory",
    "ValidationError",
    "VectorIndexError",
    "create_engine",
]
