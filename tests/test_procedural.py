"""What do the preferences of a user promise?"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from memvault import NotFoundError, Preference, StorageError, StorageLayer, UserMemory, ValidationError
from memvault.memory import procedural
from tests.support import refused


def test_set_and_get(alice: UserMemory) -> None:
    chunk = alice.chunks.add("Prefers concise answers")
    before = datetime.now(UTC)
    preference = alice.procedural.set(
        "communication_style", {"tone": "direct"}, confidence=0.9, source_chunk_id=chunk.id
    )
    assert re.fullmatch(r"proc_[0-9a-f]{12}", preference.id)
    assert before <= preference.updated_at <= datetime.now(UTC)
    assert preference.model_dump(exclude={"id", "updated_at"}) == {
        "user_id": "user_alice",
        "key": "communication_style",
        "value": {"tone": "direct"},
        "confidence": 0.9,
        "source_chunk_id": chunk.id,
    }
    assert alice.procedural.get("communication_style") == preference
    assert Preference.model_validate_json(preference.model_dump_json()) == preference


def test_setting_again_replaces_all(alice: UserMemory) -> None:
    chunk = alice.chunks.add("text")
    first = alice.procedural.set("key", [1], confidence=0.1, source_chunk_id=chunk.id)
    second = alice.procedural.set("key", "two")
    assert second.id == first.id
    assert (second.value, second.confidence, second.source_chunk_id) == ("two", 1.0, None)
    assert second.updated_at > first.updated_at
    assert alice.procedural.list().items == [second]


@pytest.mark.parametrize("value", [None, True, 0, -1.5, 2**63 - 1, "ü", "", [], {}, {"a": [None, {"b": 1}]}])
def test_any_json_value_comes_back_equal(alice: UserMemory, value: Any) -> None:
    for stored in (alice.procedural.set("key", value), alice.procedural.get("key"), *alice.procedural.list().items):
        assert stored is not None
        assert stored.value == value
        assert type(stored.value) is type(value)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("key", math.nan), {}, ("value", "nan")),
        (("key", {1: 2}), {}, ("value", "1")),
        (("key", (1, 2)), {}, ("value", "tuple")),
        (("key", {"a"}), {}, ("value", "set")),
        (("key", "x" * (1 << 20)), {}, ("value", "1 MiB")),
        (("", 1), {}, ("key", "''")),
        (("x" * 256, 1), {}, ("key", "256")),
        (("key", 1), {"confidence": 1.5}, ("confidence", "1.5")),
        (("key", 1), {"confidence": None}, ("confidence", "None")),
        (("key", 1), {"source_chunk_id": ""}, ("source_chunk_id", "''")),
    ],
)
def test_a_bad_argument_is_named(
    exact_storage: StorageLayer,
    alice: UserMemory,
    arguments: tuple[Any, Any],
    options: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    alice.procedural.set("key", "there")
    with refused(exact_storage, ValidationError, *words):
        alice.procedural.set(*arguments, **options)


def test_a_source_that_is_absent_or_anothers(exact_storage: StorageLayer, alice: UserMemory, bob: UserMemory) -> None:
    theirs = bob.chunks.add("theirs")
    alice.procedural.set("key", "there")
    for id in ("absent", theirs.id):
        for key in ("key", "new"):
            with refused(exact_storage, NotFoundError, "source_chunk_id", id):
                alice.procedural.set(key, 1, source_chunk_id=id)


def test_a_key_is_one_users(alice: UserMemory, bob: UserMemory) -> None:
    alice.procedural.set("key", "alice")
    assert bob.procedural.get("key") is None
    assert bob.procedural.delete("key") is False
    bob.procedural.set("key", "bob")
    assert [preference.value for preference in alice.procedural.list().items] == ["alice"]
    assert alice.procedural.delete("key") is True
    assert alice.procedural.delete("key") is False
    assert alice.procedural.get("key") is None
    assert [preference.value for preference in bob.procedural.list().items] == ["bob"]


def test_list_by_key_and_pages(alice: UserMemory, bob: UserMemory) -> None:
    bob.procedural.set("b", 0)
    keys = ["B", "a", "a b", "ab", "b", "Ä", "ä", "🙂"]
    for key in reversed(keys):
        alice.procedural.set(key, 1)
    seen: list[str] = []
    after: str | None = None
    while True:
        page = alice.procedural.list(limit=3, after=after)
        seen += [preference.key for preference in page.items]
        alice.procedural.set("A", 1)  # before every page
        if page.next is None:
            break
        after = page.next
    assert seen == sorted(keys) == keys
    with pytest.raises(ValidationError, match="limit"):
        alice.procedural.list(limit=0)
    with pytest.raises(ValidationError, match="after"):
        alice.procedural.list(after="no cursor")


def test_a_cursor_of_another_list_is_refused(alice: UserMemory) -> None:
    for number in range(3):
        alice.procedural.set(f"key {number}", 1)
        alice.sessions.start()
    with pytest.raises(ValidationError, match="after"):
        alice.sessions.list(after=alice.procedural.list(limit=1).next)
    with pytest.raises(ValidationError, match="after"):
        alice.procedural.list(after=alice.sessions.list(limit=1).next)


def test_a_generated_id_that_is_taken_is_drawn_again(
    exact_storage: StorageLayer, alice: UserMemory, bob: UserMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(["proc_a", "proc_a", "proc_a", "proc_b"])
    monkeypatch.setattr(procedural, "new_preference_id", lambda: next(drawn))
    mine = alice.procedural.set("key", "mine")
    assert bob.procedural.set("key", "theirs").id == "proc_b"
    assert alice.procedural.get("key") == mine
    monkeypatch.setattr(procedural, "new_preference_id", lambda: "proc_a")
    with refused(exact_storage, StorageError, "preference id"):
        bob.procedural.set("other", 1)


def test_erasing_the_users_chunks_keeps_the_value(alice: UserMemory) -> None:
    chunk = alice.chunks.add("text")
    alice.procedural.set("key", 1, source_chunk_id=chunk.id)
    alice.chunks.delete_many([chunk.id])
    assert [(one.value, one.source_chunk_id) for one in alice.procedural.list().items] == [(1, None)]
