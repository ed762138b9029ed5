"""How is a table of pgvector's, in the vault's own PostgreSQL database, its index?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, Double, Select, String, Table, bindparam, cast, select, text

from memvault.database.base import OWNERS
from memvault.database.transactions import Database
from memvault.embedding.base import Vector
from memvault.errors import VectorIndexError
from memvault.filters import EVERYTHING, NOTHING, Filter
from memvault.vectors import pgvector_table as own_table
from memvault.vectors.base import IndexSpec, ScannedRecord, VectorMatch, VectorRecord
from memvault.vectors.within import InDatabase, ranked, table_name

EXACT_LIMIT = 20_000
"""Up to so many vectors a user's are all compared: the graph is everybody's, and finds few of one user's."""

EF_SEARCH, MAX_SCAN_TUPLES = 400, 200_000
"""Candidates that a search of the graph keeps, and how many it may visit before it is given up for a comparison with
all of the user's. pgvector's defaults are 40 and 20,000. Of the ten nearest of a tenant of 1 % of 100,000 random
vectors the graph alone finds .98 (with 200 candidates .96, with 100 .94, in no less time)."""

_SETTINGS = text(
    "SELECT set_config('hnsw.iterative_scan', 'strict_order', true), set_config('hnsw.ef_search', :candidates, true), "
    "set_config('hnsw.max_scan_tuples', :visits, true)"
)


_PLANNED_ANEW = text("SELECT set_config('plan_cache_mode', 'force_custom_plan', true)")
"""A statement that was asked some ten times gets a plan for any user, which reads everybody's rows: 60 ms for 10."""


class PgVectorIndex(InDatabase):
    """All of a user's vectors compared, found by a B-tree; above `EXACT_LIMIT` of them, HNSW in iterative scans.

    HNSW takes at most 2,000 dimensions; of more, every search compares all of the user's.
    """

    location = "pgvector"
    transactional = True

    def __init__(self, database: Database, chunks: Table, *, exact_limit: int = EXACT_LIMIT) -> None:
        super().__init__(database, chunks)
        self._exact_limit = exact_limit
        self._extension: str | None = None

    def open(self, spec: IndexSpec) -> bool:
        with self._reading(None, "be opened") as connection:
            dimension = own_table.dimension(connection, table_name(spec))
            metrics = own_table.metrics(connection, table_name(spec))
        if dimension is not None:
            self._require_own(table_name(spec), dimension != own_table.FOREIGN)
            self._require(spec, "dimension", dimension, spec.dimension)
        for metric in metrics:
            self._require(spec, "the metric", metric, own_table.METRIC)
        self._spec = spec
        return dimension is not None

    def exists(self, connection: Connection) -> bool:
        return own_table.exists(connection, table_name(self._opened()))

    def create(self) -> None:
        spec = self._opened()
        with self._writing("be created") as connection:
            own_table.keep_writers_out(connection)
            if own_table.exists(connection, table_name(spec)):
                return
            own_table.require_extension(connection)
            extension = self._found_extension(connection)
            own_table.create(connection, table_name(spec), spec.dimension, extension)
            for records in own_table.held(connection, spec.model):
                self._put(connection, spec, records)
            own_table.create_indexes(connection, table_name(spec), spec.dimension, extension)

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        if not records:
            return
        spec = self._opened()
        unique = {record.id: record for record in records}
        with self._writing("be written") as own:
            self._put(own, spec, [(record.id, record.metadata.user_id, record.vector) for record in unique.values()])

    def delete(self, ids: Sequence[str]) -> None:
        if not ids:
            return
        spec = self._opened()
        with self._writing("be deleted from") as own:
            self._delete(own, spec, ids)

    def follow(self, connection: Connection, user_id: str, vectors: Mapping[str, Vector | None]) -> None:
        spec = self._opened()
        self._delete(connection, spec, [id for id, vector in vectors.items() if vector is None])
        self._put(connection, spec, [(id, user_id, vector) for id, vector in vectors.items() if vector is not None])

    def query(
        self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING, connection: Connection | None = None
    ) -> list[VectorMatch]:
        spec = self._opened()
        if where is NOTHING:
            return []
        # Within a savepoint that is rolled back: neither settings nor an error reach the caller's transaction.
        with self._reading(connection, "be searched") as own, own.begin_nested() as savepoint:
            own.execute(_PLANNED_ANEW)
            rows: Sequence[Any] = []
            if self._by_graph(own, spec, user_id):
                settings = {"candidates": str(min(1000, max(EF_SEARCH, k))), "visits": str(MAX_SCAN_TUPLES)}
                own.execute(_SETTINGS, settings)
                rows = own.execute(self._nearest(own, spec, user_id, vector, k, where, exactly=False)).all()
            if len(rows) < k:
                rows = own.execute(self._nearest(own, spec, user_id, vector, k, where, exactly=True)).all()
            savepoint.rollback()
        return ranked(rows)

    def scan(self, batch: int = 1000) -> Iterator[list[ScannedRecord]]:
        name = table_name(self._opened())
        last = ""
        while True:
            with self._reading(None, "be read") as connection:
                page = text(
                    f"SELECT chunk_id, user_id, embedding::real[] FROM {own_table.place_of(connection, name)} "
                    "WHERE chunk_id > :last ORDER BY chunk_id LIMIT :batch"
                )
                records = self._scanned(connection, connection.execute(page, {"last": last, "batch": batch}).all())
            if not records:
                return
            yield records
            last = records[-1].id

    def fetch(self, ids: Sequence[str]) -> list[ScannedRecord]:
        name = table_name(self._opened())
        with self._reading(None, "be read") as connection:
            named = text(
                f"SELECT chunk_id, user_id, embedding::real[] FROM {own_table.place_of(connection, name)} "
                "WHERE chunk_id = ANY(:ids)"
            )
            return self._scanned(connection, connection.execute(named, {"ids": list(ids)}).all())

    def _scanned(self, connection: Connection, rows: Sequence[Any]) -> list[ScannedRecord]:
        metadata = self._metadata(connection, [row.chunk_id for row in rows])
        return [
            ScannedRecord(id, user_id, metadata.get(id), np.array(embedding, np.float32))
            for id, user_id, embedding in rows
        ]

    def count(self, user_id: str | None = None) -> int:
        name = table_name(self._opened())
        with self._reading(None, "be counted") as connection:
            return self._counted(connection, own_table.declared(name, self._found_extension(connection)), user_id)

    def purge(self) -> None:
        name = table_name(self._opened())
        with self._writing("be removed") as connection:
            connection.execute(text(f"DROP TABLE IF EXISTS {own_table.place_of(connection, name)}"))

    def _by_graph(self, connection: Connection, spec: IndexSpec, user_id: str) -> bool:
        if spec.dimension > own_table.MAX_HNSW_DIMENSION:
            return False
        count = select(OWNERS.c.vector_count).where(OWNERS.c.user_id == user_id)
        return (connection.execute(count).scalar_one_or_none() or 0) > self._exact_limit

    def _nearest(
        self,
        connection: Connection,
        spec: IndexSpec,
        user_id: str,
        vector: Vector,
        k: int,
        where: Filter,
        *,
        exactly: bool,
    ) -> Select[Any]:
        extension = self._found_extension(connection)
        vectors = own_table.declared(table_name(spec), extension)
        wanted = cast(bindparam("vector", own_table.written(vector), String), vectors.c.embedding.type)
        distance: ColumnElement[float] = vectors.c.embedding.op(f"OPERATOR({extension}.<=>)", return_type=Double())(
            wanted
        )
        statement = select(vectors.c.chunk_id, distance.label("distance")).where(vectors.c.user_id == user_id)
        if where is not EVERYTHING:
            own_row = self._matching(connection, user_id, where, vectors.c.chunk_id).scalar_subquery()
            statement = statement.where(own_row == vectors.c.chunk_id)
        if exactly:  # the graph is in the order of the distance, not of a sum
            return statement.order_by(distance + 0.0, vectors.c.chunk_id).limit(k)
        return statement.order_by(distance).limit(k)

    def _put(self, connection: Connection, spec: IndexSpec, rows: Sequence[tuple[str, str, Vector]]) -> None:
        """Write (chunk id, user id, vector), each id once, over what was there."""
        if not rows:
            return
        extension = self._found_extension(connection)
        statement = text(
            f"INSERT INTO {own_table.place_of(connection, table_name(spec))} (chunk_id, user_id, embedding) "
            f"VALUES (:id, :owner, CAST(:vector AS {own_table.in_text(extension)}.vector)) "
            "ON CONFLICT (chunk_id) DO UPDATE SET user_id = excluded.user_id, embedding = excluded.embedding"
        )
        connection.execute(
            statement,
            [{"id": id, "owner": user_id, "vector": own_table.written(vector)} for id, user_id, vector in rows],
        )

    def _delete(self, connection: Connection, spec: IndexSpec, ids: Sequence[str]) -> None:
        if ids:
            place = own_table.place_of(connection, table_name(spec))
            connection.execute(text(f"DELETE FROM {place} WHERE chunk_id = ANY(:ids)"), {"ids": list(ids)})

    def _found_extension(self, connection: Connection) -> str:
        """The schema that pgvector is installed in, quoted: it need not be on anybody's search path."""
        if self._extension is None:
            self._extension = own_table.extension_schema(connection)
        if self._extension is None:
            raise VectorIndexError(f"the database has lost its extension: {own_table.advice(connection)}")
        return self._extension
