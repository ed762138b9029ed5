"""What has to be in a vault after its writers were killed, and is it there? The test's own bookkeeping."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from memvault import StorageLayer, UserMemory
from memvault.values import Chunk, Page
from tests.crash.deeds import Deed, Memory, State, not_found
from tests.support import HashingEmbedder, eventually

USERS = ("alice", "bob", "%")


class Ledger:
    """Of each deed: certainly done, certainly not begun, or either, and then wholly or not at all."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.states = {user: State() for user in USERS}
        self.acknowledged = 0
        self.recent: dict[str, Deed] = {}
        """Done since the last look."""
        self._begun: dict[str, Deed] = {}

    def begin(self, deed: Deed) -> None:
        self._begun[deed.name] = deed

    def done(self, name: str) -> Deed:
        """The deed was acknowledged, or is known to be committed."""
        deed = self._begun.pop(name)
        self.states[deed.user].apply(deed)
        self.recent[name] = deed
        self.acknowledged += 1
        return deed

    def undone(self, name: str) -> None:
        """The deed is known not to have been committed."""
        del self._begun[name]

    def settle(self, layer: StorageLayer) -> None:
        """Compare with SQL. Of the deeds that may or may not have been done, find out; none may be done by half."""
        actual = {user: actual_state(layer.for_user(user), self.states[user], self._begun) for user in USERS}
        for deed in list(self._begun.values()):
            after = copy.deepcopy(self.states[deed.user])
            after.apply(deed)
            if _agree(actual[deed.user], after, deed):
                self.done(deed.name)
            else:
                self.undone(deed.name)
        for user in USERS:
            expected = self.states[user]
            assert actual[user].memories == expected.memories, self._difference(user, actual[user], expected)
            assert actual[user].sessions == expected.sessions, f"sessions of {user}, seed {self.seed}"

    def assert_found(self, layer: StorageLayer, sample: int, *, limit: int | None = None) -> None:
        """Each user's memories are found all at once, and by their own words: those of the very last deeds, a sample
        of the recent ones, and a sample of all.

        ``limit``: the layer's ``exact_limit``, where the index shall have answered, not SQL in its place.
        """
        chance = random.Random(self.seed)
        recent = list(self.recent.values())
        deeds = [*chance.sample(recent, min(3 * sample, len(recent))), *recent[-2 * len(USERS) :]]
        complaints = [complaint for deed in deeds for complaint in self._complaints(deed, layer)]
        for user in USERS:
            memories = self.states[user].memories
            for id in chance.sample(sorted(memories), min(sample, len(memories))):
                complaints += not_found(layer, user, id, memories[id])
            hits = layer.for_user(user).search("remembers", k=len(memories) + 10, mode="vector")
            found = {hit.chunk.id: hit.chunk.content for hit in hits}
            if found != {id: memory.content for id, memory in memories.items()}:
                missing, foreign = sorted(set(memories) - set(found)), sorted(set(found) - set(memories))
                complaints.append(f"{user}: not all is found: {missing=} {foreign=}")
            if limit is not None and len(memories) > limit and memories:
                some = memories[chance.choice(sorted(memories))]
                tiers = {hit.explain()["tier"] for hit in layer.for_user(user).search(some.content, mode="vector")}
                if tiers != {"index"}:
                    complaints.append(f"{user}: {tiers=}, {layer.health()}")
        assert complaints == [], f"seed {self.seed}"

    def assert_index_is_sql(self, layer: StorageLayer, sample: int) -> None:
        """The index alone: it holds every record, none twice, as SQL has it, and finds each by its own vector."""
        index = layer._reach.index
        held = [record for some in index.scan() for record in some]
        expected = {(user, id): memory for user in USERS for id, memory in self.states[user].memories.items()}
        assert sorted((record.user_id, record.id) for record in held) == sorted(expected), f"seed {self.seed}"
        assert index.count() == len(expected)
        assert layer.stats()["index_records"] == layer.stats()["vectors"] == len(expected)
        if not held:
            return
        wanted = [expected[record.user_id, record.id] for record in held]
        vectors = HashingEmbedder().embed_documents([memory.content for memory in wanted])
        assert np.abs(np.stack([record.vector for record in held]) - vectors).max() < 1e-4, f"seed {self.seed}"
        for record, memory in zip(held, wanted, strict=True):
            assert record.metadata is not None
            assert abs(record.metadata.importance - memory.importance) < 1e-9, f"{record.id}, seed {self.seed}"
        places = {record.id: place for place, record in enumerate(held)}
        for place in random.Random(self.seed).sample(range(len(held)), min(sample, len(held))):
            [nearest] = index.query(held[place].user_id, vectors[place], 1)
            if nearest.id != held[place].id:  # another text of the same vector: with thousands there are some
                assert np.array_equal(vectors[places[nearest.id]], vectors[place]), f"{nearest}, seed {self.seed}"

    def _complaints(self, deed: Deed, layer: StorageLayer) -> Iterator[str]:
        """Unless a later deed has changed the same again."""
        memories = self.states[deed.user].memories
        if all(memories.get(id) == memory for id, memory in deed.put.items()):
            yield from deed.complaints(layer)

    def _difference(self, user: str, actual: State, expected: State) -> str:
        have, want = actual.memories, expected.memories
        changed = [id for id in have if id in want and have[id] != want[id]]
        return (
            f"{user}, seed {self.seed}: lacks {sorted(set(want) - set(have))}, has {sorted(set(have) - set(want))}, "
            f"has changed {[(have[id], want[id]) for id in changed]}; begun: {list(self._begun)}"
        )


def actual_state(user: UserMemory, known: State, begun: dict[str, Deed]) -> State:
    """What SQL has of a user."""
    sessions = list(_every(user.sessions.list))
    named = {*known.sessions, *(id for deed in begun.values() for id in deed.sessions)}
    state = State(sessions={one.id: one.ended_at is not None for one in sessions if one.id in named})
    counted: dict[str, int] = {}
    for chunk in _every_chunk(user):
        session = chunk.session_id if chunk.session_id in named else None
        state.memories[chunk.id] = Memory(chunk.content, chunk.importance, session)
        counted[chunk.session_id] = counted.get(chunk.session_id, 0) + 1
    assert {one.id: one.memory_count for one in sessions if one.memory_count} == counted
    assert user.chunks.count() == len(state.memories)
    return state


def pay(layer: StorageLayer) -> None:
    """Everything can be paid, as soon as no claim of a dead payer's holds any more."""

    def is_paid() -> bool:
        report = layer.sync()
        assert report.failed == 0, layer.health()
        return report.owed == 0

    eventually(is_paid)
    assert layer.health()["debts"] == 0


def _agree(actual: State, after: State, deed: Deed) -> bool:
    """Whether what the deed touches is as it would be after it."""
    touched = {*deed.put, *deed.gone}
    return all(actual.memories.get(id) == after.memories.get(id) for id in touched) and all(
        actual.sessions.get(id) == ended for id, ended in deed.sessions.items()
    )


def _every_chunk(user: UserMemory) -> Iterator[Chunk]:
    yield from _every(user.chunks.list)


def _every(pages: Callable[..., Page[Any]]) -> Iterator[Any]:
    after: str | None = None
    while True:
        page = pages(limit=1000, after=after)
        yield from page.items
        after = page.next
        if after is None:
            return
