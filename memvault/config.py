"""Which backend does a URL, a name or an environment variable stand for?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from sqlalchemy import URL, Engine

from memvault.database.engine import sqlite_file
from memvault.database.transactions import Database
from memvault.embedding.base import NO_EMBEDDER, Embedder, is_embedder
from memvault.embedding.function import FunctionEmbedder, name_of
from memvault.embedding.static import StaticEmbedder
from memvault.errors import ConfigurationError, ValidationError
from memvault.memory.chunk_table import CHUNKS
from memvault.text import check_identifier, shown
from memvault.vectors.base import TransactionalIndex, VectorIndex
from memvault.vectors.exact import ExactIndex

DEFAULT_VECTORS = "chroma"
DEFAULT_EMBEDDER = "static"
PREFIX = "MEMVAULT_"

_TEXT_SETTINGS = ("vectors", "embedder", "schema", "schema_name", "indexing")
_NUMBER_SETTINGS = {"index_wait": float, "exact_limit": int, "cache_bytes": int, "embed_timeout": float}


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
            raise ConfigurationError('vectors="sqlite-vec" needs a SQLite database; PostgreSQL has "pgvector"')
        from memvault.vectors.sqlite_vec import SqliteVecIndex

        return SqliteVecIndex(database, CHUNKS)
    if vectors == "pgvector":
        if dialect != "postgresql":
            raise ConfigurationError('vectors="pgvector" needs a PostgreSQL database; SQLite has "sqlite-vec"')
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
    if vectors.lower().startswith("chroma+"):  # odd ones, too: their refusal shows no secret
        from memvault.vectors.chroma_collection import require_chromadb
        from memvault.vectors.chroma_server import ChromaServerIndex

        require_chromadb()
        return ChromaServerIndex(vectors)
    raise ConfigurationError(
        f"vectors={vectors.split('@')[-1]!r} is no index of this version; there are chroma (a folder beside the "
        "database), chroma:///absolute/folder, chroma+http(s)://host:port, sqlite-vec, pgvector, "
        "exact, or an object with VectorIndex's methods"
    )


def build_embedder(embedder: object) -> Embedder | None:
    """The embedder that a name, an object or a function stands for; None for "none": the caller brings all vectors."""
    made = _named_embedder(embedder) if isinstance(embedder, str | Path) else _given_embedder(embedder)
    if made is not None:
        try:
            check_identifier(made.model, "the embedder's model")
        except ValidationError as exc:
            raise ConfigurationError(str(exc)) from exc
    return made


def _named_embedder(name: str | Path) -> Embedder | None:
    if name in ("static", StaticEmbedder.model):
        return StaticEmbedder()
    if name == NO_EMBEDDER:
        return None
    if isinstance(name, Path) or name.startswith(("sentence-transformers/", "/", "./", "../", "~")):
        from memvault.embedding.sentence_transformers import SentenceTransformerEmbedder

        return SentenceTransformerEmbedder(name)
    raise ConfigurationError(
        f"embedder={name!r} is the name of no embedder; there are static, none, sentence-transformers/NAME, the path "
        "of a sentence-transformers model, or objects: an Embedder, a function from texts to vectors, an embedding "
        "function of Chroma's. A vault founded with an object is opened with one of the same model"
    )


def _given_embedder(embedder: object) -> Embedder:
    if not isinstance(embedder, type):
        if is_embedder(embedder):
            return cast(Embedder, embedder)
        from memvault.embedding.chroma_function import ChromaFunctionEmbedder, is_chroma_function

        if is_chroma_function(embedder):
            return ChromaFunctionEmbedder(embedder)
        if callable(embedder):
            return FunctionEmbedder(embedder, model=name_of(embedder))
    raise ConfigurationError(
        f"embedder must be a name, an Embedder, a function or an embedding function of Chroma's, got {shown(embedder)}"
    )


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
