"""How does pgvector's table come to be, and what may stand in its way? What an administrator must run, if anything."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from sqlalchemy import Column, Connection, MetaData, Table, exc, select, text
from sqlalchemy.types import UserDefinedType

from memvault.database.base import OWNERS, SCHEMA, identifier
from memvault.database.engine import schema_of
from memvault.database.migration_locks import quoted
from memvault.database.postgres import BINARY, INSUFFICIENT_PRIVILEGE, sqlstate
from memvault.embedding.base import Vector
from memvault.errors import VectorIndexError
from memvault.vectors.canonical import CONTENT, VECTORS

METRIC = "vector_cosine_ops"
MAX_HNSW_DIMENSION = 2000
"""pgvector's limit for an index on its type vector."""

FOREIGN = -1
"""In place of the dimension of a table that somebody else made."""

PAGE = 2000


class VectorType(UserDefinedType[Any]):
    """pgvector's type, in whichever schema the extension is."""

    cache_ok = True

    def __init__(self, schema: str) -> None:
        self.schema = schema

    def get_col_spec(self, **_: Any) -> str:
        return f"{self.schema}.vector".replace("%", "%%")  # SQLAlchemy does that to all but types


@lru_cache(maxsize=64)
def declared(name: str, extension: str) -> Table:
    """The table for queries: beside our tables, but not one of those that Alembic looks after."""
    columns = (
        Column("chunk_id", identifier()),
        Column("user_id", identifier()),
        Column("embedding", VectorType(extension)),
    )
    return Table(name, MetaData(), *columns, schema=SCHEMA)


def qualified(connection: Connection, name: str) -> str:
    """A table's name with the schema that our tables are in, quoted, as a value."""
    schema = schema_of(connection) or connection.dialect.default_schema_name
    return ".".join(quoted(part) for part in (schema, name) if part)


def in_text(quoted: str) -> str:
    """A quoted name as a part of `sqlalchemy.text`, which takes a colon for a parameter."""
    return quoted.replace(":", "\\:")


def place_of(connection: Connection, name: str) -> str:
    """As `qualified`, within `sqlalchemy.text`."""
    return in_text(qualified(connection, name))


def exists(connection: Connection, name: str) -> bool:
    found = connection.execute(text("SELECT to_regclass(:name) IS NOT NULL"), {"name": qualified(connection, name)})
    return bool(found.scalar_one())


def dimension(connection: Connection, name: str) -> int | None:
    """Of the vectors in the table; None where it is absent, `FOREIGN` where it is not ours."""
    statement = text(
        "SELECT coalesce((SELECT atttypmod FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
        "WHERE attrelid = pg_class.oid AND attname = 'embedding' AND typname = 'vector'), :foreign) "
        "FROM pg_class WHERE oid = to_regclass(:name)"
    )
    asked = {"name": qualified(connection, name), "foreign": FOREIGN}
    found: int | None = connection.execute(statement, asked).scalar_one_or_none()
    return found


def metrics(connection: Connection, name: str) -> set[str]:
    """The operator classes of the indexes on the vectors."""
    statement = text(
        "SELECT opcname FROM pg_index JOIN pg_opclass ON pg_opclass.oid = ANY(indclass) "
        "JOIN pg_am ON pg_am.oid = opcmethod WHERE indrelid = to_regclass(:name) AND amname IN ('hnsw', 'ivfflat')"
    )
    return set(connection.execute(statement, {"name": qualified(connection, name)}).scalars())


def keep_writers_out(connection: Connection) -> None:
    """Until the transaction ends: every write locks its owner's row first, which this mode conflicts with."""
    connection.execute(text(f"LOCK TABLE {place_of(connection, OWNERS.name)} IN EXCLUSIVE MODE"))


def extension_schema(connection: Connection) -> str | None:
    """The quoted name of the schema with pgvector's type and operators; None where the database has not got it."""
    statement = text(
        "SELECT quote_ident(nspname) FROM pg_extension JOIN pg_namespace ON pg_namespace.oid = extnamespace "
        "WHERE extname = 'vector'"
    )
    found: str | None = connection.execute(statement).scalar_one_or_none()
    return found


def require_extension(connection: Connection) -> None:
    """Create the extension where it is missing. Raises VectorIndexError, saying what an administrator must do."""
    if extension_schema(connection) is not None:
        return
    available = text("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'")
    if connection.execute(available).first() is None:
        major = (connection.dialect.server_version_info or ("NN",))[0]
        raise VectorIndexError(
            "the PostgreSQL server has no pgvector. An administrator must install it there (the package "
            f"postgresql-{major}-pgvector on Debian and Ubuntu), then {advice(connection)}"
        )
    try:
        with connection.begin_nested():
            connection.execute(text("CREATE EXTENSION vector"))
    except exc.DBAPIError as error:
        if extension_schema(connection) is not None:  # another schema's vault was quicker
            return
        if sqlstate(error) != INSUFFICIENT_PRIVILEGE:
            raise
        role = connection.execute(text("SELECT current_user")).scalar_one()
        raise VectorIndexError(
            f"the role {role!r} may not create pgvector's extension: {advice(connection)}"
        ) from error


def advice(connection: Connection) -> str:
    database = connection.execute(text("SELECT current_database()")).scalar_one()
    return f"an administrator must run, in the database {database!r}: CREATE EXTENSION vector"


def create(connection: Connection, name: str, size: int, extension: str) -> None:
    connection.execute(
        text(
            f"CREATE TABLE {place_of(connection, name)} ("
            'chunk_id varchar(255) COLLATE "C" PRIMARY KEY, user_id varchar(255) COLLATE "C" NOT NULL, '
            f"embedding {in_text(extension)}.vector({size}) NOT NULL)"
        )
    )


def create_indexes(connection: Connection, name: str, size: int, extension: str) -> None:
    """After the table was filled, which is several times faster than before."""
    place = place_of(connection, name)
    connection.execute(text(f"CREATE INDEX {name}_user ON {place} (user_id)"))
    if size <= MAX_HNSW_DIMENSION:
        connection.execute(
            text(f"CREATE INDEX {name}_hnsw ON {place} USING hnsw (embedding {in_text(extension)}.{METRIC})")
        )
    connection.execute(text(f"ANALYZE {place}"))  # else the first searches are planned as if it were empty


def held(connection: Connection, model: str) -> Iterator[list[tuple[str, str, Vector]]]:
    """Chunk, owner and vector of everything that SQL holds of a model, in pages."""
    columns = (VECTORS.c.id, VECTORS.c.chunk_id, VECTORS.c.user_id, VECTORS.c.vector)
    statement = select(*columns).where(VECTORS.c.model == model, VECTORS.c.field == CONTENT)
    last = -1
    while True:
        page = statement.where(VECTORS.c.id > last).order_by(VECTORS.c.id).limit(PAGE)
        rows = connection.execute(page.execution_options(**{BINARY: True})).all()
        if not rows:
            return
        yield [(row.chunk_id, row.user_id, np.frombuffer(row.vector, "<f4")) for row in rows]
        last = rows[-1].id


def written(vector: Vector) -> str:
    """A vector in pgvector's own notation."""
    return f"[{','.join(map(repr, vector.tolist()))}]"
