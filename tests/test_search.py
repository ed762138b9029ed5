"""What does a search promise: the user's nearest, all of them and nothing else, whoever finds them?"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memvault import ConfigurationError, F, Hit, NewChunk, StorageLayer, UserMemory, ValidationError
from memvault.filters import EVERYTHING, Filter
from memvault.values import MEMORY_TYPES
from tests.conftest import OpenVault
from tests.support import ListIndex, assert_nearest, cosine, eventually, passes, refused, statements, unit_vectors

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
DIMENSION = 8

FILTERS: dict[str, Filter] = {
    "none": EVERYTHING,
    "one": F.memory_type == "semantic",
    "two": (F.memory_type == "semantic") & (F.importance >= 0.5),
    "three": (F.memory_type != "working") & (F.importance < 0.7) & (F.session_id == "sess_1"),
    "range": F.created_at.between(EPOCH + timedelta(hours=20), EPOCH + timedelta(hours=60)),
    "list": F.memory_type.in_(["episodic", "working"]) & ~F.session_id.in_(["sess_0"]),
    "or": (F.importance > 0.9) | (F.memory_type == "working"),
    "not": ~((F.importance > 0.3) & (F.memory_type == "semantic")),
    "sql-only": F.content >= "text 5",
    "sql-and-index": (F.content < "text 3") & (F.importance > 0.2),
    "few": F.token_count == 2,
    "ids": F.id.in_([f"alice {number}" for number in range(0, 200, 7)]),
    "nobody": F.content == "unheard of",
}


class Memories:
    """A user's chunks, as the test knows them."""

    def __init__(self, name: str, count: int, seed: int) -> None:
        self.name = name
        generator = np.random.default_rng(seed)
        self.vectors = {
            f"{name} {number}": vector for number, vector in enumerate(unit_vectors(count, DIMENSION, seed))
        }
        self.new = [
            NewChunk(
                f"text {number}",
                id=id,
                session_id=f"sess_{number % 3}" if name == "alice" else None,
                memory_type=MEMORY_TYPES[number % 3],
                importance=round(float(generator.random()), 3),
                embedding=self.vectors[id],
                created_at=EPOCH + timedelta(hours=number),
            )
            for number, id in enumerate(self.vectors)
        ]

    def store(self, layer: StorageLayer) -> UserMemory:
        user = layer.for_user(self.name)
        if self.name == "alice":
            for number in range(3):
                user.sessions.start(id=f"sess_{number}")
        user.chunks.add_many(self.new)
        return user

    def passing(self, where: Filter) -> dict[str, Any]:
        return {
            new.id: self.vectors[new.id]
            for new in self.new
            if new.id is not None
            and passes(where, {**{name: getattr(new, name) for name in new.__slots__}, "token_count": self.tokens(new)})
        }

    @staticmethod
    def tokens(new: NewChunk) -> int:
        return math.ceil(len(new.content) / 4)


@pytest.fixture
def tier(index_name: str) -> int:
    """The `exact_limit` at which the index answers, wherever there is one."""
    return 20_000 if index_name == "exact" else 0


class TestAgainstBruteForce:
    @pytest.fixture
    def memories(self) -> Memories:
        return Memories("alice", 200, seed=1)

    @pytest.fixture
    def layer(self, open_vault: OpenVault, tier: int, memories: Memories) -> StorageLayer:
        layer = open_vault(embedder="none", exact_limit=tier)
        memories.store(layer)
        Memories("bob", 100, seed=2).store(layer)
        return layer

    def test_under_every_filter(self, layer: StorageLayer, memories: Memories, index_name: str) -> None:
        alice = layer.for_user("alice")
        tiers: set[str] = set()
        for name, where in FILTERS.items():
            passing = memories.passing(where)
            assert (not passing) == (name == "nobody")
            for seed, k in ((11, 1), (12, 10), (13, 50), (14, 1000)):
                query = unit_vectors(1, DIMENSION, seed)[0]
                hits = alice.search(embedding=query, where=where, k=k)
                assert_nearest(hits, passing, query, k)
                tiers |= {hit.explain()["tier"] for hit in hits}
        assert ("index" in tiers) == (index_name != "exact")

    def test_a_user_with_30_of_very_many(self, open_vault: OpenVault, tier: int) -> None:
        layer = open_vault(embedder="none", exact_limit=tier)
        few = Memories("carol", 30, seed=3)
        few.store(layer)
        Memories("bob", 1000, seed=4).store(layer)
        for seed in range(5):
            query = unit_vectors(1, DIMENSION, seed)[0]
            hits = layer.for_user("carol").search(embedding=query, k=50)
            assert {hit.chunk.id for hit in hits} == few.vectors.keys()
            assert_nearest(hits, few.vectors, query, 50)

    def test_chunks_without_a_vector_hide_no_others(self, layer: StorageLayer, memories: Memories) -> None:
        alice = layer.for_user("alice")
        alice.chunks.add("a rule", memory_type="procedural")
        alice.chunks.add("has no vector")
        query = unit_vectors(1, DIMENSION, 20)[0]
        for where in (None, F.importance >= 0, F.content != "elsewhere"):
            found = alice.search(embedding=query, where=where, k=5)
            assert_nearest(found, memories.passing(EVERYTHING), query, 5)

    def test_min_similarity(self, layer: StorageLayer, memories: Memories) -> None:
        alice = layer.for_user("alice")
        query = unit_vectors(1, DIMENSION, 21)[0]
        true = {id: cosine(vector, query) for id, vector in memories.vectors.items()}
        for least in (-1, -0.5, 0.0, 0.35, 0.8, 1):
            near = {id: memories.vectors[id] for id, similarity in true.items() if similarity >= least}
            assert_nearest(alice.search(embedding=query, k=1000, min_similarity=least), near, query, 1000)
            assert_nearest(alice.search(embedding=query, k=5, min_similarity=least), near, query, 5)
            where = FILTERS["two"]
            both = {id: vector for id, vector in memories.passing(where).items() if true[id] >= least}
            assert_nearest(alice.search(embedding=query, k=1000, min_similarity=least, where=where), both, query, 1000)

    def test_only_the_direction_counts(self, layer: StorageLayer) -> None:
        alice = layer.for_user("alice")
        query = unit_vectors(1, DIMENSION, 22)[0]
        expected = [(hit.chunk.id, hit.similarity) for hit in alice.search(embedding=query)]
        for same in (query * 1e-30, query.astype(np.float64) * 1e30, [float(x) for x in query], tuple(query)):
            found = alice.search(embedding=same)
            assert [hit.chunk.id for hit in found] == [id for id, _ in expected]
            assert [hit.similarity for hit in found] == pytest.approx([one for _, one in expected], abs=2e-6)


class TestPromises:
    def test_best_first_with_scores_that_explain_themselves(self, alice: UserMemory) -> None:
        alice.chunks.add_many([NewChunk("green tea"), NewChunk("black tea"), NewChunk("chess")])
        hits = alice.search("green tea")
        assert [hit.chunk.content for hit in hits] == ["green tea", "black tea", "chess"]
        scores = [hit.score for hit in hits]
        assert scores == sorted(scores, reverse=True)
        assert all(0 <= score <= 1 for score in scores)
        assert hits[0].similarity == pytest.approx(1)
        explained = hits[0].explain()
        assert explained["score"] == hits[0].score
        assert explained["similarity"] == hits[0].similarity
        assert explained["tier"] == "exact"
        assert Hit.model_validate_json(hits[0].model_dump_json()).chunk == hits[0].chunk

    def test_hybrid_is_the_default_and_vector_the_same(self, alice: UserMemory) -> None:
        alice.chunks.add_many([NewChunk("green tea"), NewChunk("chess")])
        assert alice.search("tea") == alice.search("tea", mode="hybrid")
        assert [hit.chunk for hit in alice.search("tea", mode="vector")] == [hit.chunk for hit in alice.search("tea")]

    def test_ten_by_default(self, alice: UserMemory) -> None:
        alice.chunks.add_many(NewChunk(f"text {number}") for number in range(15))
        assert len(alice.search("text")) == len(alice.search()) == len(alice.search(embedding=[1.0] * 64)) == 10

    def test_an_embedding_stands_in_for_the_querys_own(self, alice: UserMemory) -> None:
        alice.chunks.add_many([NewChunk("green tea"), NewChunk("chess")])
        vector = alice.embed(["chess"])[0]
        assert alice.search("green tea", embedding=vector, k=1)[0].chunk.content == "chess"
        assert alice.search("?", embedding=vector, k=1)[0].chunk.content == "chess"

    def test_nothing_stored_nothing_found(self, storage: StorageLayer) -> None:
        nobody = storage.for_user("nobody")
        assert nobody.search("tea") == nobody.search() == nobody.search(embedding=[1.0] * 64) == []
        assert list(storage.user_ids()) == []

    def test_without_a_query_the_newest_are_listed(self, alice: UserMemory) -> None:
        chunks = alice.chunks.add_many(NewChunk(f"text {number}", importance=number / 10) for number in range(5))
        rule = alice.chunks.add("rule", memory_type="procedural")
        hits = alice.search()
        assert [hit.chunk for hit in hits] == [rule, *chunks[::-1]]
        assert {(hit.score, hit.similarity) for hit in hits} == {(1.0, None)}
        assert [hit.chunk for hit in alice.search(k=2, where=F.importance < 0.3)] == [chunks[2], chunks[1]]
        assert alice.search(min_similarity=-1) == []  # drops what has no similarity

    @pytest.mark.parametrize(
        "query", ["?!", "…", "--- ***", "()[]{}", "«»", '"', "*", "^", "$ + €", "\u0301", "\u200b."]
    )
    def test_a_query_of_punctuation_finds_nothing(self, alice: UserMemory, query: str) -> None:
        alice.chunks.add("text?! … *")
        assert alice.search(query) == []
        assert alice.search(query, mode="vector") == []

    @pytest.mark.parametrize(
        "query",
        ["@nasa", "pre-edit", "TODO:", "it's", "NEAR(", "col:", "tea AND", "🙂", "ß", "日本", "1", "word " * 10_000],
        ids=lambda query: query[:10],
    )
    def test_any_other_query_is_no_error(self, storage: StorageLayer, query: str) -> None:
        alice = storage.for_user("user_alice")
        chunk = alice.chunks.add(query)
        assert [hit.chunk for hit in alice.search(query, min_similarity=0.99)] == [chunk]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"k": 0}, ("k", "0")),
            ({"k": -1}, ("k", "-1")),
            ({"k": 2.0}, ("k", "2.0")),
            ({"k": True}, ("k", "True")),
            ({"k": None}, ("k", "None")),
            ({"mode": "keyword"}, ("mode", "'keyword'", "vector")),
            ({"mode": "semantic"}, ("mode", "'semantic'", "hybrid")),
            ({"mode": None}, ("mode", "None")),
            ({"min_similarity": 1.01}, ("min_similarity", "1.01")),
            ({"min_similarity": math.nan}, ("min_similarity", "nan")),
            ({"min_similarity": "0.5"}, ("min_similarity", "'0.5'")),
            ({"min_similarity": True}, ("min_similarity", "True")),
            ({"where": {"importance": 1}}, ("where", "importance")),
        ],
    )
    def test_a_bad_argument_is_named_before_any_io(
        self, exact_storage: StorageLayer, alice: UserMemory, options: dict[str, Any], words: tuple[str, ...]
    ) -> None:
        calls: list[Callable[[], object]] = [
            lambda: alice.search("text", **options),
            lambda: alice.search(**options),
            lambda: alice.search(embedding=[1.0] * 64, **options),
        ]
        for call in calls:
            with statements(exact_storage.engine) as sent, pytest.raises(ValidationError) as caught:
                call()
            assert sent == []
            assert all(word in str(caught.value) for word in words)

    def test_ties_keep_their_order(self, open_vault: OpenVault, tier: int) -> None:
        layer = open_vault(embedder="none", exact_limit=tier)
        alice = layer.for_user("alice")
        order = np.random.default_rng(5).permutation(60)
        alice.chunks.add_many(NewChunk("text", id=f"id {number:02}", embedding=[1.0, 2.0, 3.0]) for number in order)
        alice.chunks.add("nearest", id="z", embedding=[1.0, 0.0, 0.0])
        expected = ["z", *(f"id {number:02}" for number in range(60))]
        for k in (61, 100, 61):
            assert [hit.chunk.id for hit in alice.search(embedding=[1.0, 0.0, 0.0], k=k)] == expected
        assert alice.search(embedding=[1.0, 0.0, 0.0], k=61) == alice.search(embedding=[1.0, 0.0, 0.0], k=61)

    def test_ties_at_the_cut_are_broken_by_id(self, open_exact: OpenVault) -> None:
        alice = open_exact(embedder="none").for_user("alice")
        order = np.random.default_rng(6).permutation(60)
        alice.chunks.add_many(NewChunk("text", id=f"id {number:02}", embedding=[1.0, 2.0, 3.0]) for number in order)
        for k in (1, 7, 59):
            ids = [hit.chunk.id for hit in alice.search(embedding=[1.0, 0.0, 0.0], k=k)]
            assert ids == [f"id {number:02}" for number in range(k)]

    def test_k_beyond_the_count_also_beyond_4096(self, open_vault: OpenVault, tier: int) -> None:
        layer = open_vault(embedder="none", exact_limit=tier)
        alice = layer.for_user("alice")
        vectors = {f"id {number}": vector for number, vector in enumerate(unit_vectors(4200, 4, 9))}
        alice.chunks.add_many(NewChunk("text", id=id, embedding=vector) for id, vector in vectors.items())
        query = unit_vectors(1, 4, 10)[0]
        assert_nearest(alice.search(embedding=query, k=5000), vectors, query, 5000)
        assert_nearest(alice.search(embedding=query, k=4097), vectors, query, 4097)
        assert len(alice.search(k=5000)) == 4200

    def test_100_searches_that_find_nothing_leave_no_connection_out(self, open_vault: OpenVault, tier: int) -> None:
        layer = open_vault(exact_limit=tier, engine_options={"pool_size": 5, "max_overflow": 0, "pool_timeout": 1})
        alice = layer.for_user("alice")
        alice.chunks.add("text")
        for number in range(100):
            assert layer.for_user(f"nobody {number}").search("text") == []
            assert alice.search("text", where=F.content == "unheard of") == []
            assert alice.search("text", min_similarity=1.0, where=F.importance > 0.9) == []
            with pytest.raises(ValidationError):
                alice.search("text", k=0)
        assert layer.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


class TestWithoutEmbedder:
    def test_the_first_vector_fixes_the_dimension(self, bare_storage: StorageLayer, open_vault: OpenVault) -> None:
        alice = bare_storage.for_user("user_alice")
        assert bare_storage.stats()["dimension"] is None
        assert alice.search(embedding=[1.0]) == []
        chunk = alice.chunks.add("text", embedding=[1, 0, 0])
        # A handle from before, another user, and a layer that is opened now.
        for layer in (bare_storage, open_vault(embedder="none"), open_vault(embedder=None)):
            for user in (layer.for_user("user_alice"), layer.for_user("user_bob")):
                with refused(layer, ValidationError, "embedding", "dimension", "3", "2"):
                    user.chunks.add("text", embedding=[1, 0])
                with refused(layer, ValidationError, "embedding", "dimension", "3", "2"):
                    user.chunks.add_many([NewChunk("a", embedding=[1, 0, 0]), NewChunk("b", embedding=[1, 0])])
            with refused(layer, ValidationError, "embedding", "dimension", "3", "4"):
                layer.for_user("user_alice").chunks.update(chunk.id, embedding=[1, 0, 0, 0])
            with refused(layer, ValidationError, "embedding", "dimension", "3", "2"):
                layer.for_user("user_alice").search(embedding=[1, 0])
        assert bare_storage.stats()["dimension"] == 3
        assert [hit.chunk for hit in alice.search(embedding=[2, 0, 0])] == [chunk]

    def test_the_first_batch_has_one_dimension(self, bare_storage: StorageLayer) -> None:
        alice = bare_storage.for_user("user_alice")
        with refused(bare_storage, ValidationError, "embedding"):
            alice.chunks.add_many([NewChunk("a", embedding=[1, 0]), NewChunk("b", embedding=[1, 0, 0])])
        alice.chunks.add("text", embedding=[1, 0, 0])  # the refused batch fixed nothing

    @pytest.mark.parametrize("mode", ["hybrid", "vector"])
    def test_a_text_cannot_be_embedded(self, bare_storage: StorageLayer, mode: str) -> None:
        alice = bare_storage.for_user("user_alice")
        alice.chunks.add("text", embedding=[1, 0])
        with pytest.raises(ConfigurationError, match="embedding="):
            alice.search("text", mode=mode)
        with pytest.raises(ConfigurationError, match="embedding="):
            alice.embed(["text"])
        assert alice.search("?!") == []

    def test_a_chunk_without_a_vector_is_stored_and_listed(self, bare_storage: StorageLayer) -> None:
        alice = bare_storage.for_user("user_alice")
        plain = alice.chunks.add("plain")
        chunk = alice.chunks.add("with a vector", embedding=[1, 0])
        assert (plain.chroma_id, chunk.chroma_id) == (None, chunk.id)
        assert alice.chunks.list().items == [plain, chunk]
        assert [hit.chunk for hit in alice.search(embedding=[0, 1], k=9)] == [chunk]
        assert [hit.chunk for hit in alice.search()] == [chunk, plain]
        assert bare_storage.stats()["index_records"] == 1

    def test_a_chunk_gains_and_loses_its_vector(self, bare_storage: StorageLayer) -> None:
        alice = bare_storage.for_user("user_alice")
        chunk = alice.chunks.add("old")
        assert alice.chunks.update(chunk.id, embedding=[1, 0]).chroma_id == chunk.id
        assert [hit.chunk.content for hit in alice.search(embedding=[1, 0])] == ["old"]
        # The same content keeps it, another one cannot.
        assert alice.chunks.update(chunk.id, content="old", importance=1).chroma_id == chunk.id
        assert alice.chunks.update(chunk.id, content="new").chroma_id is None
        assert alice.search(embedding=[1, 0]) == []
        assert bare_storage.stats()["index_records"] == 0
        assert alice.chunks.update(chunk.id, content="newer", embedding=[0, 1]).chroma_id == chunk.id
        assert alice.search(embedding=[0, 1])[0].similarity == 1.0
        assert alice.chunks.delete(chunk.id)
        assert bare_storage.stats()["vectors"] == bare_storage.stats()["index_records"] == 0


class TestIndexTier:
    """Above `exact_limit` the index proposes; what it owes is scored from SQL. The index is Chroma, and a list."""

    @pytest.fixture(params=["chroma", "list"])
    def open_indexed(self, request: pytest.FixtureRequest, open_exact: OpenVault, tmp_path: Path) -> OpenVault:
        index = ListIndex()

        def open_it(**options: Any) -> StorageLayer:
            vectors = index if request.param == "list" else f"chroma://{tmp_path}/chroma"
            return open_exact(**{"vectors": vectors, "embedder": "none", "exact_limit": 20, **options})

        return open_it

    def found(self, user: UserMemory, query: Any, k: int, **options: Any) -> tuple[list[Hit], set[str]]:
        hits = user.search(embedding=query, k=k, **options)
        return hits, {hit.explain()["tier"] for hit in hits}

    @pytest.mark.leaves_debts
    def test_nothing_was_paid_yet(self, open_indexed: OpenVault) -> None:
        layer = open_indexed(indexing="manual")
        memories = Memories("alice", 60, seed=1)
        alice = memories.store(layer)
        query = unit_vectors(1, DIMENSION, 1)[0]
        hits, tiers = self.found(alice, query, 10)
        assert_nearest(hits, memories.vectors, query, 10)
        assert tiers == {"exact"}
        health = layer.health()
        assert (health["ok"], health["debts"]) == (True, 60)
        assert health["oldest_debt_s"] >= 0
        report = layer.sync()
        assert (report.paid, report.failed, report.owed) == (60, 0, 0)
        hits, tiers = self.found(alice, query, 10)
        assert_nearest(hits, memories.vectors, query, 10)
        assert tiers == {"index"}

    @pytest.mark.leaves_debts
    def test_new_changed_and_deleted_ones_before_the_index_has_caught_up(self, open_indexed: OpenVault) -> None:
        layer = open_indexed(indexing="manual")
        memories = Memories("alice", 60, seed=1)
        alice = memories.store(layer)
        layer.sync()
        vectors = dict(memories.vectors)
        for number, vector in enumerate(unit_vectors(4, DIMENSION, 31)):
            vectors[f"new {number}"] = vector
            alice.chunks.add("new", id=f"new {number}", embedding=vector)
        for number, vector in enumerate(unit_vectors(4, DIMENSION, 32)):
            vectors[f"alice {number}"] = vector
            alice.chunks.update(f"alice {number}", embedding=vector)
        for number in range(4, 8):
            del vectors[f"alice {number}"]
            alice.chunks.delete(f"alice {number}")
        assert layer.health()["debts"] == 12
        for seed in range(40, 60):
            query = unit_vectors(1, DIMENSION, seed)[0]
            for k in (1, 3, 10, 56):
                hits, tiers = self.found(alice, query, k)
                assert_nearest(hits, vectors, query, k)
                assert tiers <= {"index", "exact"}

    @pytest.mark.leaves_debts
    def test_stale_records_hide_nothing(self, open_indexed: OpenVault) -> None:
        # The index still holds what was nearest; all of it has moved away, or is gone.
        layer = open_indexed(indexing="manual")
        alice = layer.for_user("alice")
        near = {f"near {number}": [1.0, number / 100] for number in range(10)}
        middle = {f"middle {number}": [1.0, 1.0 + number / 100] for number in range(30)}
        for id, vector in {**near, **middle}.items():
            alice.chunks.add("text", id=id, embedding=vector)
        layer.sync()
        for id in list(near)[:6]:
            alice.chunks.update(id, embedding=[-1.0, 0.0])
        for id in list(near)[6:]:
            alice.chunks.delete(id)
        vectors = {**middle, **{id: [-1.0, 0.0] for id in list(near)[:6]}}
        for k in (1, 3, 5, 10):
            hits, _ = self.found(alice, [1.0, 0.0], k)
            assert_nearest(hits, vectors, [1.0, 0.0], k)
            hits, _ = self.found(alice, [1.0, 0.0], k, min_similarity=0.5)
            assert_nearest(hits, middle, [1.0, 0.0], k)
            hits, _ = self.found(alice, [1.0, 0.0], k, where=F.importance >= 0.5)
            assert_nearest(hits, vectors, [1.0, 0.0], k)

    @pytest.mark.leaves_debts
    def test_a_filter_holds_for_what_is_and_not_for_what_was(self, open_indexed: OpenVault) -> None:
        layer = open_indexed(indexing="manual")
        memories = Memories("alice", 60, seed=1)
        alice = memories.store(layer)
        layer.sync()
        alice.chunks.update("alice 0", importance=0.0)
        alice.chunks.update("alice 1", importance=1.0)
        query = memories.vectors["alice 0"]
        for k in (1, 5, 60):
            high = {hit.chunk.id for hit in alice.search(embedding=query, where=F.importance > 0.999, k=k)}
            assert "alice 1" in high
            assert "alice 0" not in high
        assert alice.search(embedding=query, where=F.importance == 0.0, k=1)[0].chunk.id == "alice 0"

    def test_others_debts_and_others_records_are_not_seen(self, open_indexed: OpenVault) -> None:
        layer = open_indexed(exact_limit=0)
        alice, bob = Memories("alice", 40, seed=1).store(layer), Memories("bob", 40, seed=1).store(layer)
        query = unit_vectors(1, DIMENSION, 1)[0]
        for user in (alice, bob):
            hits, tiers = self.found(user, query, 80)
            assert {hit.chunk.user_id for hit in hits} == {user.user_id}
            assert len(hits) == 40
            assert tiers == {"index"}
        assert alice.search(embedding=query, where=F.user_id == "bob") == []


OTHER_PROCESS = """
import sys
from memvault import StorageLayer
with StorageLayer.open(f"sqlite:///{sys.argv[1]}", exact_limit=0) as layer:
    alice = layer.for_user("user_alice")
    alice.chunks.add("written elsewhere", id="elsewhere", embedding=[0.0, 1.0, 0.0])
    alice.chunks.update("changed", embedding=[0.0, 0.0, 1.0])
    alice.chunks.delete("deleted")
    found = [hit.chunk.id for hit in alice.search(embedding=[0.0, 1.0, 0.1])]
    tiers = {hit.explain()["tier"] for hit in alice.search(embedding=[0.0, 1.0, 0.1])}
    health, report = layer.health(), layer.sync()
    print(found, tiers, health["ok"], health["debts"], health["index_owner_pid"], report.paid, report.owed)
"""


def test_a_process_that_does_not_own_the_index_owes_it_and_searches_exactly(
    open_exact: OpenVault, vault_path: Path
) -> None:
    layer = open_exact(vectors="chroma", embedder="none", exact_limit=0)
    alice = layer.for_user("user_alice")
    for id, vector in (("kept", [1.0, 1.0, 0.0]), ("changed", [1.0, 0.0, 0.0]), ("deleted", [0.0, 1.0, 0.0])):
        alice.chunks.add("text", id=id, embedding=vector)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(vault_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = f"['elsewhere', 'kept', 'changed'] {{'exact'}} True 3 {os.getpid()} 0 3\n"
    assert done.stdout == expected

    def found() -> tuple[list[str], set[str]]:
        hits = alice.search(embedding=[0.0, 1.0, 0.1])
        return [hit.chunk.id for hit in hits], {hit.explain()["tier"] for hit in hits}

    # Found at once by the owner, before and after it has paid, which it does unasked.
    assert found()[0] == ["elsewhere", "kept", "changed"]
    eventually(lambda: layer.health()["debts"] == 0)
    assert found() == (["elsewhere", "kept", "changed"], {"index"})
    assert layer.stats()["index_records"] == 3


def test_a_layer_of_the_same_process_that_does_not_own_the_index(open_exact: OpenVault, tmp_path: Path) -> None:
    owner = open_exact(vectors=f"chroma://{tmp_path}/chroma", exact_limit=0)
    other = open_exact(vectors=f"chroma://{tmp_path}/chroma", exact_limit=0)
    chunk = other.for_user("user_alice").chunks.add("likes tea")
    assert other.health()["debts"] == 1
    for layer in (owner, other):
        assert [hit.chunk for hit in layer.for_user("user_alice").search("likes tea")] == [chunk]
    eventually(lambda: owner.health()["debts"] == 0)
    owner.close()
    # The index is free: the other becomes its owner.
    other.for_user("user_alice").chunks.add("plays chess")
    eventually(lambda: other.health()["debts"] == 0)
    assert other.stats()["index_records"] == 2
