"""Which backend does a URL, a name or an environment variable stand for?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sqlalchemy import URL, Engine

from memvault.database.engine import sqlite_file
from memvault.database.transactions import Database
from memvault.embedding.base import NO_EMBEDDER, Embedder
from memvault.embedding.static import StaticEmbedder
from memvault.errors import ConfigurationError, ValidationError
from memvault.memory.chunk_table import CHUNKS
from memvault.text import check_identifier, check_integer, shown
from memvault.vectors.base import TransactionalIndex, VectorIndex
from memvault.vectors.exact import ExactIndex

DEFAULT_VECTORS = "chroma"
DEFAULT_EMBEDDER = "static"
PREFIX = "MEMVAULT_"

_TEXT_SETTINGS = ("vectors", "embedder", "schema", "schema_name", "indexing")
_NUMBER_SETTINGS = {"index_wait": float, "exact_limit": int}


def default_vectors(engine: Engine) -> str:
    """The index of a new vault that names none. Raises ConfigurationError where there is no sensible one."""
    if engine.dialect.name == "sqlite":
        return DEFAULT_VECTORS
    raise ConfigurationError(
        'there is no vault in this database yet, and a new one on a server must name its index: vectors="exact", '
        '"pgvector", "chroma+http://host:port" or "chroma:///absolute/folder"'
    )


def build_index(vectors: str | VectorIndex, database: Database) -> VectorIndex:
    """The index that a name or a URL stands for; not opened yet."""
    dialect = database.engine.dialect.name
    if not isinstance(vectors, str):
        if isinstance(vectors, type) or not isinstance(vectors, VectorIndex):
            raise ConfigurationError(f"vectors must be a name, a URL or a VectorIndex, got {shown(vectors)}")
        if vectors.transactional and not isinstance(vectors, ExactIndex | TransactionalIndex):
            raise ConfigurationError(
                f"vectors={shown(vectors)} calls itself transactional, and lacks TransactionalIndex's methods"
            )
        return vectors
    if vectors == "exact":
        return ExactIndex(database, CHUNKS)
    if vectors == "sqlite-vec":
        if dialect != "sqlite":
            raise ConfigurationError(
                'vectors="sqlite-vec" needs a SQLite database; PostgreSQL has "pgvector"'
            )
        from memvault.vectors.sqlite_vec import SqliteVecIndex

        return SqliteVecIndex(database, CHUNKS)
    if vectors == "pgvector":
        if dialect != "postgresql":
            raise ConfigurationError(
                'vectors="pgvector" needs a PostgreSQL database; SQLite has "sqlite-vec"'
            )
        from memvault.vectors.pgvector import PgVectorIndex

        return PgVectorIndex(database, CHUNKS)
    if vectors == "chroma":
        if dialect != "sqlite":
            raise ConfigurationError(
                'vectors="chroma" is a folder beside a SQLite file; with a server, name the folder, '
                "chroma:///absolute/folder, or a Chroma server, chroma+http://host:port"
            )
        return _chroma(_folder_beside(database.engine.url), vectors)
    if vectors.startswith("chroma://"):
        folder = Path(unquote(vectors.removeprefix("chroma://")))
        if not folder.is_absolute():
            raise ConfigurationError(f"vectors={vectors!r} names no absolute folder; write chroma:///absolute/folder")
        return _chroma(folder, vectors)
    if vectors.startswith(("chroma+http://", "chroma+https://")):
        from memvault.vectors.chroma_collection import require_chromadb
        from memvault.vectors.chroma_server import ChromaServerIndex

        require_chromadb()
        return ChromaServerIndex(vectors)
    raise ConfigurationError(
        f"vectors={vectors.split('@')[-1]!r} is no index of this version; there are chroma (a folder beside the "
        "database), chroma:///absolute/folder, chroma+http(s)://host:port, sqlite-vec, pgvector, "
        "exact, or an object with VectorIndex's methods"
    )


def build_embedder(embedder: str | Embedder) -> Embedder | None:
    """The embedder that a name stands for; None for "none", where the caller brings all vectors."""
    if isinstance(embedder, str):
        if embedder in ("static", StaticEmbedder.model):
            return StaticEmbedder()
        if embedder == NO_EMBEDDER:
            return None
        raise ConfigurationError(
            f"embedder={embedder!r} is no embedder of this version; there are static, none, or an object with "
            "Embedder's methods (a vault founded with an object is opened with one of the same model)"
        )
    if isinstance(embedder, type) or not isinstance(embedder, Embedder):
        raise ConfigurationError(f"embedder must be a name or an Embedder, got {shown(embedder)}")
    try:
        check_identifier(embedder.model, "the embedder's model")
        check_integer(embedder.dimension, "the embedder's dimension", minimum=1)
    except ValidationError as exc:
        raise ConfigurationError(str(exc)) from exc
    return embedder


def settings_from_env(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The arguments of `StorageLayer.open` that MEMVAULT_ variables give; raises where the database's URL is not."""
    database_url = environ.get(f"{PREFIX}DATABASE_URL")
    if not database_url:
        raise ConfigurationError(f"{PREFIX}DATABASE_URL is not set; set it to a URL such as sqlite:///memvault.db")
    settings: dict[str, Any] = {"database_url": database_url}
    for name in _TEXT_SETTINGS:
        if value := environ.get(PREFIX + name.upper()):
            settings[name] = value
    for name, kind in _NUMBER_SETTINGS.items():
        if value := environ.get(PREFIX + name.upper()):
            try:
                settings[name] = kind(value)
            except ValueError as exc:
                raise ConfigurationError(f"{PREFIX}{name.upper()} must be a number, got {value!r}") from exc
    return settings


def _chroma(folder: Path, location: str) -> VectorIndex:
    from memvault.vectors.chroma import ChromaIndex
    from memvault.vectors.chroma_collection import require_chromadb

    # Before a vault is founded on it: what cannot be opened must not be remembered.
    require_chromadb()
    if not folder.parent.is_dir():
        raise ConfigurationError(
            f"the vector index cannot lie in {folder}: there is no folder {folder.parent}; make it first"
        )
    return ChromaIndex(folder, location=location)


def _folder_beside(url: URL) -> Path:
    database = sqlite_file(url)
    return database.with_name(f"{database.name}.chroma")
