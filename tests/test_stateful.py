"""Does a vault do what a dict would do, whatever is done in whichever order?"""

from __future__ import annotations

import copy
import math
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from memvault import (
    ConflictError,
    F,
    NewChunk,
    NotFoundError,
    StorageLayer,
    UserMemory,
    ValidationError,
    VectorIndexError,
)
from memvault.embedding.base import Vector
from memvault.filters import EVERYTHING, Filter
from memvault.vectors.base import VectorMatch, VectorRecord
from tests.reused_postgres import Reused
from tests.support import PATIENT_S, ListIndex, assert_nearest, assert_returned, eventually
from tests.vectors.chroma_servers import ChromaServer, Relay

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
USERS = ("alice", "bob", "%")
DIMENSION = 8

Indexing = Literal["inline", "background", "manual"]
Way = tuple[Indexing, int]
"""How a storage layer is opened: ``indexing``, of which "manual" withholds payment, and ``exact_limit``."""

indexings: st.SearchStrategy[Indexing] = st.sampled_from(["inline", "background", "manual"])
ways = st.tuples(indexings, st.sampled_from([0, 5, 20_000]))
users = st.sampled_from(["alice", "alice", "alice", *USERS])  # one has enough for an index to be asked
# Few ids and few sessions for all users: they collide, and belong to somebody else.
ids = st.integers(0, 15).map("id {}".format)
sessions = st.none() | st.integers(0, 5).map("sess {}".format)
vectors = st.lists(st.integers(-2, 2), min_size=DIMENSION, max_size=DIMENSION).filter(any)
types: st.SearchStrategy[str] = st.sampled_from(["episodic", "semantic", "working", "procedural"])
fractions = st.integers(0, 4).map(lambda number: number / 4)
contents = st.integers(0, 30).map(lambda number: "text " * (number // 10 + 1) + str(number))
times = st.integers(0, 9).map(lambda hours: EPOCH + timedelta(hours=hours))


@st.composite
def new_chunks(draw: st.DrawFn) -> NewChunk:
    memory_type = draw(types)
    return NewChunk(
        draw(contents),
        id=draw(ids),
        session_id=draw(sessions),
        memory_type=memory_type,
        importance=draw(fractions),
        metadata=draw(st.none() | st.just({"a": [None, "ü"]})),
        embedding=None if memory_type == "procedural" else draw(st.none() | vectors),
        created_at=draw(times),
    )


filters = st.sampled_from(
    [None, F.importance >= 0.5, F.memory_type.in_(["episodic", "working"]), F.content < "text 2", F.id.in_([])]
)


def passes(where: Any, chunk: dict[str, Any]) -> bool:
    """What the filters above mean."""
    if where is None:
        return True
    if where == (F.importance >= 0.5):
        return bool(chunk["importance"] >= 0.5)
    if where == F.memory_type.in_(["episodic", "working"]):
        return chunk["memory_type"] in ("episodic", "working")
    if where == (F.content < "text 2"):
        return bool(chunk["content"] < "text 2")
    return False


@dataclass
class Model:
    """What one user has, by id; a chunk is its fields, and its vector or None under "vector"."""

    chunks: dict[str, dict[str, Any]] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    default_session: str | None = None
    preferences: dict[str, tuple[Any, str | None]] = field(default_factory=dict)
    jobs: int = 0


class Abort(Exception):
    """Ends a transaction without committing it."""


class Faults:
    """When an index fails: by a pattern that is gone through again and again, one step a call."""

    def __init__(self) -> None:
        self._pattern: Iterator[bool] = cycle([False])
        self._lock = threading.Lock()

    def follow(self, pattern: list[bool]) -> None:
        with self._lock:
            self._pattern = cycle(pattern)

    def now(self) -> bool:
        with self._lock:
            return next(self._pattern)


class FailingList(ListIndex):
    """A list that refuses what it is told to refuse."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        self._fail()
        super().upsert(records)

    def delete(self, ids: Sequence[str]) -> None:
        self._fail()
        super().delete(ids)

    def query(self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING) -> list[VectorMatch]:
        self._fail()
        return super().query(user_id, vector, k, where)

    def _fail(self) -> None:
        if self._faults.now():
            raise VectorIndexError("the list does not feel like it")


class VaultMachine(RuleBasedStateMachine):
    """A vault that two storage layers have open, and three dicts."""

    def __init__(self, url: str, index: str | ListIndex, faults: Faults) -> None:
        """``url``: of a database at head without a vault; ``faults``: what makes its index fail."""
        super().__init__()
        self.url = url
        self.index = index
        self.faults = faults
        self.kills = 0
        self.models = {name: Model() for name in USERS}
        self.within: UserMemory | None = None
        """The handle of the transaction that is open, if any."""

    @initialize(one=ways, other=ways, some=st.lists(vectors, max_size=12))
    def begin(self, one: Way, other: Way, some: list[list[int]]) -> None:
        self.layers = [self.open(*one)]
        self.layers.append(self.open(*other))
        new = [
            NewChunk(f"text {place}", id=f"id {place}", embedding=one, created_at=EPOCH)
            for place, one in enumerate(some)
        ]
        self.add_many("alice", new, "error")
        self.sync()

    def open(self, indexing: Indexing, exact_limit: int) -> StorageLayer:
        return StorageLayer.open(
            self.url,
            vectors=self.index,
            embedder="none",
            schema="upgrade",
            indexing=indexing,
            exact_limit=exact_limit,
            index_wait=PATIENT_S,
        )

    @property
    def layer(self) -> StorageLayer:
        """The one of the two that is used now."""
        return self.layers[0]

    @rule(way=ways)
    def reopen(self, way: Way) -> None:
        self.layer.close()
        self.layers[0] = self.open(*way)

    @rule()
    def change_over(self) -> None:
        """What one has written, the other finds at once."""
        self.layers.reverse()

    @rule(pattern=st.lists(st.booleans(), min_size=1, max_size=5))
    def fail(self, pattern: list[bool]) -> None:
        self.faults.follow(pattern)

    @precondition(lambda self: self.index == "chroma" and self.kills < 2)
    @rule()
    def kill_chroma(self) -> None:
        self.kills += 1
        for layer in self.layers:
            pid = layer._reach.index.child_pid  # type: ignore[attr-defined]  # a ChromaIndex
            if pid is not None:
                os.kill(pid, signal.SIGKILL)

    def user(self, name: str) -> UserMemory:
        return self.within if self.within is not None else self.layer.for_user(name)

    def taken(self, id: str) -> bool:
        return any(id in model.chunks for model in self.models.values())

    # What is done.

    @rule(name=users, new=st.lists(new_chunks(), max_size=6), on_conflict=st.sampled_from(["error", "skip"]))
    def add_many(self, name: str, new: list[NewChunk], on_conflict: str) -> None:
        model = self.models[name]
        wanted: list[NewChunk] = []
        for one in new:
            if one.id is None or one.id not in [other.id for other in wanted]:
                wanted.append(one)
        lost_sessions = any(one.session_id is not None and one.session_id not in model.sessions for one in wanted)
        conflict = any(
            one.id is not None and self.taken(one.id) and (on_conflict == "error" or one.id not in model.chunks)
            for one in wanted
        )
        if on_conflict == "error" and len(wanted) < len(new):
            conflict = True
        if lost_sessions or conflict:
            expected = tuple([NotFoundError] * lost_sessions + [ConflictError] * conflict)
            with pytest.raises(expected):
                self.user(name).chunks.add_many(new, on_conflict=on_conflict)
            return
        wanted = [one for one in wanted if one.id not in model.chunks]
        stored = self.user(name).chunks.add_many(new, on_conflict=on_conflict)
        assert [chunk.content for chunk in stored] == [one.content for one in wanted]
        for chunk, one in zip(stored, wanted, strict=True):
            assert chunk.id == (one.id or chunk.id)
            assert one.session_id in (None, chunk.session_id)
            if one.session_id is None:
                model.default_session = model.default_session or chunk.session_id
                assert chunk.session_id == model.default_session
                model.sessions.add(chunk.session_id)
            model.chunks[chunk.id] = {
                "session_id": chunk.session_id,
                "memory_type": one.memory_type,
                "importance": one.importance,
                "content": one.content,
                "metadata": one.metadata or {},
                "created_at": one.created_at,
                "version": 1,
                "vector": one.embedding,
            }
        if new and not wanted and any(one.session_id is None for one in new):
            self.note_default_session(name)

    @rule(name=users, new=new_chunks())
    def add(self, name: str, new: NewChunk) -> None:
        self.add_many(name, [new], "error")

    @rule(
        name=users,
        id=ids,
        content=st.none() | contents,
        importance=st.none() | fractions,
        metadata=st.none() | st.just({"b": 1}),
        vector=st.none() | vectors,
        version=st.none() | st.integers(1, 3),
    )
    def update(
        self,
        name: str,
        id: str,
        content: str | None,
        importance: float | None,
        metadata: dict[str, Any] | None,
        vector: list[int] | None,
        version: int | None,
    ) -> None:
        chunk = self.models[name].chunks.get(id)
        error: type[Exception] | None = None
        if all(change is None for change in (content, importance, metadata, vector)):
            error = ValidationError
        elif chunk is None:
            error = NotFoundError
        elif vector is not None and chunk["memory_type"] == "procedural":
            error = ValidationError
        elif version not in (None, chunk["version"]):
            error = ConflictError
        changes: dict[str, Any] = {
            "content": content,
            "importance": importance,
            "metadata": metadata,
            "embedding": vector,
        }
        if error is not None:
            with pytest.raises(error):
                self.user(name).chunks.update(id, **changes, expected_version=version)
            return
        assert chunk is not None
        updated = self.user(name).chunks.update(id, **changes, expected_version=version)
        if vector is not None:
            chunk["vector"] = vector
        elif content not in (None, chunk["content"]):
            chunk["vector"] = None  # nobody can embed the new content
        chunk.update({key: value for key, value in changes.items() if value is not None and key != "embedding"})
        chunk["version"] += 1
        self.same(name, id, updated)

    @rule(name=users, data=st.data(), k=st.integers(1, 4))
    def move_away(self, name: str, data: st.DataObject, k: int) -> None:
        """What an index may still hold where a chunk was hides nothing that is there."""
        movable = sorted(id for id, chunk in self.models[name].chunks.items() if chunk["vector"] is not None)
        if movable:
            id = data.draw(st.sampled_from(movable))
            old = self.models[name].chunks[id]["vector"]
            self.update(name, id, None, None, None, [-number for number in old], None)
            self.search(name, old, k, None, None)

    @rule(name=users, id=ids)
    def delete(self, name: str, id: str) -> None:
        model = self.models[name]
        assert self.user(name).chunks.delete(id) == (id in model.chunks)
        self.forget(model, {id})

    @rule(name=users, doomed=st.lists(ids, max_size=5))
    def delete_many(self, name: str, doomed: list[str]) -> None:
        model = self.models[name]
        assert self.user(name).chunks.delete_many(doomed) == len(set(doomed) & model.chunks.keys())
        self.forget(model, set(doomed))

    @rule(name=users, where=filters.filter(lambda where: where is not None))
    def delete_where(self, name: str, where: Any) -> None:
        model = self.models[name]
        doomed = {id for id, chunk in model.chunks.items() if passes(where, chunk)}
        assert self.user(name).chunks.delete_many(where) == len(doomed)
        self.forget(model, doomed)

    @staticmethod
    def forget(model: Model, gone: set[str]) -> None:
        for id in gone:
            model.chunks.pop(id, None)
        for key, (value, source) in model.preferences.items():
            if source in gone:
                model.preferences[key] = (value, None)

    @rule(name=users, id=sessions)
    def start_session(self, name: str, id: str | None) -> None:
        if id is not None and any(id in model.sessions for model in self.models.values()):
            with pytest.raises(ConflictError):
                self.user(name).sessions.start(id=id)
        else:
            self.models[name].sessions.add(self.user(name).sessions.start(id=id).id)

    @rule(name=users, key=st.sampled_from(["a", "b"]), value=st.none() | st.integers(-9, 9), source=st.none() | ids)
    def set_preference(self, name: str, key: str, value: Any, source: str | None) -> None:
        model = self.models[name]
        if source is not None and source not in model.chunks:
            with pytest.raises(NotFoundError):
                self.user(name).procedural.set(key, value, source_chunk_id=source)
        else:
            self.user(name).procedural.set(key, value, source_chunk_id=source)
            model.preferences[key] = (value, source)

    @rule(name=users, key=st.sampled_from(["a", "b"]))
    def delete_preference(self, name: str, key: str) -> None:
        assert self.user(name).procedural.delete(key) == (key in self.models[name].preferences)
        self.models[name].preferences.pop(key, None)

    @rule(name=users)
    def enqueue(self, name: str) -> None:
        self.user(name).jobs.enqueue()
        self.models[name].jobs += 1

    @rule(name=users, commits=st.booleans(), data=st.data())
    def transaction(self, name: str, commits: bool, data: st.DataObject) -> None:
        before = copy.deepcopy(self.models[name])
        try:
            with self.inside(name):
                for _ in range(data.draw(st.integers(0, 4))):
                    self.one_of_all(name, data)
                self.compare(name)
                if not commits:
                    raise Abort
        except Abort:
            self.models[name] = before

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        with self.layer.for_user(name).transaction() as self.within:
            try:
                yield
            finally:
                self.within = None

    def one_of_all(self, name: str, data: st.DataObject) -> None:
        match data.draw(st.sampled_from(["add", "add_many", "update", "delete", "where", "session", "set", "search"])):
            case "add":
                self.add(name, data.draw(new_chunks()))
            case "add_many":
                self.add_many(name, data.draw(st.lists(new_chunks(), max_size=4)), "skip")
            case "update":
                self.update(name, data.draw(ids), data.draw(contents), None, None, data.draw(st.none() | vectors), None)
            case "delete":
                self.delete(name, data.draw(ids))
            case "where":
                self.delete_where(name, F.importance >= 0.5)
            case "session":
                self.start_session(name, data.draw(sessions))
            case "set":
                self.set_preference(name, "a", 1, data.draw(st.none() | ids))
            case "search":
                self.search(name, data.draw(vectors), data.draw(st.integers(1, 9)), None, None)

    @rule(name=users)
    def erase(self, name: str) -> None:
        model = self.models[name]
        report = self.layer.erase_user(name)
        assert report.counts == {
            "memory_chunks": len(model.chunks),
            "memory_vectors": sum(chunk["vector"] is not None for chunk in model.chunks.values()),
            "sessions": len(model.sessions),
            "procedural_memory": len(model.preferences),
            "compression_jobs": model.jobs,
        }
        self.models[name] = Model()

    @rule(name=users, new=st.lists(new_chunks(), max_size=4))
    def erase_and_fill_again(self, name: str, new: list[NewChunk]) -> None:
        """With ids that were there before: what was cached of them, or is still in an index, is of somebody else."""
        self.erase(name)
        self.add_many(name, [replace(one, session_id=None) for one in new], "skip")

    @rule()
    def sync(self) -> None:
        self.faults.follow([False])
        eventually(self.is_paid)  # the other's thread may be paying right now, or own the index

    def is_paid(self) -> bool:
        reports = [layer.sync() for layer in self.layers]
        assert all(report.failed == 0 or self.kills for report in reports), reports
        debts: int = self.layer.health()["debts"]
        return debts == 0

    # What is asked.

    @rule(
        name=users,
        query=vectors,
        k=st.integers(1, 20),
        where=filters,
        least=st.none() | st.sampled_from([-1.0, 0.1, 0.5]),
    )
    def search(self, name: str, query: list[int], k: int, where: Any, least: float | None) -> None:
        near: dict[str, list[int]] = {}
        for id, chunk in self.models[name].chunks.items():
            vector = chunk["vector"]
            if vector is None or not passes(where, chunk):
                continue
            similarity = sum(a * b for a, b in zip(vector, query, strict=True)) / math.sqrt(
                sum(a * a for a in vector) * sum(b * b for b in query)
            )
            if least is None or similarity >= least:
                near[id] = vector
        hits = self.user(name).search(embedding=query, k=k, where=where, min_similarity=least)
        assert_nearest(hits, near, query, k)
        for hit in hits:
            self.same(name, hit.chunk.id, hit.chunk)

    @rule(name=users, where=filters, k=st.integers(1, 20))
    def list_newest(self, name: str, where: Any, k: int) -> None:
        hits = self.user(name).search(k=k, where=where)
        expected = [id for id in reversed(self.in_order(name)) if passes(where, self.models[name].chunks[id])]
        assert [hit.chunk.id for hit in hits] == expected[:k]

    @rule(name=users, where=filters, limit=st.integers(1, 5), order=st.sampled_from(["created", "-created"]))
    def list_by_pages(self, name: str, where: Any, limit: int, order: str) -> None:
        expected = [id for id in self.in_order(name) if passes(where, self.models[name].chunks[id])]
        if order == "-created":
            expected.reverse()
        seen: list[str] = []
        after: str | None = None
        while True:
            page = self.user(name).chunks.list(where, limit=limit, order=order, after=after)
            seen += [chunk.id for chunk in page.items]
            if page.next is None:
                break
            after = page.next
        assert seen == expected
        assert self.user(name).chunks.count(where) == len(expected)

    @rule(name=users, wanted=st.lists(ids, max_size=8))
    def get(self, name: str, wanted: list[str]) -> None:
        found = self.user(name).chunks.get_many(wanted)
        assert [chunk.id for chunk in found] == [id for id in dict.fromkeys(wanted) if id in self.models[name].chunks]
        for chunk in found:
            self.same(name, chunk.id, chunk)

    # What always holds.

    def in_order(self, name: str) -> list[str]:
        chunks = self.models[name].chunks
        return sorted(chunks, key=lambda id: (chunks[id]["created_at"], id))

    def note_default_session(self, name: str) -> None:
        """All chunks were skipped; whether a default session was made meanwhile is nobody's business."""
        extra = {session.id for session in self.user(name).sessions.list().items} - self.models[name].sessions
        assert len(extra) <= 1
        for id in extra:
            self.models[name].sessions.add(id)
            self.models[name].default_session = id

    def same(self, name: str, id: str, chunk: Any) -> None:
        expected = self.models[name].chunks[id]
        found = {key: getattr(chunk, key) for key in expected.keys() - {"vector"}}
        assert found == {key: value for key, value in expected.items() if key != "vector"}
        assert (chunk.id, chunk.user_id) == (id, name)
        assert chunk.chroma_id == (None if expected["vector"] is None else id)

    def compare(self, name: str) -> None:
        model, user = self.models[name], self.user(name)
        chunks = {chunk.id: chunk for chunk in user.chunks.list(limit=1000).items}
        assert chunks.keys() == model.chunks.keys()
        for id, chunk in chunks.items():
            self.same(name, id, chunk)
        counted = {session.id: (session.memory_count, session.total_tokens) for session in user.sessions.list().items}
        expected = dict.fromkeys(model.sessions, (0, 0))
        for fields in model.chunks.values():
            count, tokens = expected[fields["session_id"]]
            expected[fields["session_id"]] = (count + 1, tokens + math.ceil(len(fields["content"]) / 4))
        assert counted == expected
        preferences = {one.key: (one.value, one.source_chunk_id) for one in user.procedural.list().items}
        assert preferences == model.preferences
        assert len(user.jobs.list().items) == min(model.jobs, 50)

    @precondition(lambda self: hasattr(self, "layers"))
    @invariant()
    def nothing_leaks(self) -> None:
        for layer in self.layers:
            assert_returned(layer)

    def teardown(self) -> None:
        layers = getattr(self, "layers", [])
        try:
            if layers:
                self.check_at_the_end()
        finally:
            for layer in layers:
                layer.close()

    def check_at_the_end(self) -> None:
        self.sync()
        for name in USERS:
            self.compare(name)
            self.search(name, [1] * DIMENSION, 1000, None, None)
            self.change_over()
            self.search(name, [1] * DIMENSION, 1000, None, None)
        stats = max((layer.stats() for layer in self.layers), key=lambda stats: stats["index_records"] is not None)
        vectors = [chunk["vector"] for model in self.models.values() for chunk in model.chunks.values()]
        assert stats["vectors"] == sum(vector is not None for vector in vectors)
        if stats["dimension"] is not None:
            assert stats["index_records"] == stats["vectors"]


EXAMPLES = {
    ("sqlite", "exact"): 15,
    ("sqlite", "list"): 30,
    ("sqlite", "chroma"): 10,
    ("sqlite", "chroma-server"): 8,
    ("sqlite", "sqlite-vec"): 10,
    ("postgres", "exact"): 7,
    ("postgres", "pgvector"): 7,
}


@pytest.mark.parametrize(("database", "index"), EXAMPLES, ids=lambda name: name)
def test_a_vault_does_what_dicts_do(
    request: pytest.FixtureRequest, tmp_path: Path, migrated_database: Path, database: str, index: str
) -> None:
    if database == "postgres":
        reused: Reused = request.getfixturevalue("reused_postgres")
    faults = Faults()
    if index == "chroma-server":
        server: ChromaServer = request.getfixturevalue("chroma_server")
        relay = Relay(server)
        relay.answer = lambda _: b"" if faults.now() else None  # it hangs up
        request.addfinalizer(relay.close)

    def empty() -> str:
        """The URL of an example's own database."""
        if database == "postgres":
            return reused.emptied()
        return f"sqlite:///{shutil.copy(migrated_database, Path(tempfile.mkdtemp(dir=tmp_path)) / 'memvault.db')}"

    class Machine(VaultMachine):
        def __init__(self) -> None:
            faults.follow([False])
            vectors = f"{relay.url}?database={server.new_database()}" if index == "chroma-server" else index
            super().__init__(empty(), FailingList(faults) if index == "list" else vectors, faults)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES[database, index],
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # the same examples every time; to look for smaller ones takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
