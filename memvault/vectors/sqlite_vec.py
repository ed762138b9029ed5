"""How is a virtual table of sqlite-vec, in the vault's own SQLite file, its index?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine, Integer, LargeBinary, Table, column, select, table, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import Float, String

from memvault.database.batches import batches
from memvault.database.transactions import Database
from memvault.database.unit import Unit
from memvault.embedding.base import Vector
from memvault.errors import MissingDependencyError
from memvault.filters import EVERYTHING, NOTHING, Filter
from memvault.vectors.base import IndexSpec, ScannedRecord, VectorMatch, VectorRecord
from memvault.vectors.canonical import CONTENT, VECTORS
from memvault.vectors.exact import search_all
from memvault.vectors.within import InDatabase, ranked, table_name

CHUNK_SIZE = 32
"""Vectors that are allotted to a user at a time. 20,000 of 256 dimensions take 35 MB if they are 1,000 users' (64: 68
MB; sqlite-vec's default of 1,024: 1.1 GB), and are searched in 17 ms if they are one user's (8: 22 ms; 1,024: 16)."""

MAX_K = 4096
"""More than sqlite-vec returns at once is found by a product with all of the user's vectors."""

_LOADED = "memvault_sqlite_vec"
"""Mark of a connection that has the extension."""


def require_sqlite_vec(engine: Engine) -> None:
    """Raise MissingDependencyError where the extension is not installed, or the engine's driver cannot load it."""
    try:
        import sqlite_vec  # noqa: F401
    except ImportError as exc:
        raise MissingDependencyError(
            f'the sqlite-vec index needs the package sqlite-vec: pip install "memvault[sqlite-vec]" ({exc})'
        ) from exc
    driver: Any = engine.dialect.loaded_dbapi
    if not hasattr(driver.Connection, "enable_load_extension"):
        raise MissingDependencyError(
            f"the sqlite-vec index needs a SQLite that can load extensions, which {driver.__name__} here cannot: "
            'pip install "memvault[sqlite-vec]", which brings pysqlite3-binary where it has wheels; elsewhere '
            "pip install sqlean.py"
        )


class SqliteVecIndex(InDatabase):
    """Exact search within a user's partition of a vec0 table, without reading the vectors into Python."""

    location = "sqlite-vec"
    transactional = True

    def __init__(self, database: Database, chunks: Table) -> None:
        super().__init__(database, chunks)
        require_sqlite_vec(database.engine)

    def open(self, spec: IndexSpec) -> bool:
        with self._reading(None, "be opened") as connection:
            declared = _declared(connection, table_name(spec))
        if declared is not None:
            self._require_own(table_name(spec), re.search(r"USING vec0\b", declared) is not None)
            dimension = re.search(r"float\[(\d+)\]", declared)
            metric = re.search(r"distance_metric=(\w+)", declared)
            self._require(spec, "the metric", metric[1] if metric else "l2", "cosine")
            self._require(spec, "dimension", int(dimension[1]) if dimension else None, spec.dimension)
        self._spec = spec
        return declared is not None

    def exists(self, connection: Connection) -> bool:
        return _declared(connection, table_name(self._opened())) is not None

    def create(self) -> None:
        spec = self._opened()
        name = table_name(spec)
        with self._writing("be created") as connection:  # no other write is under way in this file
            if _declared(connection, name) is not None:
                return
            connection.exec_driver_sql(
                f"CREATE VIRTUAL TABLE {name} USING vec0(chunk_id text primary key, user_id text partition key, "
                f"embedding float[{spec.dimension}] distance_metric=cosine, chunk_size={CHUNK_SIZE})"
            )
            held = select(VECTORS.c.chunk_id, VECTORS.c.user_id, VECTORS.c.vector)
            held = held.where(VECTORS.c.model == spec.model, VECTORS.c.field == CONTENT)
            into = table(name, column("chunk_id"), column("user_id"), column("embedding"))
            connection.execute(into.insert().from_select(["chunk_id", "user_id", "embedding"], held))

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        if not records:
            return
        name = table_name(self._opened())
        with self._writing("be written") as own:
            _put(own, name, [(one.id, one.metadata.user_id, one.vector) for one in records])

    def delete(self, ids: Sequence[str]) -> None:
        if not ids:
            return
        name = table_name(self._opened())
        with self._writing("be deleted from") as own:
            _delete(own, name, ids)

    def follow(self, connection: Connection, user_id: str, vectors: Mapping[str, Vector | None]) -> None:
        name = table_name(self._opened())
        self._prepare(connection)
        _delete(connection, name, [id for id, vector in vectors.items() if vector is None])
        _put(connection, name, [(id, user_id, vector) for id, vector in vectors.items() if vector is not None])

    def query(
        self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING, connection: Connection | None = None
    ) -> list[VectorMatch]:
        spec = self._opened()
        if where is NOTHING:
            return []
        with self._reading(connection, "be searched") as own:
            if k > MAX_K:
                return search_all(Unit(own, user_id), spec, self._chunks, vector, k, where)
            found = _vectors(table_name(spec))
            nearest = select(found.c.chunk_id, found.c.distance).where(
                found.c.embedding.op("MATCH")(np.asarray(vector, "<f4").tobytes()),
                found.c.k == k,
                found.c.user_id == user_id,
            )
            if where is not EVERYTHING:
                # Of chunks with a vector only: one id that vec0 does not know, and it answers nothing at all.
                nearest = nearest.where(found.c.chunk_id.in_(self._matching(own, user_id, where)))
            matches = ranked(own.execute(nearest))
            if len(matches) < k and where is not EVERYTHING:
                return search_all(Unit(own, user_id), spec, self._chunks, vector, k, where)
            return matches

    def scan(self, batch: int = 1000) -> Iterator[list[ScannedRecord]]:
        found = _vectors(table_name(self._opened()))
        with self._reading(None, "be listed") as connection:
            ids = list(connection.execute(select(found.c.chunk_id)).scalars())
        for some in batches(ids, batch):
            if records := self.fetch(some):
                yield records

    def fetch(self, ids: Sequence[str]) -> list[ScannedRecord]:
        name = table_name(self._opened())
        # One at a time, which vec0 looks up; a list of ids makes it read everything.
        statement = f"SELECT chunk_id, user_id, embedding FROM {name} WHERE chunk_id = ?"
        with self._reading(None, "be read") as connection:
            rows = [connection.exec_driver_sql(statement, (id,)).first() for id in dict.fromkeys(ids)]
            metadata = self._metadata(connection, list(ids))
        return [
            ScannedRecord(row.chunk_id, row.user_id, metadata.get(row.chunk_id), np.frombuffer(row.embedding, "<f4"))
            for row in rows
            if row is not None
        ]

    def count(self, user_id: str | None = None) -> int:
        vectors = _vectors(table_name(self._opened()))
        with self._reading(None, "be counted") as connection:
            return self._counted(connection, vectors, user_id)

    def purge(self) -> None:
        name = table_name(self._opened())
        with self._writing("be removed") as connection:
            connection.exec_driver_sql(f"DROP TABLE IF EXISTS {name}")

    def _prepare(self, connection: Connection) -> None:
        if _LOADED in connection.info:
            return
        require_sqlite_vec(connection.engine)  # a Session's engine need not be the one that the index was made for
        import sqlite_vec

        driver_connection: Any = connection.connection.driver_connection
        driver_connection.enable_load_extension(True)
        try:
            sqlite_vec.load(driver_connection)
        finally:
            driver_connection.enable_load_extension(False)
        connection.info[_LOADED] = True


def _declared(connection: Connection, name: str) -> str | None:
    """The statement that made the table; None where it is absent."""
    statement = text("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name")
    declared: str | None = connection.execute(statement, {"name": name}).scalar_one_or_none()
    return declared


def _vectors(name: str) -> Any:
    return table(
        name,
        column("chunk_id", String),
        column("user_id", String),
        column("embedding", LargeBinary),
        column("distance", Float),
        column("k", Integer),
    )


def _put(connection: Connection, name: str, records: Sequence[tuple[str, str, Vector]]) -> None:
    """Write (chunk id, user id, vector), over what was there."""
    rows = list({id: (id, user_id, np.asarray(vector, "<f4").tobytes()) for id, user_id, vector in records}.values())
    if not rows:
        return
    statement = f"INSERT INTO {name} (chunk_id, user_id, embedding) VALUES (?, ?, ?)"
    try:
        # Nearly all are new, and to delete what is not there takes vec0 half as long as to insert it.
        connection.exec_driver_sql(statement, rows)
    except DBAPIError as exc:
        if "UNIQUE constraint failed" not in str(exc.orig):
            raise
        _delete(connection, name, [id for id, *_ in rows])  # vec0 knows no INSERT OR REPLACE
        connection.exec_driver_sql(statement, rows)


def _delete(connection: Connection, name: str, ids: Sequence[str]) -> None:
    if ids:
        connection.exec_driver_sql(f"DELETE FROM {name} WHERE chunk_id = ?", [(id,) for id in dict.fromkeys(ids)])
