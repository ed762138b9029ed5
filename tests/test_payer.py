"""Who waits for the index, and for how long? Writes hand their debts to a thread, which pays when it can."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session

from memvault import StorageLayer, VectorIndexError
from memvault.vectors.base import VectorRecord
from tests.support import HashingEmbedder, ListIndex, eventually

FOR_EVER = 1e6
"""Seconds: who waits so long fails by the limit of all tests."""


class Stuck(ListIndex):
    """An index that takes nothing until it is let go."""

    exclusive = True

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.calls: list[int] = []

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        self.go_on.wait()
        self.calls.append(len(records))
        super().upsert(records)


@pytest.fixture
def index() -> Iterator[Stuck]:
    index = Stuck()
    yield index
    index.go_on.set()


@pytest.fixture
def opened(vault_path: Path, index: Stuck) -> Iterator[Callable[..., StorageLayer]]:
    layers = []

    def open_it(**options: Any) -> StorageLayer:
        url = f"sqlite:///{vault_path}"
        layers.append(StorageLayer.open(url, vectors=index, embedder=HashingEmbedder(), **options))
        return layers[-1]

    yield open_it
    index.go_on.set()
    for layer in layers:
        layer.close()


def test_inline_waits_no_longer_than_it_may(opened: Callable[..., StorageLayer], index: Stuck) -> None:
    layer = opened(index_wait=0.05, exact_limit=0)
    chunk = layer.for_user("alice").chunks.add("likes tea")
    health = layer.health()
    assert (health["ok"], health["debts"]) == (True, 1)
    assert health["oldest_debt_s"] >= 0
    assert [hit.chunk for hit in layer.for_user("alice").search("tea")] == [chunk]
    assert index.records == {}
    index.go_on.set()
    eventually(lambda: layer.health()["debts"] == 0)
    assert layer.health()["oldest_debt_s"] is None
    assert set(index.records) == {chunk.id}


def test_inline_waits_until_it_is_paid(opened: Callable[..., StorageLayer], index: Stuck) -> None:
    index.go_on.set()
    layer = opened(index_wait=FOR_EVER)
    for number in range(5):
        chunk = layer.for_user("alice").chunks.add(f"number {number}")
        assert chunk.id in index.records
        assert layer.health()["debts"] == 0


def test_background_does_not_wait(opened: Callable[..., StorageLayer], index: Stuck) -> None:
    layer = opened(indexing="background", index_wait=FOR_EVER)
    for number in range(5):
        layer.for_user("alice").chunks.add(f"number {number}")
    assert layer.health()["debts"] == 5
    assert len(layer.for_user("alice").search("number", k=10)) == 5
    index.go_on.set()
    eventually(lambda: layer.health()["debts"] == 0)


def test_manual_pays_when_it_is_asked(opened: Callable[..., StorageLayer], index: Stuck) -> None:
    index.go_on.set()
    before = threading.active_count()
    layer = opened(indexing="manual", index_wait=FOR_EVER)
    layer.for_user("alice").chunks.add("likes tea")
    assert threading.active_count() == before
    assert (layer.health()["debts"], index.calls) == (1, [])
    report = layer.sync()
    assert (report.paid, report.failed, report.owed) == (1, 0, 0)
    assert index.calls == [1]


def test_what_is_handed_over_meanwhile_is_paid_together(opened: Callable[..., StorageLayer], index: Stuck) -> None:
    layer = opened(index_wait=FOR_EVER)
    threads = [
        threading.Thread(target=layer.for_user(f"user {number}").chunks.add, args=(f"text {number}",))
        for number in range(12)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: layer.health()["debts"] == 12)
    index.go_on.set()
    for thread in threads:
        thread.join()
    assert sum(index.calls) >= 12
    assert len(index.calls) <= 3  # the one that was under way, and the others


def test_closing_pays_what_is_owed(opened: Callable[..., StorageLayer], index: Stuck) -> None:
    layer = opened(indexing="background", index_wait=30)
    for number in range(3):
        layer.for_user("alice").chunks.add(f"number {number}")
    threading.Timer(0.2, index.go_on.set).start()
    layer.close()
    assert len(index.records) == 3


def test_closing_does_not_wait_for_an_index_that_hangs(opened: Callable[..., StorageLayer], index: Stuck) -> None:
    layer = opened(indexing="background", index_wait=0.05)
    layer.for_user("alice").chunks.add("likes tea")
    layer.close()
    assert not index.go_on.is_set()
    index.go_on.set()
    again = opened(index_wait=FOR_EVER)
    eventually(lambda: again.sync().owed == 0)
    assert len(index.records) == 1


def test_what_a_callers_transaction_owes_is_paid_unasked(opened: Callable[..., StorageLayer], index: Stuck) -> None:
    index.go_on.set()
    layer = opened(index_wait=FOR_EVER)
    with Session(layer.engine) as session:
        chunk = layer.for_user("alice", sql_session=session).chunks.add("likes tea")
        assert index.records == {}
        session.commit()
    eventually(lambda: chunk.id in index.records)
    eventually(lambda: layer.health()["debts"] == 0)


def test_one_complaint_about_an_index_that_fails_again_and_again(
    opened: Callable[..., StorageLayer], index: Stuck, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def broken(*_: object) -> bool:
        nonlocal tries
        tries += 1
        raise VectorIndexError("no such luck")

    monkeypatch.setattr("memvault.indexing.reach.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("memvault.indexing.payer.POLL_S", 0.01)
    monkeypatch.setattr(Stuck, "open", broken)
    with caplog.at_level(logging.INFO, logger="memvault.index"):
        layer = opened(index_wait=FOR_EVER)
        layer.for_user("alice").chunks.add("likes tea")  # which does not wait
        eventually(lambda: tries > 5)
        assert [record.message for record in caplog.records if "no such luck" in record.message] == [
            "the vector index failed, searches go on exactly and debts are kept: no such luck"
        ]
        monkeypatch.undo()
        index.go_on.set()
        eventually(lambda: layer.health()["debts"] == 0)
        assert "is in use again" in caplog.text
