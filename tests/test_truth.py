"""Does the doctor find what is wrong in SQL itself, and put it in order where that can be done?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, delete, update

from memvault import DoctorReport, NewChunk, StorageLayer
from memvault.database.base import OWNERS
from memvault.memory.chunk_table import CHUNKS
from memvault.vectors.canonical import VECTORS
from tests.conftest import OpenVault
from tests.support import HashingEmbedder, unit_vectors

BACKENDS = (
    ("sqlite", "exact"),
    ("sqlite", "chroma"),
    ("sqlite", "sqlite-vec"),
    ("postgres", "exact"),
    ("postgres", "pgvector"),
)

COUNT = 40
FOUND = ("missing", "orphaned", "stale", "foreign", "unfindable", "mismatched")

Damage = Callable[[Connection], dict[str, int]]


def text(user: str, number: int) -> str:
    return f"{user} remembers number {number}, {number * 7919 % 1000}"


@pytest.fixture
def filled(storage: StorageLayer) -> StorageLayer:
    for user in ("alice", "bob"):
        storage.for_user(user).chunks.add_many(NewChunk(text(user, n), id=f"{user} {n}") for n in range(COUNT))
    storage.sync()
    return storage


def lose_vectors(connection: Connection) -> dict[str, int]:
    connection.execute(delete(VECTORS).where(VECTORS.c.chunk_id.in_(["alice 1", "alice 2", "bob 3"])))
    return {"missing": 3, "stale": 2}  # and two owners are counted wrongly


def change_hands(connection: Connection) -> dict[str, int]:
    connection.execute(update(VECTORS).where(VECTORS.c.chunk_id == "alice 4").values(user_id="bob"))
    return {"foreign": 1, "stale": 2}


def cut_short(connection: Connection) -> dict[str, int]:
    connection.execute(update(VECTORS).where(VECTORS.c.chunk_id == "bob 5").values(vector=b"\0" * 12))
    return {"mismatched": 1}


def rewrite(connection: Connection) -> dict[str, int]:
    """Somebody's own UPDATE, which knows nothing of vectors."""
    connection.execute(update(CHUNKS).where(CHUNKS.c.id == "bob 6").values(content="a purple elephant"))
    return {"stale": 1}


def miscount(connection: Connection) -> dict[str, int]:
    connection.execute(update(OWNERS).where(OWNERS.c.user_id == "alice").values(vector_count=0))
    return {"stale": 1}


@pytest.mark.parametrize("damage", [lose_vectors, change_hands, cut_short, rewrite, miscount])
def test_damage_in_sql_is_found_and_mended(filled: StorageLayer, damage: Damage, index_name: str) -> None:
    assert filled.doctor().clean
    with filled.engine.begin() as connection:
        expected = damage(connection)
    assert_found(filled.doctor(), expected, index_name)
    mended = filled.doctor(repair=True)
    assert_found(mended, expected, index_name)
    assert mended.repaired >= sum(expected.values())
    assert filled.doctor(repair=True) == DoctorReport(clean=True, compared=2 * COUNT)
    for user in ("alice", "bob"):
        memory = filled.for_user(user)
        for chunk in memory.chunks.list(limit=COUNT).items:
            best = memory.search(chunk.content, k=1)[0]
            assert best.similarity == pytest.approx(1, abs=1e-5), chunk
            assert best.chunk.content == chunk.content
        assert len(memory.search("remembers", k=2 * COUNT)) == COUNT


def assert_found(report: DoctorReport, expected: dict[str, int], index_name: str) -> None:
    found = {finding: count for finding in FOUND if (count := getattr(report, finding))}
    if index_name == "exact":
        assert found == expected
    else:  # which differs from SQL by that, too
        assert found.keys() >= expected.keys()
        assert all(found[finding] >= count for finding, count in expected.items())


def test_a_callers_vector_is_taken_back_from_the_index(open_vault: OpenVault, index_name: str) -> None:
    layer = open_vault(embedder="none")
    vectors = unit_vectors(COUNT, 16, 1)
    alice = layer.for_user("alice")
    alice.chunks.add_many(NewChunk(f"note {n}", id=f"n {n}", embedding=v) for n, v in enumerate(vectors))
    layer.sync()
    with layer.engine.begin() as connection:
        connection.execute(delete(VECTORS).where(VECTORS.c.chunk_id == "n 3"))
    assert layer.doctor().missing == 1
    layer.doctor(repair=True)
    report = layer.doctor(repair=True)
    if index_name == "chroma":  # the one here that keeps texts, and so can tell what its vector was made of
        assert report.clean
        assert [hit.chunk.id for hit in alice.search(embedding=vectors[3], k=1)] == ["n 3"]
    else:
        assert report.missing == 1
        assert report.repaired == 0


def test_what_cannot_be_mended_is_left_as_it_is(open_vault: OpenVault) -> None:
    layer = open_vault(embedder="none")
    alice = layer.for_user("alice")
    alice.chunks.add("a text", id="a", embedding=unit_vectors(1, 16, 1)[0])
    layer.sync()
    with layer.engine.begin() as connection:
        connection.execute(update(CHUNKS).values(content="another text"))
    for _ in range(2):
        report = layer.doctor(repair=True)
        assert report.stale >= 1
    assert [hit.chunk.content for hit in alice.search(embedding=unit_vectors(1, 16, 1)[0])] == ["another text"]


def test_a_text_that_changes_meanwhile_is_not_overtaken(open_exact: OpenVault) -> None:
    """The vector that was made of the old text is not stored with the new one."""

    class Slow(HashingEmbedder):
        def embed_documents(self, texts):  # type: ignore[no-untyped-def]
            vectors = super().embed_documents(texts)
            if during:
                during.pop()()
            return vectors

    during: list[Callable[[], object]] = []
    layer = open_exact(embedder=Slow())
    alice = layer.for_user("alice")
    alice.chunks.add("the first text", id="a")
    with layer.engine.begin() as connection:
        connection.execute(delete(VECTORS))
    during.append(lambda: alice.chunks.update("a", content="the second text"))
    layer.doctor(repair=True)
    assert alice.search("the second text", k=1)[0].similarity == pytest.approx(1, abs=1e-5)
    assert layer.doctor(repair=True).clean
