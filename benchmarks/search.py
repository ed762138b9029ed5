"""What does a search cost, beside the designs that are copied everywhere? And what does a write that is acknowledged?

    pip install -e '.[bench]'
    python benchmarks/search.py [--quick] [--sizes 20000/20 100000/100 100000/1000] [--rounds 5]

Every way has the same data: clustered unit vectors of dimension 256, given with each text and each query; k = 10, and
what is found comes with its text and metadata. Each runs in a process of its own; they are built one after the other,
and then measured in turn, a round each, so that the machine's noise meets all of them. See `search_ways` for what they
do. Of 1,000 users, what is owed to an index is not waited for, nor paid meanwhile: it has no part in the answer.

Prints p50 and p95 of warm searches, the median of users' first searches in a process that has just opened the store,
recall@10, acknowledged writes a second, ratios to raw Chroma and to LangGraph's SqliteStore, and which targets are met.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

WAYS: dict[str, tuple[int, ...]] = {
    # Up to how many chunks each is built: what takes a millisecond and more for each is not built for 100,000.
    "numpy": (20_000, 100_000),
    "raw chroma": (20_000, 100_000),
    "sqlitestore": (20_000, 100_000),
    "memvault chroma": (20_000, 100_000),
    "memvault exact": (20_000, 100_000),
    "memvault sqlite-vec": (20_000, 100_000),
    "memvault chroma server": (20_000,),
    "memvault postgres exact": (20_000,),
    "memvault postgres pgvector": (20_000,),
}
DEFAULT = "memvault chroma"


class Worker:
    """A way in a process of its own, which is told what to measure and answers in JSON."""

    def __init__(self, way: str, chunks: int, users: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.way = way
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "search_ways.py"), way, str(chunks), str(users), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str, *arguments: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.way}: ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


def measure(chunks: int, users: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Each way's figures: seconds, rates, recall."""
    ways = [
        way for way, sizes in WAYS.items() if (args.quick or chunks in sizes) and (not args.only or way in args.only)
    ]
    workers, figures = [], {}
    for way in ways:
        worker = Worker(way, chunks, users)
        built = worker.ask("build", users < 1000)
        if built.get("missing"):
            print(f"  {way}: {built['missing']}")
            worker.close()
            continue
        print(f"  {way}: {built['acknowledged']:,.0f} acknowledged writes/s, followed by {built['paid_after']:.0f} s")
        workers.append(worker)
        figures[way] = dict(built)
    rounds: dict[str, list[dict[str, float]]] = {worker.way: [] for worker in workers}
    for number in range(args.rounds):
        for worker in workers:
            searches = 30 if worker.way == "raw chroma" else 200
            rounds[worker.way].append(worker.ask("warm", searches, number))
    for worker in workers:
        mine = rounds[worker.way]
        figures[worker.way] |= {name: statistics.median(one[name] for one in mine) for name in ("p50", "p95", "recall")}
        figures[worker.way]["cold"] = worker.ask("cold")["cold"]
    for worker in workers:
        if worker.way == DEFAULT and users < 1000:
            figures[DEFAULT] |= worker.ask("mixed")
        worker.close()
    return figures


def show(chunks: int, users: int, figures: dict[str, dict[str, float]]) -> None:
    print(f"\n{chunks:,} chunks of {users:,} users")
    print(
        "| way | p50 | p95 | a user's first | recall@10 | raw Chroma ÷ | SqliteStore ÷ | acknowledged/s | paid within |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for way, one in figures.items():
        ratios = [
            f"{figures[peer]['p50'] / one['p50']:.1f}" if peer in figures else ""
            for peer in ("raw chroma", "sqlitestore")
        ]
        print(
            f"| {way} | {1e3 * one['p50']:.2f} ms | {1e3 * one['p95']:.2f} ms | {1e3 * one['cold']:.2f} ms | "
            f"{one['recall']:.3f} | {ratios[0]} | {ratios[1]} | {one['acknowledged']:,.0f} | "
            f"{one['paid_after']:.0f} s |"
        )
    if "beside_writer" in figures.get(DEFAULT, {}):
        one = figures[DEFAULT]
        for mode in ("background", "inline"):
            print(f"one write and one search, {mode}: {one[f'pair_{mode}']:.2f} × the write and a search apart")
        print(f"p95 of searches while another thread adds: {one['beside_writer']:.2f} × idle")


def targets(all_figures: dict[tuple[int, int], dict[str, dict[str, float]]]) -> None:
    print("\n| target | measured | |\n|---|---|---|")

    def row(name: str, value: float | None, wanted: float, least: bool) -> None:
        if value is not None:
            met = value >= wanted if least else value <= wanted
            print(f"| {name} {'≥' if least else '≤'} {wanted:g} | {value:.2f} | {'met' if met else 'MISSED'} |")

    def ratio(size: tuple[int, int], name: str, over: str, under: str) -> float | None:
        figures = all_figures.get(size, {})
        return figures[over][name] / figures[under][name] if {over, under} <= figures.keys() else None

    small, large, many = (20_000, 20), (100_000, 100), (100_000, 1000)
    row("raw Chroma ÷ memvault, p50 at 100,000/100", ratio(large, "p50", "raw chroma", DEFAULT), 100, True)
    row("SqliteStore ÷ memvault, p50 at 100,000/100", ratio(large, "p50", "sqlitestore", DEFAULT), 5, True)
    for size in all_figures:
        if DEFAULT in all_figures[size]:
            one, label = all_figures[size][DEFAULT], f"at {size[0]:,}/{size[1]:,}"
            if size != many:
                row(f"a user's first search ÷ a warm one {label}", one["cold"] / one["p50"], 8, False)
            row(f"recall@10 {label}", one["recall"], 1.0, True)
            row(f"write and search, background {label}", one.get("pair_background"), 1.6, False)
            row(f"write and search, inline {label}", one.get("pair_inline"), 1.6, False)
            row(f"p95 beside a writer ÷ idle {label}", one.get("beside_writer"), 4, False)
            row(f"writes, background ÷ raw Chroma {label}", ratio(size, "acknowledged", DEFAULT, "raw chroma"), 8, True)
            over = ratio(size, "acknowledged", "memvault sqlite-vec", "sqlitestore")
            row(f"writes, sqlite-vec inline ÷ SqliteStore {label}", over, 1, True)
    if DEFAULT in all_figures.get(small, {}) and DEFAULT in all_figures.get(large, {}):
        row(
            "p50 at 100,000 ÷ at 20,000",
            all_figures[large][DEFAULT]["p50"] / all_figures[small][DEFAULT]["p50"],
            1.2,
            False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="2,000 chunks, to see that it runs")
    parser.add_argument("--sizes", nargs="+", default=["20000/20", "100000/100", "100000/1000"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=WAYS)
    args = parser.parse_args()
    sizes = ["2000/4"] if args.quick else args.sizes
    names = ("memvault", "chromadb", "langgraph-checkpoint-sqlite", "sqlite-vec", "SQLAlchemy", "numpy", "psycopg")
    print(f"Python {platform.python_version()}, {', '.join(f'{name} {_version(name)}' for name in names)}")
    all_figures = {}
    for size in sizes:
        chunks, users = map(int, size.split("/"))
        print(f"\nbuilding {chunks:,} chunks of {users:,} users", flush=True)
        all_figures[chunks, users] = measure(chunks, users, args)
        show(chunks, users, all_figures[chunks, users])
    targets(all_figures)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()
