"""Do failures that users of comparable systems met happen here? On every database with every index."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from memvault import F, IndexMismatchError, NewChunk, StorageLayer
from memvault.filters import EVERYTHING, Filter
from tests.conftest import OpenVault
from tests.support import HashingEmbedder, assert_nearest, passes, unit_vectors
from tests.vectors.worlds import NOON

BACKENDS = (
    ("sqlite", "exact"),
    ("sqlite", "chroma"),
    ("sqlite", "chroma-server"),
    ("sqlite", "sqlite-vec"),
    ("postgres", "exact"),
    ("postgres", "chroma-server"),
    ("postgres", "pgvector"),
)

DIMENSION = 16
TYPES = ("episodic", "semantic", "working")

FILTERS: dict[str, Filter] = {
    "none": EVERYTHING,
    "one": F.memory_type == "semantic",
    "two": (F.memory_type == "semantic") & (F.importance > 0.5),
    "three": (F.memory_type == "semantic") & (F.importance > 0.2) & (F.session_id == "sess_1"),
    "range": F.importance.between(0.3, 0.6),
    "times": (F.created_at >= NOON + timedelta(hours=20)) & (F.created_at < NOON + timedelta(hours=90)),
    "list of types": F.memory_type.in_(["episodic", "working"]),
    "long list": F.id.in_([f"mem_{number:03}" for number in range(0, 5000, 3)]),
    "negation": ~((F.memory_type == "semantic") | (F.session_id == "sess_0")),
    "not in the index": (F.token_count > 2) & (F.memory_type != "working"),
}

ODD_METADATA: list[dict[str, Any]] = [
    {"a": None, "b": [], "c": {"d": 1}, "e": "ü"},
    {"user_id": "user_bob", "session_id": "other", "chroma_id": "x", "created_us": 7},
    {"": "", "$eq": 1, "a.b": {"$gt": [1, {"x": None}]}, "deep": {"deep": {"deep": [[[]]]}}},
    {"big": 2**63 - 1, "small": 5e-324, "bool": True, "one": 1, "float": 1.0, "negative": -0.0},
    {"emoji": "🙂", "quote": "'\"\\", "line": "a\nb", "zero width": "\u200b"},
]


@pytest.fixture
def vault(open_vault: OpenVault, index_name: str) -> StorageLayer:
    """A vault without an embedder in which the index, where there is one, answers every search."""
    return open_vault(embedder="none", exact_limit=20_000 if index_name == "exact" else 0)


def varied(count: int, seed: int) -> dict[str, NewChunk]:
    rng = np.random.default_rng(seed)
    return {
        f"mem_{number:03}": NewChunk(
            " ".join(["word"] * (1 + number % 7)),
            id=f"mem_{number:03}",
            session_id=f"sess_{number % 3}",
            memory_type=TYPES[number % 3 if number % 5 else 1],
            importance=float(np.round(rng.random(), 3)),
            embedding=vector,
            created_at=NOON + timedelta(hours=number),
        )
        for number, vector in enumerate(unit_vectors(count, DIMENSION, seed))
    }


def test_filters_give_the_same_answer_everywhere(vault: StorageLayer) -> None:
    alice = vault.for_user("user_alice")
    for number in range(3):
        alice.sessions.start(id=f"sess_{number}")
    chunks = varied(150, seed=1)
    stored = {chunk.id: chunk for chunk in alice.chunks.add_many(chunks.values())}
    vault.for_user("user_bob").chunks.add_many(
        NewChunk("his", embedding=vector) for vector in unit_vectors(50, DIMENSION, 2)
    )
    query = unit_vectors(1, DIMENSION, 3)[0]
    for name, where in FILTERS.items():
        passing: dict[str, Any] = {
            id: chunks[id].embedding for id, chunk in stored.items() if passes(where, chunk.model_dump())
        }
        assert passing, name
        for k in (1, 10, 1000):
            assert_nearest(alice.search(embedding=query, where=where, k=k), passing, query, k)
        assert alice.chunks.count(where) == len(passing)


@pytest.mark.parametrize("metadata", ODD_METADATA, ids=["null", "reserved", "operators", "numbers", "texts"])
def test_metadata_comes_back_equal_and_breaks_no_index(vault: StorageLayer, metadata: dict[str, Any]) -> None:
    alice = vault.for_user("user_alice")
    chunk = alice.chunks.add("text", metadata=metadata, embedding=[1.0, 0.0])
    for found in (chunk, alice.chunks.get(chunk.id), alice.search(embedding=[1.0, 0.1])[0].chunk):
        assert found is not None
        assert found.metadata == metadata
        assert {key: type(value) for key, value in found.metadata.items()} == {
            key: type(value) for key, value in metadata.items()
        }
    assert alice.chunks.update(chunk.id, metadata={"new": 1}).metadata == {"new": 1}
    assert alice.search(embedding=[1.0, 0.1])[0].chunk.metadata == {"new": 1}
    assert vault.for_user("user_bob").search(embedding=[1.0, 0.1]) == []
    assert vault.health()["debts"] == 0


def test_many_chunks_at_once_and_40_000_ids(bare_storage: StorageLayer, database_name: str, index_name: str) -> None:
    # Chroma takes 5,461 records at once, and half a millisecond for each; pgvector's graph takes more.
    quick = database_name == "sqlite"
    count = {"exact": 20_000 if quick else 6_000, "sqlite-vec": 20_000, "chroma": 6_000}.get(index_name, 3_000)
    alice = bare_storage.for_user("user_alice")
    vectors = np.random.default_rng(7).normal(size=(count, DIMENSION)).astype(np.float32)
    stored = alice.chunks.add_many(
        NewChunk(f"text {number}", id=f"id {number:05}", embedding=vector) for number, vector in enumerate(vectors)
    )
    assert len(stored) == alice.chunks.count() == count
    assert alice.sessions.list().items[0].memory_count == count
    ids = [f"id {number:05}" for number in range(40_000)]
    assert alice.chunks.get_many(ids) == stored
    assert len(alice.chunks.list(F.id.in_(ids[:10_000]), limit=20_000).items) == min(count, 10_000)
    assert [hit.chunk.id for hit in alice.search(embedding=vectors[7], k=1)] == ["id 00007"]
    assert bare_storage.stats()["index_records"] == count
    assert alice.chunks.delete_many(ids) == count
    assert bare_storage.stats()["index_records"] == 0


def test_a_user_with_30_of_very_many_finds_exactly_those(vault: StorageLayer) -> None:
    few = {f"few {number:02}": vector for number, vector in enumerate(unit_vectors(30, DIMENSION, 4))}
    vault.for_user("user_few").chunks.add_many(NewChunk("few", id=id, embedding=v) for id, v in few.items())
    vault.for_user("user_many").chunks.add_many(
        NewChunk("many", embedding=vector) for vector in unit_vectors(1500, DIMENSION, 5)
    )
    for seed in range(3):
        query = unit_vectors(1, DIMENSION, 10 + seed)[0]
        assert_nearest(vault.for_user("user_few").search(embedding=query, k=50), few, query, 50)


def test_another_model_or_dimension_is_refused_at_opening(open_vault: OpenVault, vectors: str) -> None:
    with open_vault() as layer:
        layer.for_user("user_alice").chunks.add("likes tea")
    for other in (HashingEmbedder("tests/another"), HashingEmbedder(dimension=32), "static", "none"):
        with pytest.raises(IndexMismatchError, match="memvault reindex --embedder"):
            open_vault(embedder=other)
    with pytest.raises(IndexMismatchError, match="memvault reindex --vectors"):
        open_vault(vectors="exact" if vectors != "exact" else "chroma:///tmp/elsewhere")
    assert open_vault().for_user("user_alice").search("tea")[0].chunk.content == "likes tea"


def test_a_content_of_one_mebibyte(open_vault: OpenVault, index_name: str) -> None:
    layer = open_vault(exact_limit=20_000 if index_name == "exact" else 0)
    alice = layer.for_user("user_alice")
    rng = np.random.default_rng(1)  # nothing that a database could compress
    longest = "".join(map(chr, rng.integers(0x4E00, 0x9FA5, 2**20 // 3))) + "x"
    assert len(longest.encode()) == 2**20
    chunk = alice.chunks.add(longest)
    other = alice.chunks.add(longest[::-1])
    assert alice.chunks.get(chunk.id) == chunk
    assert [found.content == longest for found in alice.chunks.get_many([chunk.id, other.id])] == [True, False]
    alice.chunks.update(chunk.id, content="short")
    assert alice.search("short", k=1)[0].chunk.id == chunk.id
    assert layer.health()["debts"] == 0
