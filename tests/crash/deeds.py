"""What does a process do to a vault, and how would anybody know that it was done?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from memvault import NewChunk, StorageLayer

MANY = 300
"""A user who has more is relieved of half of them: what is compared after each kill stays small."""


@dataclass(frozen=True)
class Memory:
    """A chunk as it was asked for; ``session_id`` None: the user's default session."""

    content: str
    importance: float
    session_id: str | None


@dataclass
class State:
    """What one user has: memories by id, and whether a session has ended, by id."""

    memories: dict[str, Memory] = field(default_factory=dict)
    sessions: dict[str, bool] = field(default_factory=dict)

    def apply(self, deed: Deed) -> None:
        self.memories.update(deed.put)
        for id in deed.gone:
            del self.memories[id]
        self.sessions.update(deed.sessions)


@dataclass(frozen=True)
class Deed:
    """One call, and what it changes; ``was``: what is changed or deleted, as it was before.

    ``final``: nobody will ever change again what it leaves.
    """

    name: str
    user: str
    kind: str
    put: dict[str, Memory] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    was: dict[str, Memory] = field(default_factory=dict)
    sessions: dict[str, bool] = field(default_factory=dict)
    final: bool = False

    @property
    def changes_memories(self) -> bool:
        return bool(self.put or self.gone)

    def do(self, layer: StorageLayer) -> None:
        user = layer.for_user(self.user)
        match self.kind:
            case "add":
                [(id, memory)] = self.put.items()
                user.chunks.add(memory.content, id=id, session_id=memory.session_id, importance=memory.importance)
            case "add_many":
                new = [
                    NewChunk(memory.content, id=id, session_id=memory.session_id, importance=memory.importance)
                    for id, memory in self.put.items()
                ]
                assert len(user.chunks.add_many(new)) == len(new)
            case "update":
                [(id, memory)] = self.put.items()
                content = memory.content if memory.content != self.was[id].content else None
                user.chunks.update(id, content=content, importance=memory.importance)
            case "delete":
                [id] = self.gone
                assert user.chunks.delete(id)
            case "delete_many":
                assert user.chunks.delete_many(self.gone) == len(self.gone)
            case "start":
                [id] = self.sessions
                user.sessions.start(id=id)
            case "end":
                [id] = self.sessions
                user.sessions.end(id)
            case "sync":
                layer.sync()
            case _:
                raise AssertionError(self.kind)

    def complaints(self, layer: StorageLayer, most: int = 3) -> Iterator[str]:
        """What a search does not show of this deed; of a batch, as many as ``most`` are looked for."""
        user = layer.for_user(self.user)
        for id, memory in islice(self.put.items(), most):
            yield from not_found(layer, self.user, id, memory)
        for id, memory in islice(self.was.items(), most):
            if id in self.gone or memory.content != self.put[id].content:
                for hit in user.search(memory.content, k=5, mode="vector"):
                    if hit.chunk.id == id and (id in self.gone or hit.chunk.content == memory.content):
                        yield f"{self.name}: {id} is still found by {memory.content!r}, {hit.explain()}"


def not_found(layer: StorageLayer, user_id: str, id: str, memory: Memory) -> Iterator[str]:
    """A complaint, where a search for its own words does not find the memory as it is."""
    hits = layer.for_user(user_id).search(memory.content, k=3, mode="vector")
    shown = {hit.chunk.id: hit.chunk for hit in hits}
    if id not in shown:
        yield f"{id} is not found by {memory.content!r}, but {list(shown)}; {[hit.explain() for hit in hits]}"
    elif (shown[id].content, shown[id].importance) != (memory.content, memory.importance):
        yield f"{id} is found as {shown[id]!r} instead of {memory!r}"


class Author:
    """Thinks of deeds for one user, by a seed and what the user has.

    ``remains``: the share of what it adds that nobody will touch again; the rest is changed at most once. 0: all may
    be changed again and again.
    """

    def __init__(
        self,
        user: str,
        name: str,
        state: State,
        *,
        seed: str,
        remains: float = 0.0,
        batches: Sequence[int] = (2, 10, 40, 120),
    ) -> None:
        """``name``: begins every id that it makes. ``batches``: how many it adds at once."""
        self._user = user
        self._name = name
        self._random = random.Random(f"{seed} {user} {name}")
        self._memories = dict(state.memories)
        self._open = [id for id, ended in state.sessions.items() if not ended]
        self._sessions = list(state.sessions)
        self._remains = remains
        self._batches = batches
        self._count = 0

    def deeds(self) -> Iterator[Deed]:
        """Deed after deed, each on the assumption that those before it were done."""
        while True:
            yield self._next()

    def _next(self) -> Deed:
        kinds = ["add"] * 6 + ["add_many"] * 3 + ["update"] * 4 + ["delete"] * 2 + ["sync", "start", "end"]
        kind = "delete_many" if len(self._memories) > MANY else self._random.choice(kinds)
        self._count += 1
        deed = Deed(f"{self._name}-{self._count}", self._user, kind)
        match kind:
            case "update" | "delete" if self._memories:
                return self._change(deed)
            case "delete_many":
                gone = tuple(self._random.sample(sorted(self._memories), MANY // 2))
                return replace(deed, gone=gone, was={id: self._memories.pop(id) for id in gone})
            case "end" if self._open:
                return replace(deed, sessions={self._open.pop(self._random.randrange(len(self._open))): True})
            case "start":
                self._open.append(deed.name)
                self._sessions.append(deed.name)
                return replace(deed, sessions={deed.name: False})
            case "add_many":
                return self._add(deed, self._random.choice(self._batches))
            case "sync":
                return deed
        return self._add(replace(deed, kind="add"), 1)

    def _add(self, deed: Deed, count: int) -> Deed:
        put = {f"{deed.name}-{place}": self._memory() for place in range(count)}
        final = self._random.random() < self._remains
        if not final:
            self._memories.update(put)
        return replace(deed, put=put, final=final)

    def _change(self, deed: Deed) -> Deed:
        id = self._random.choice(sorted(self._memories))
        before = self._memories.pop(id)
        final = self._remains > 0
        if deed.kind == "delete":
            return replace(deed, gone=(id,), was={id: before}, final=final)
        after = replace(self._memory(), session_id=before.session_id)
        if self._random.random() < 0.2:
            after = replace(after, content=before.content)
        if not final:
            self._memories[id] = after
        return replace(deed, put={id: after}, was={id: before}, final=final)

    def _memory(self) -> Memory:
        words = " ".join(f"{self._random.getrandbits(24):06x}" for _ in range(5))  # no two point into one direction
        session = self._random.choice([None, *self._sessions[-3:]])
        return Memory(f"remembers {words}", self._random.randrange(11) / 10, session)
