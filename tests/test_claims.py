"""Can two payers of one index do harm to each other? Where several processes write to it, debts are claimed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from memvault import NewChunk, StorageLayer
from memvault.indexing import payment
from memvault.vectors.base import VectorRecord, is_exclusive
from memvault.vectors.chroma import ChromaIndex
from memvault.vectors.outbox import OUTBOX
from tests.conftest import OpenVault
from tests.support import ListIndex


class Gated(ListIndex):
    """An index whose writes wait at a gate, once it is shut, with what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.waiting = threading.Event()
        self.failure: Exception | None = None

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        if self.failure is not None:
            raise self.failure
        if records and not self.open_gate.is_set():
            self.waiting.set()
            assert self.open_gate.wait(60)
        super().upsert(records)


@pytest.fixture
def index() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.open_gate.set()


@pytest.fixture
def layers(open_exact: OpenVault, index: Gated) -> tuple[StorageLayer, StorageLayer]:
    """Two of one vault, as two processes have them, with debts that nobody pays but by `sync`."""
    one, other = (open_exact(vectors=index, indexing="manual", exact_limit=0) for _ in range(2))
    return one, other


def documents(index: ListIndex) -> dict[str, str]:
    return {id: record.document for id, record in index.records.items()}


def while_paying(layer: StorageLayer, index: Gated, meanwhile: Callable[[], None]) -> None:
    """Call ``meanwhile`` when the layer's payment has read the chunks and not written them yet."""
    index.waiting.clear()
    index.open_gate.clear()
    paying = threading.Thread(target=layer.sync)
    paying.start()
    assert index.waiting.wait(60)
    try:
        meanwhile()
    finally:
        index.open_gate.set()
        paying.join(60)
    assert not paying.is_alive()


def test_what_is_being_paid_is_left_alone(layers: tuple[StorageLayer, StorageLayer], index: Gated) -> None:
    one, other = layers
    one.for_user("alice").chunks.add("tea", id="a")

    def meanwhile() -> None:
        report = other.sync()
        assert (report.paid, report.failed, report.owed) == (0, 0, 1)

    while_paying(one, index, meanwhile)
    assert one.health()["debts"] == 0
    assert documents(index) == {"a": "tea"}


def test_an_older_state_is_not_written_over_a_newer_one(
    layers: tuple[StorageLayer, StorageLayer], index: Gated
) -> None:
    one, other = layers
    one.for_user("alice").chunks.add_many([NewChunk("old", id="changed"), NewChunk("old", id="deleted")])

    def meanwhile() -> None:
        alice = other.for_user("alice")
        alice.chunks.update("changed", content="new")
        alice.chunks.delete("deleted")
        assert other.sync().paid == 0  # claimed by the one that sleeps
        assert [hit.chunk.content for hit in alice.search("new")] == ["new"]

    while_paying(one, index, meanwhile)
    assert one.health()["debts"] == 2  # what was paid is out of date, and owed still
    assert other.sync().paid == 2
    assert documents(index) == {"changed": "new"}


def test_the_claim_of_one_that_was_killed_ends(layers: tuple[StorageLayer, StorageLayer], index: Gated) -> None:
    one, _ = layers
    alice = one.for_user("alice")
    alice.chunks.add("tea", id="a")

    def claimed_until(when: datetime) -> None:
        with one.engine.begin() as connection:
            connection.execute(update(OUTBOX).values(lease_token="of the dead", leased_until=when))

    claimed_until(datetime.now(UTC) + timedelta(minutes=1))
    assert (one.sync().paid, one.sync().owed) == (0, 1)
    assert [hit.chunk.id for hit in alice.search("tea")] == ["a"]
    claimed_until(datetime.now(UTC) - timedelta(seconds=1))
    assert (one.sync().paid, one.sync().owed) == (1, 0)
    assert documents(index) == {"a": "tea"}


def test_one_that_took_too_long_owes_again(
    layers: tuple[StorageLayer, StorageLayer], index: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = layers
    one.for_user("alice").chunks.add("tea", id="a")
    monkeypatch.setattr(payment, "LEASE_S", -1.0)
    assert (one.sync().paid, one.health()["debts"]) == (0, 1)
    monkeypatch.undo()
    with one.engine.begin() as connection:  # the minute has passed
        connection.execute(update(OUTBOX).values(leased_until=datetime.now(UTC) - timedelta(seconds=1)))
    assert (other.sync().paid, other.health()["debts"]) == (1, 0)


def test_an_unforeseen_failure_lets_go(layers: tuple[StorageLayer, StorageLayer], index: Gated) -> None:
    one, other = layers
    one.for_user("alice").chunks.add("tea", id="a")
    index.failure = ZeroDivisionError("nobody thought of this")
    with pytest.raises(ZeroDivisionError):
        one.sync()
    index.failure = None
    assert other.sync().paid == 1


def test_many_payers_at_once_settle_all(layers: tuple[StorageLayer, StorageLayer], index: Gated) -> None:
    one, other = layers
    for turn in range(5):
        one.for_user(f"user {turn}").chunks.add_many(NewChunk(f"{turn} {n}", id=f"{turn}-{n}") for n in range(60))
    threads = [threading.Thread(target=layer.sync) for layer in (one, other)]
    for thread in threads:
        thread.start()
    for turn in range(5):
        other.for_user(f"user {turn}").chunks.update(f"{turn}-7", content="changed")
    for thread in threads:
        thread.join(60)
    one.sync()
    assert one.health()["debts"] == 0
    assert len(documents(index)) == 300
    assert all(documents(index)[f"{turn}-7"] == "changed" for turn in range(5))


def test_an_embedded_index_needs_no_claims() -> None:
    assert is_exclusive(ChromaIndex.__new__(ChromaIndex))
    assert not is_exclusive(ListIndex())
