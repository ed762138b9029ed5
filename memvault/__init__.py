"""Agent memory on SQL, with a pluggable vector index."""

from memvault.database.engine import create_engine
from memvault.embedding.chroma_function import ChromaFunctionEmbedder
from memvault.embedding.function import FunctionEmbedder
from memvault.embedding.sentence_transformers import SentenceTransformerEmbedder
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
    CompactReport,
    DoctorReport,
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
    "ChromaFunctionEmbedder",
    "Chunk",
    "CompactReport",
    "ConfigurationError",
    "ConflictError",
    "DoctorReport",
    "EmbeddingError",
    "ErasureReport",
    "F",
    "FunctionEmbedder",
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
    "SentenceTransformerEmbedder",
    "StorageError",
    "StorageLayer",
    "SyncReport",
    "UserMemory",
    "ValidationError",
    "VectorIndexError",
    "create_engine",
]
