"""What do the sessions of a user promise?"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from memvault import (
    ConflictError,
    MemorySession,
    NotFoundError,
    StorageError,
    StorageLayer,
    UserMemory,
    ValidationError,
)
from memvault.memory import sessions
from tests.support import refused

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def test_start(alice: UserMemory) -> None:
    before = datetime.now(UTC)
    session = alice.sessions.start()
    assert re.fullmatch(r"sess_[0-9a-f]{8}", session.id)
    assert before <= session.started_at == session.last_activity <= datetime.now(UTC)
    assert session.model_dump(include={"user_id", "ended_at", "compressed", "memory_count", "total_tokens"}) == {
        "user_id": "user_alice",
        "ended_at": None,
        "compressed": False,
        "memory_count": 0,
        "total_tokens": 0,
    }
    assert alice.sessions.get(session.id) == session
    assert MemorySession.model_validate_json(session.model_dump_json()) == session


def test_start_with_everything_given(alice: UserMemory) -> None:
    session = alice.sessions.start(id="mine", started_at=EPOCH)
    assert (session.id, session.started_at, session.last_activity) == ("mine", EPOCH, EPOCH)
    assert alice.sessions.get("mine") == session


def test_an_id_that_is_taken(exact_storage: StorageLayer, alice: UserMemory, bob: UserMemory) -> None:
    session = alice.sessions.start(id="mine")
    for user in (alice, bob):
        with refused(exact_storage, ConflictError, "'mine'"):
            user.sessions.start(id="mine")
    assert alice.sessions.get("mine") == session
    assert bob.sessions.get("mine") is None


def test_a_generated_id_that_is_taken_is_drawn_again(
    alice: UserMemory, bob: UserMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = alice.sessions.start(id="sess_a"), bob.sessions.start(id="sess_b")
    drawn = iter(["sess_a", "sess_b", "sess_c", "sess_b", "sess_d"])
    monkeypatch.setattr(sessions, "new_session_id", lambda: next(drawn))
    assert alice.sessions.start().id == "sess_c"
    assert bob.chunks.add("makes the default session").session_id == "sess_d"
    assert alice.sessions.get("sess_a") == mine
    assert bob.sessions.get("sess_b") == theirs


def test_draws_end(exact_storage: StorageLayer, alice: UserMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    alice.sessions.start(id="sess_a")
    monkeypatch.setattr(sessions, "new_session_id", lambda: "sess_a")
    with refused(exact_storage, StorageError, "session id"):
        alice.sessions.start()
    with refused(exact_storage, StorageError, "session id"):
        alice.chunks.add("needs a default session")


def test_touch_moves_the_last_activity_forward_only(alice: UserMemory) -> None:
    session = alice.sessions.start(started_at=EPOCH)
    before = datetime.now(UTC)
    touched = alice.sessions.touch(session.id)
    assert before <= touched.last_activity <= datetime.now(UTC)
    assert touched.started_at == EPOCH
    assert alice.sessions.get(session.id) == touched
    future = datetime.now(UTC) + timedelta(days=365)
    ahead = alice.sessions.start(started_at=future)
    assert alice.sessions.touch(ahead.id).last_activity == future
    alice.chunks.add("text", session_id=ahead.id)
    found = alice.sessions.get(ahead.id)
    assert found is not None
    assert (found.last_activity, found.memory_count) == (future, 1)


def test_end_keeps_the_first_end(alice: UserMemory) -> None:
    session = alice.sessions.start()
    ended = alice.sessions.end(session.id)
    assert ended.ended_at is not None
    assert ended.ended_at >= session.started_at
    assert alice.sessions.end(session.id) == ended
    assert alice.sessions.get(session.id) == ended


def test_what_is_absent_or_anothers(exact_storage: StorageLayer, alice: UserMemory, bob: UserMemory) -> None:
    theirs = bob.sessions.start()
    for id in ("absent", theirs.id):
        assert alice.sessions.get(id) is None
        for change in (alice.sessions.touch, alice.sessions.end):
            with refused(exact_storage, NotFoundError, id):
                change(id)
    assert alice.sessions.list().items == []


@pytest.mark.parametrize("order", ["created", "-created"])
def test_list_by_pages(alice: UserMemory, bob: UserMemory, order: str) -> None:
    bob.sessions.start(started_at=EPOCH)
    # Two by two they started at the same time.
    started = [
        alice.sessions.start(id=f"id {number}", started_at=EPOCH + timedelta(hours=number // 2)) for number in range(9)
    ]
    seen: list[MemorySession] = []
    after: str | None = None
    while True:
        page = alice.sessions.list(order=order, limit=4, after=after)
        seen += page.items
        alice.sessions.start(started_at=EPOCH - timedelta(days=1 if order == "created" else -1))
        if page.next is None:
            break
        after = page.next
    assert seen == (started if order == "created" else started[::-1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": "id"}, ("order", "'id'")),
        ({"limit": 0}, ("limit", "0")),
        ({"after": "no cursor"}, ("after", "'no cursor'")),
    ],
)
def test_a_bad_argument_is_named(
    exact_storage: StorageLayer, alice: UserMemory, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    for store in (alice.sessions, alice.jobs):
        with refused(exact_storage, ValidationError, *words):
            store.list(**options)


def test_counts_follow_every_change(alice: UserMemory) -> None:
    one, two = alice.sessions.start(), alice.sessions.start()

    def counted() -> list[tuple[int, int]]:
        return [(session.memory_count, session.total_tokens) for session in alice.sessions.list().items]

    first = alice.chunks.add("a" * 8, session_id=one.id)
    alice.chunks.add("b" * 12, session_id=one.id)
    alice.chunks.add("c" * 16, session_id=two.id)
    assert counted() == [(2, 5), (1, 4)]
    alice.chunks.update(first.id, content="d" * 40)
    assert counted() == [(2, 13), (1, 4)]
    alice.chunks.update(first.id, importance=1, metadata={})
    assert counted() == [(2, 13), (1, 4)]
    alice.chunks.delete(first.id)
    assert counted() == [(1, 3), (1, 4)]
    assert alice.chunks.delete_many([chunk.id for chunk in alice.chunks.list().items]) == 2
    assert counted() == [(0, 0), (0, 0)]
