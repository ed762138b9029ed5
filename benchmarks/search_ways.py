"""How does each way keep and find memories? A process of one way, told by its standard input what to measure.

* numpy: a matrix for each user and a list of texts, in memory: nothing can be faster that compares all of them;
* raw chroma: one persistent collection for everybody, filtered by user_id, with documents and the six keys;
* sqlitestore: LangGraph's SqliteStore, a namespace for each user, its vector search with the vectors given;
* memvault …: `StorageLayer` on one of its indexes, with its defaults; on Chroma, with `indexing="background"`.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what starts the servers, among the tests

DIMENSION = 256
BATCH = 1000
K = 10
Vectors = NDArray[np.float32]


def clustered(count: int, seed: int) -> Vectors:
    """Unit vectors around some hundred directions, as texts about the same few things have."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((200, DIMENSION))
    matrix = centres[rng.integers(0, 200, count)] + rng.standard_normal((count, DIMENSION))
    unit: Vectors = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)
    return unit


def text_of(place: int) -> str:
    return f"On day {place % 300} the user asked about the {place % 97}th of her {place % 13} plans, note {place}"


class Way(ABC):
    """``vectors`` of all chunks; chunk ``place`` is of user ``place % users``."""

    def __init__(self, chunks: int, users: int, folder: Path) -> None:
        self.chunks, self.users, self.folder = chunks, users, folder
        self.vectors = clustered(chunks, 1)

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def add(self, user: int, places: list[int]) -> None: ...

    @abstractmethod
    def search(self, user: int, vector: Vectors) -> list[str]:
        """The texts found, best first; everything else that was stored has been read, too."""

    def settle(self) -> None:
        """Wait until the index has followed."""
        return

    def close(self) -> None:
        """Let go of files and connections."""
        return

    def withhold(self) -> None:
        """Have nothing paid from now on."""
        return

    def build(self, settles: bool = True) -> dict[str, float]:
        began = time.perf_counter()
        of_user = [list(range(user, self.chunks, self.users)) for user in range(self.users)]
        size = min(BATCH, len(of_user[0]))
        for first in range(0, len(of_user[0]), size):
            for user, places in enumerate(of_user):
                self.add(user, places[first : first + size])
        acknowledged = time.perf_counter() - began
        if settles:
            self.settle()
        else:
            self.withhold()
        return {
            "acknowledged": self.chunks / acknowledged,
            "paid_after": time.perf_counter() - began - acknowledged,
        }

    def warm(self, searches: int, seed: int) -> dict[str, float]:
        queries = clustered(searches, 100 + seed)
        picks = np.random.default_rng(seed).integers(0, min(self.users, 100), searches).tolist()
        for user in range(min(self.users, 100)):  # once, so that what is kept is kept
            if seed == 0:
                self.search(user, queries[0])
        times, answers = [], []
        for user, query in zip(picks, queries, strict=True):
            began = time.perf_counter()
            answers.append(self.search(user, query))
            times.append(time.perf_counter() - began)
        # Afterwards: to compare with all vectors between two searches would empty the processor's caches before each.
        recalls = [self.recall(*one) for one in zip(picks, queries, answers, strict=True)]
        return {**quantiles(times), "recall": statistics.mean(recalls)}

    def recall(self, user: int, query: Vectors, found: list[str]) -> float:
        mine = self.vectors[user :: self.users]
        best = np.argsort(-(mine @ query), kind="stable")[:K] * self.users + user
        return len({text_of(place) for place in best.tolist()} & set(found)) / len(best)

    def cold(self) -> dict[str, float]:
        self.close()
        self.open()
        self.search(0, self.vectors[0])  # what is imported or connected at first use is not the user's
        times = []
        for user in range(1, min(self.users, 60)):
            began = time.perf_counter()
            self.search(user, self.vectors[user])
            times.append(time.perf_counter() - began)
        return {"cold": statistics.median(times)}


class Numpy(Way):
    """The floor."""

    def open(self) -> None:
        self.matrices = [self.vectors[user :: self.users] for user in range(self.users)]

    def add(self, user: int, places: list[int]) -> None: ...

    def search(self, user: int, vector: Vectors) -> list[str]:
        scores = self.matrices[user] @ vector
        best = np.argpartition(scores, -K)[-K:]
        best = best[np.argsort(-scores[best])]
        return [text_of(place * self.users + user) for place in best.tolist()]


class RawChroma(Way):
    """As most hosts of agents lay out their memories."""

    def open(self) -> None:
        import chromadb
        from chromadb.config import Settings

        self.client: Any = chromadb.PersistentClient(self.folder / "raw", settings=Settings(anonymized_telemetry=False))
        self.collection = self.client.get_or_create_collection(
            "memories", configuration={"hnsw": {"space": "cosine"}}, embedding_function=None
        )

    def add(self, user: int, places: list[int]) -> None:
        now = datetime.now(UTC).isoformat()
        self.collection.upsert(
            ids=[f"mem_{place:012x}" for place in places],
            embeddings=self.vectors[places],
            documents=[text_of(place) for place in places],
            metadatas=[
                {
                    "user_id": f"user_{user}",
                    "session_id": "sess_00000000",
                    "memory_type": "episodic",
                    "importance": 0.5,
                    "compressed": False,
                    "created_at": now,
                }
                for _ in places
            ],
        )

    def search(self, user: int, vector: Vectors) -> list[str]:
        answer = self.collection.query(
            query_embeddings=vector[np.newaxis],
            n_results=K,
            where={"user_id": f"user_{user}"},
            include=["documents", "metadatas", "distances"],
        )
        assert answer["documents"] is not None
        return list(answer["documents"][0])

    def close(self) -> None:
        self.client.close()


class SqliteStore(Way):
    """LangGraph's."""

    def open(self) -> None:
        from memvault.database.engine import sqlite_driver

        driver = sqlite_driver()  # one that can load sqlite-vec, which the store takes from the standard library
        sys.modules["sqlite3"] = driver
        from langgraph.store.sqlite import SqliteStore as Store

        self.asked: dict[str, list[float]] = {}
        connection = driver.connect(str(self.folder / "store.db"), check_same_thread=False, isolation_level=None)
        self.store = Store(connection, index={"dims": DIMENSION, "embed": self._embed, "text_fields": ["text"]})
        self.store.setup()

    def _embed(self, texts: Any) -> list[list[float]]:
        return [self.asked[text] for text in texts]

    def add(self, user: int, places: list[int]) -> None:
        from langgraph.store.base import PutOp

        self.asked = {text_of(place): self.vectors[place].tolist() for place in places}
        value = {"memory_type": "episodic", "importance": 0.5, "session_id": "sess_00000000"}
        self.store.batch(
            [PutOp(("memories", f"user_{user}"), f"mem_{p:012x}", {**value, "text": text_of(p)}) for p in places]
        )

    def search(self, user: int, vector: Vectors) -> list[str]:
        self.asked = {"the query": vector.tolist()}
        found = self.store.search(("memories", f"user_{user}"), query="the query", limit=K)
        return [item.value["text"] for item in found]

    def close(self) -> None:
        self.store.conn.close()


class Memvault(Way):
    """`StorageLayer` on SQLite, on the exact index."""

    vectors_option = "exact"
    indexing: Any = "inline"

    def url(self) -> str:
        return f"sqlite:///{self.folder}/vault.db"

    def open(self) -> None:
        from memvault import StorageLayer

        self.storage = StorageLayer.open(
            self.url(), vectors=self.vectors_option, embedder="none", indexing=self.indexing, schema="upgrade"
        )

    def add(self, user: int, places: list[int]) -> None:
        from memvault import NewChunk

        self.storage.for_user(f"user_{user}").chunks.add_many(
            [NewChunk(text_of(place), embedding=self.vectors[place]) for place in places]
        )

    def search(self, user: int, vector: Vectors) -> list[str]:
        return [hit.chunk.content for hit in self.storage.for_user(f"user_{user}").search(embedding=vector, k=K)]

    def settle(self) -> None:
        self.storage.sync()
        while self.storage.health()["debts"]:
            time.sleep(0.05)

    def close(self) -> None:
        self.storage.close()

    def withhold(self) -> None:
        self.close()
        self.indexing = "manual"
        self.open()

    def mixed(self) -> dict[str, float]:
        """Writes and searches together, over what each takes apart."""
        answer: dict[str, float] = {}
        fresh = clustered(2000, 9)
        for mode in ("background", "inline"):
            self.close()
            self.indexing = mode
            self.open()
            alice, bob = self.storage.for_user("user_0"), self.storage.for_user("user_1")
            alice.search(embedding=fresh[0], k=K)
            pairs, writes, searches = [], [], []
            for vector in fresh[:150]:
                writes.append(timed(bob.chunks.add, "apart", embedding=vector))
                pair = timed(alice.chunks.add, "a pair", embedding=vector)
                pairs.append(pair + timed(alice.search, embedding=vector, k=K))
                searches.append(timed(alice.search, embedding=vector, k=K))
            apart = statistics.median(writes) + statistics.median(searches)
            answer[f"pair_{mode}"] = statistics.median(pairs) / apart
        self.settle()
        answer["beside_writer"] = self._beside_writer()
        return answer

    def _beside_writer(self) -> float:
        fresh = clustered(4000, 11)
        stop = threading.Event()

        def write() -> None:
            carol = self.storage.for_user("user_2")
            for vector in fresh:
                if stop.is_set():
                    return
                carol.chunks.add("continuously", embedding=vector)

        def searched() -> float:
            alice = self.storage.for_user("user_0")
            return quantiles([timed(alice.search, embedding=vector, k=K) for vector in fresh[:500]])["p95"]

        idle = searched()
        thread = threading.Thread(target=write)
        thread.start()
        busy = searched()
        stop.set()
        thread.join()
        return busy / idle


class OnChroma(Memvault):
    """The default."""

    vectors_option = "chroma"
    indexing = "background"


class OnSqliteVec(Memvault):
    """In the same file."""

    vectors_option = "sqlite-vec"


class OnServer(Memvault):
    """`chroma run`."""

    indexing = "background"

    def open(self) -> None:
        from tests.vectors.chroma_servers import ChromaServer

        if not hasattr(self, "server"):
            self.server = ChromaServer()
        self.vectors_option = self.server.url
        super().open()


class OnPostgres(Memvault):
    """PostgreSQL with the exact index."""

    def url(self) -> str:
        from tests.postgres import postgres18

        if not hasattr(self, "server"):
            self.server = postgres18()
            self.address = self.server.create_database("benchmark")
        return self.address


class OnPgvector(OnPostgres):
    """PostgreSQL with pgvector."""

    vectors_option = "pgvector"


def timed(work: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    began = time.perf_counter()
    work(*arguments, **options)
    return time.perf_counter() - began


def quantiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"p50": statistics.median(ordered), "p95": ordered[int(0.95 * len(ordered))]}


WAYS: dict[str, type[Way]] = {
    "numpy": Numpy,
    "raw chroma": RawChroma,
    "sqlitestore": SqliteStore,
    "memvault chroma": OnChroma,
    "memvault exact": Memvault,
    "memvault sqlite-vec": OnSqliteVec,
    "memvault chroma server": OnServer,
    "memvault postgres exact": OnPostgres,
    "memvault postgres pgvector": OnPgvector,
}


def main() -> None:
    name, chunks, users, folder = sys.argv[1:]
    way = WAYS[name](int(chunks), int(users), Path(folder))
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "build":
            try:
                way.open()
            except ImportError as exc:
                print(json.dumps({"missing": str(exc)}), flush=True)
                continue
        print(json.dumps(getattr(way, command)(*arguments)), flush=True)
    way.close()
    if hasattr(way, "server"):
        way.server.close()


if __name__ == "__main__":
    main()
