"""How long does adding memories take, beside raw chromadb with the same documents?

    python benchmarks/ingest.py [--chunks 20000] [--users 20] [--dimension 256] [--batch 1000] [--rounds 3]

Each way runs in a process of its own, in turn, with the same texts, vectors and metadata, in calls of the same size:

* chromadb: one collection, `upsert` of ids, vectors, documents and the seven keys, as `ChromaIndex` lays them out;
* memvault: `add_many` with vectors given, on embedded Chroma, `indexing="inline"`, until each is paid: SQL, vectors,
  debts, and Chroma in its child process;
* exact: the same without an index, to show what SQL alone takes.

Prints the median time of each, the ratios within each round, of time and of CPU time (which a noisy machine disturbs
less), peak memory, and the recall@10 of searches afterwards.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

WAYS = ("chromadb", "memvault", "exact")
SUBJECTS = ("the train", "her sister", "the budget", "a recipe", "the garden", "his thesis", "the dentist", "a concert")
VERBS = ("asked about", "postponed", "was happy with", "forgot", "decided on", "worried about", "recommended", "booked")
START = datetime(2026, 1, 1, tzinfo=UTC)


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(1)
    picks = rng.integers(0, 8, size=(count, 4))
    return [
        f"On day {place % 300} the user {VERBS[a]} {SUBJECTS[b]} and {VERBS[c]} {SUBJECTS[d]}, note {place}"
        for place, (a, b, c, d) in enumerate(picks.tolist())
    ]


def vectors(count: int, dimension: int) -> NDArray[np.float32]:
    matrix = np.random.default_rng(2).standard_normal((count, dimension))
    unit: NDArray[np.float32] = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)
    return unit


def run_chromadb(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    import chromadb
    from chromadb.config import Settings

    contents, matrix = texts(args.chunks), vectors(args.chunks, args.dimension)
    client = chromadb.PersistentClient(folder / "chroma", settings=Settings(anonymized_telemetry=False))
    collection = client.create_collection(
        "benchmark", configuration={"hnsw": {"space": "cosine"}}, embedding_function=None
    )
    began, cpu_began = time.perf_counter(), time.process_time()
    for first in range(0, args.chunks, args.batch):
        places = range(first, min(first + args.batch, args.chunks))
        times = [START + timedelta(seconds=place) for place in places]
        collection.upsert(
            ids=[f"mem_{place:012x}" for place in places],
            embeddings=matrix[places.start : places.stop],
            documents=contents[places.start : places.stop],
            metadatas=[
                {
                    "user_id": f"user_{place // args.batch % args.users}",
                    "session_id": "sess_00000000",
                    "memory_type": "episodic",
                    "importance": 0.5,
                    "compressed": False,
                    "created_at": when.isoformat(),
                    "created_us": int(when.timestamp() * 1_000_000),
                }
                for place, when in zip(places, times, strict=True)
            ],
        )
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return {"seconds": seconds, "cpu": cpu, "records": collection.count(), "recall": None}


def run_memvault(folder: Path, args: argparse.Namespace, index: str) -> dict[str, Any]:
    from memvault import NewChunk, StorageLayer

    contents, matrix = texts(args.chunks), vectors(args.chunks, args.dimension)
    with StorageLayer.open(
        f"sqlite:///{folder}/vault.db", vectors=index, embedder="none", exact_limit=0, index_wait=600.0
    ) as storage:
        # On neither side is the import of chromadb, which takes a second, among what is measured.
        storage.create_index(args.dimension)
        owners: dict[str, list[int]] = {}
        began, cpu_began = time.perf_counter(), time.process_time() + _children()["cpu"]
        for first in range(0, args.chunks, args.batch):
            places = range(first, min(first + args.batch, args.chunks))
            user_id = f"user_{first // args.batch % args.users}"
            owners.setdefault(user_id, []).extend(places)
            storage.for_user(user_id).chunks.add_many(
                [
                    NewChunk(
                        contents[place],
                        id=f"mem_{place:012x}",
                        embedding=matrix[place],
                        created_at=START + timedelta(seconds=place),
                    )
                    for place in places
                ]
            )
        seconds = time.perf_counter() - began
        children = _children()
        cpu = time.process_time() + children["cpu"] - cpu_began
        assert storage.health()["debts"] == 0
        stats = storage.stats()
        assert stats["rows"]["memory_chunks"] == args.chunks
        recall = statistics.mean(
            _recall(storage, user_id, places, matrix, query)
            for query, (user_id, places) in enumerate(sorted(owners.items())[:20])
        )
    return {
        "seconds": seconds,
        "cpu": cpu,
        "records": stats["index_records"],
        "recall": recall,
        "children_mb": children["mb"],
    }


def _children() -> dict[str, float]:
    """CPU time and memory of Chroma's process."""
    children = psutil.Process().children()
    times = [child.cpu_times() for child in children]
    return {
        "cpu": sum(one.user + one.system for one in times),
        "mb": sum(child.memory_info().rss for child in children) / 2**20,
    }


def _recall(storage: Any, user_id: str, places: list[int], matrix: NDArray[np.float32], seed: int) -> float:
    query = np.random.default_rng(100 + seed).standard_normal(matrix.shape[1])
    best = sorted(places, key=lambda place: -float(matrix[place] @ query))[:10]
    found = {hit.chunk.id for hit in storage.for_user(user_id).search(embedding=query, k=10)}
    return len(found & {f"mem_{place:012x}" for place in best}) / len(best)


def one(way: str, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if way == "chromadb":
            result = run_chromadb(Path(folder), args)
        else:
            result = run_memvault(Path(folder), args, "chroma" if way == "memvault" else "exact")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**result, "peak_mb": peak + result.get("children_mb", 0)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=20_000)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        one(args.way, args)
        return

    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for round_ in range(args.rounds):
        for way in WAYS if round_ % 2 == 0 else reversed(WAYS):
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results[way].append(json.loads(output.splitlines()[-1]))

    packages = ", ".join(f"{name} {version(name)}" for name in ("memvault", "chromadb", "SQLAlchemy", "numpy"))
    print(f"{args.chunks:,} chunks of {args.users} users, {args.dimension} dimensions, {args.batch:,} a call, "
          f"{args.rounds} rounds; Python {platform.python_version()}, {packages}")  # fmt: skip
    print("| | seconds (median) | chunks/s | of chromadb's: time, median (each round) | CPU time | memory | recall |")
    print("|---|---|---|---|---|---|---|")
    for way in WAYS:
        seconds = statistics.median(result["seconds"] for result in results[way])
        ratios, cpu_ratios = (
            [result[kind] / raw[kind] for result, raw in zip(results[way], results["chromadb"], strict=True)]
            for kind in ("seconds", "cpu")
        )
        recall = results[way][0]["recall"]
        peak = max(result["peak_mb"] for result in results[way])
        print(
            f"| {way} | {seconds:.1f} | {args.chunks / seconds:,.0f} | {statistics.median(ratios):.2f} "
            f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}) | {statistics.median(cpu_ratios):.2f} "
            f"| {peak:.0f} MB | {'' if recall is None else f'{recall:.3f}'} |"
        )


if __name__ == "__main__":
    main()
