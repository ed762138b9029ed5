"""What can go wrong, and what is each kind called?

MemvaultError
├── ConfigurationError            a URL, name or option that cannot work; says what would
│   └── MissingDependencyError    (also ImportError) names the extra to install
├── ValidationError               (also ValueError) the argument, its value, the rule
├── NotFoundError                 (also LookupError)
├── ConflictError                 version or owner moved; nothing was changed
├── SchemaError                   database behind, ahead or foreign; names the command that mends it
├── EmbeddingError                the embedder failed; nothing was stored
├── StorageError                  the database said no (locked, full, down); ``retryable``
└── VectorIndexError              unavailable or corrupt
    ├── IndexMismatchError        the index is of another vault, metric, model or dimension
    └── IndexOwnershipError       another process owns the embedded index; ``owner_pid``
"""

from __future__ import annotations


class MemvaultError(Exception):
    """Base of every error that memvault raises on purpose."""


class ConfigurationError(MemvaultError):
    """A URL, a name or an option cannot work as given."""


class MissingDependencyError(ConfigurationError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""


class ValidationError(MemvaultError, ValueError):
    """An argument breaks a rule; raised before anything is written."""


class NotFoundError(MemvaultError, LookupError):
    """What should be changed or referred to is not there, for this user."""


class ConflictError(MemvaultError):
    """A version moved on or an id is taken; nothing was changed."""


class SchemaError(MemvaultError):
    """The database's schema is behind, ahead of, or foreign to this package."""


class EmbeddingError(MemvaultError):
    """The embedder failed or answered nonsense; nothing was stored."""


class StorageError(MemvaultError):
    """The database refused or failed; the transaction was rolled back.

    ``retryable`` is true where the same call may succeed unchanged later (a lock, a lost connection).
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class VectorIndexError(MemvaultError):
    """The vector index is unavailable or corrupt. SQL still holds every vector."""


class IndexMismatchError(VectorIndexError):
    """The index, or what was asked of it, belongs to another vault, metric, model or dimension."""


class IndexOwnershipError(VectorIndexError):
    """Another process owns the embedded index.

    ``owner_pid`` is that process's id where it could be learnt, else None.
    """

    def __init__(self, message: str, *, owner_pid: int | None = None) -> None:
        super().__init__(message)
        self.owner_pid = owner_pid
