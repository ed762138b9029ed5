"""Does every statement on an owned table carry the owner? All SQL of the whole API, parsed, held against the handle."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import ColumnElement, Engine, Table, event, true

import memvault
from memvault import ConflictError, F, NewChunk, NotFoundError, StorageLayer, UserMemory, create_engine
from memvault.database import unit as unit_module
from memvault.database.base import owned_tables
from memvault.database.transactions import Database
from memvault.filters import Filter
from memvault.memory import chunks as chunks_module
from memvault.memory.chunk_table import CHUNKS
from memvault.memory.chunks import ChunkStore
from memvault.memory.procedural import ProceduralStore
from memvault.memory.sessions import SessionStore
from memvault.operations.jobs import JobStore
from memvault.vectors.base import IndexSpec, VectorIndex
from memvault.vectors.canonical import VECTORS
from memvault.vectors.exact import ExactIndex
from memvault.vectors.sqlite_vec import SqliteVecIndex
from tests.sql_audit import Leak, owners_bound
from tests.support import HashingEmbedder, ListIndex, rows_of

MIGRATION = "memvault.database.migrate:run"
"""Under which Alembic, and the revisions, send whatever they like."""

CROSS_OWNER = {
    "memvault.database.unit:Unit.owners_of": "an id is one for all users: whoever takes it must learn that it is taken",
    MIGRATION: "a schema has no owner: DDL, and foreign_key_check over all rows",
    "memvault.operations.census:stats": "an operator counts the rows of all",
    "memvault.indexing.doctor:Doctor.examine": "the doctor compares all of SQL with all of the index",
    "memvault.indexing.doctor:Doctor._ids_in_sql": "the doctor compares all of SQL with all of the index",
    "memvault.indexing.doctor:Doctor._without_vector": "the doctor compares all of SQL with all of the index",
    "memvault.indexing.doctor:_states": "the doctor compares all of SQL with all of the index",
    "memvault.indexing.truth:Truth._pages": "the doctor examines all of SQL",
    "memvault.indexing.truth:Truth._miscounted": "the doctor counts everybody's vectors",
    "memvault.indexing.truth:Truth._mend": "a vector may stand under another user than its chunk",
    "memvault.vectors.canonical:mark_all": "an index that is new owes every vector of the vault",
    "memvault.vectors.exact:ExactIndex.open": "the dimension is one for all",
    "memvault.vectors.exact:ExactIndex.fetch": "the doctor compares all of SQL with all of the index",
    "memvault.vectors.exact:ExactIndex.scan": "the doctor compares all of SQL with all of the index",
    "memvault.vectors.exact:ExactIndex.count": "the vault's vectors are counted, where no user is named",
    "memvault.vectors.sqlite_vec:SqliteVecIndex.create": "an index in the database begins with every vector",
    "memvault.vectors.within:InDatabase._metadata": "the doctor compares all of SQL with all of the index",
}
"""Functions that reach the rows of several users, and why they may. What these themselves send is not audited."""

OF_SQLITE_VEC = {name for name in CROSS_OWNER if "sqlite_vec" in name or "within" in name}

OWNED = {table.name for table in owned_tables()}
PACKAGE = Path(memvault.__file__).parent

ALICE, BOB, CAROL = "user_alice", "user_bob", "user_carol"
MANY = 80
"""More chunks than an exact search looks at before it lists what a filter lets through, for k = 1; and more than one
transaction takes here.
"""


class OwnerAudit:
    """Holds each statement of an engine against the user for whom it may be sent; None: nobody looks."""

    def __init__(self, engine: Engine) -> None:
        self.users: set[str] | None = None
        self.callers: set[str] = set()
        """Functions of memvault under which statements were sent."""
        self.cross_owner: set[str] = set()
        self.statements = 0
        self.leaks: list[Leak] = []
        event.listen(engine, "before_cursor_execute", self._see)

    @contextmanager
    def of(self, *users: str) -> Iterator[None]:
        """Within, every statement is for one of these users."""
        self.users = set(users)
        try:
            yield
        finally:
            self.users = None
            leaks, self.leaks = self.leaks, []
        if leaks:  # raised where nobody could see it
            raise leaks[0]

    def _see(self, _connection: Any, _cursor: Any, sql: str, parameters: Any, _context: Any, executemany: bool) -> None:
        if self.users is None:
            return
        callers = list(calling_functions())
        self.callers.update(function for _, function in callers)
        names = [f"{module}:{function}" for module, function in callers if function != "Unit.execute"]
        caller = MIGRATION if MIGRATION in names else next(iter(names), "")
        if caller in CROSS_OWNER:
            self.cross_owner.add(caller)
            return
        self.statements += 1
        try:
            for row in parameters if executemany else [parameters]:
                bound = owners_bound(sql, row, OWNED)
                if bound is not None and not bound & self.users:
                    raise Leak(f"{caller} reaches the rows of {bound}, not {self.users}: {sql}")
        except Leak as leak:
            self.leaks.append(leak)
            raise


def calling_functions() -> Iterator[tuple[str, str]]:
    """The functions of memvault that are running, innermost first, each with its module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("memvault."):
            yield module, frame.f_code.co_qualname.partition(".<locals>")[0]
        frame = frame.f_back


# What is done while all of it is watched.


def fill(layer: StorageLayer) -> None:
    """Two others have memories of all kinds, under ids that are known."""
    for name in (BOB, CAROL):
        user = layer.for_user(name)
        user.sessions.start(id=f"sess_of_{name}")
        user.chunks.add_many(
            [
                NewChunk(f"memory {number} of tea", id=f"{name}_{number}", session_id=f"sess_of_{name}")
                for number in range(6)
            ]
        )
        user.chunks.add("says little", id=f"{name}_rule", memory_type="procedural")
        user.procedural.set("style", {"tone": name}, source_chunk_id=f"{name}_0")
        user.jobs.enqueue()


def exercise_user(user: UserMemory) -> None:
    """Everything that can be done for one user, with the others' ids where ids are asked for."""
    session = user.sessions.start()
    user.sessions.touch(session.id)
    first = user.chunks.add("likes green tea", session_id=session.id, importance=0.9, metadata={"user_id": BOB})
    many = user.chunks.add_many([NewChunk(f"memory {number} of tea", importance=0.1) for number in range(MANY)])
    assert len(user.chunks.add_many([NewChunk("again", id=first.id), NewChunk("other")], on_conflict="skip")) == 1
    rule = user.chunks.add("never before noon", memory_type="procedural", session_id=session.id)
    with pytest.raises(ConflictError):
        user.chunks.add("taken", id=f"{BOB}_1")
    with pytest.raises(NotFoundError):
        user.chunks.add("elsewhere", session_id=f"sess_of_{BOB}")

    assert user.chunks.get(f"{BOB}_1") is None
    assert user.chunks.get_many([first.id, f"{BOB}_1", f"{CAROL}_1"]) == [first]
    assert user.chunks.count() == MANY + 3
    assert user.chunks.count((F.user_id == BOB) | (F.importance >= 0)) == MANY + 3
    assert user.chunks.count(F.session_id == f"sess_of_{BOB}") == 0
    page = user.chunks.list(limit=50)
    assert len(user.chunks.list((F.id == first.id) | (F.id != "x"), order="-created", limit=99).items) == MANY + 3
    assert len(user.chunks.list(limit=50, after=page.next, memory_type="episodic").items) == MANY + 2 - 50
    assert user.chunks.list(session_id=f"sess_of_{BOB}", include_compressed=True).items == []

    for where in every_filter(first.created_at):
        assert all(hit.chunk.user_id == user.user_id for hit in user.search("green tea", k=1, where=where))
    assert len(user.search("memory of tea", k=500)) == MANY + 2
    assert len(user.search(embedding=user.embed(["tea"])[0], k=2, min_similarity=-1.0, mode="vector")) == 2
    assert user.search("unheard of", k=1, where=F.content == "never before noon") == []
    assert len(user.search(k=500, include_compressed=True)) == MANY + 3

    user.chunks.update(first.id, content="likes black tea", importance=0.8, expected_version=1)
    user.chunks.update(first.id, metadata={})
    user.chunks.update(many[0].id, importance=0.2)
    user.chunks.update(rule.id, content="never before one")
    for missing in (f"{BOB}_1", "absent"):
        with pytest.raises(NotFoundError):
            user.chunks.update(missing, content="mine now")
        assert not user.chunks.delete(missing)
    assert user.chunks.delete(many[1].id)
    assert user.chunks.delete_many([many[2].id, f"{BOB}_1", rule.id]) == 2
    assert user.chunks.delete_many((F.content == "memory 3 of tea") | (F.user_id == CAROL)) == 1

    user.procedural.set("style", {"tone": "direct"}, source_chunk_id=first.id)
    user.procedural.set("style", {"tone": "dry"}, confidence=0.5)
    with pytest.raises(NotFoundError):
        user.procedural.set("style", 1, source_chunk_id=f"{BOB}_0")
    preference = user.procedural.get("style")
    assert preference is not None
    assert user.procedural.list().items == [preference]
    assert user.procedural.list(limit=1, after=None).next is None
    assert user.procedural.delete("style")

    job = user.jobs.enqueue()
    assert user.jobs.get(job.id) == job
    assert user.jobs.list(limit=1).items == [job]
    assert user.sessions.get(f"sess_of_{BOB}") is None
    with pytest.raises(NotFoundError):
        user.sessions.end(f"sess_of_{BOB}")
    sessions = user.sessions.list(limit=1)
    assert len(user.sessions.list(limit=10, after=sessions.next, order="created").items) == 1
    user.sessions.end(session.id)

    with user.transaction() as tx:
        chunk = tx.chunks.add("in a transaction", session_id=tx.sessions.start().id)
        tx.procedural.set("key", [1], source_chunk_id=chunk.id)
        assert tx.search("in a transaction", k=1)[0].chunk == chunk
        with pytest.raises(ConflictError):
            tx.chunks.add("taken", id=f"{CAROL}_1")
        tx.chunks.delete(chunk.id)
        tx.jobs.enqueue()


def every_filter(when: datetime) -> list[Filter]:
    """Each field and each operator, and what they are joined by."""
    return [
        *(F.id == BOB, F.user_id == BOB, F.user_id != BOB, F.user_id.in_([BOB, CAROL]), ~F.user_id.in_([BOB])),
        *(
            F.session_id != BOB,
            F.memory_type.in_(["episodic", "working"]),
            F.content < BOB,
            F.importance.between(0.5, 1),
        ),
        *(F.token_count > 1, F.compressed == True, F.compression_source == BOB, F.source_session_id < BOB),  # noqa: E712
        *(F.chroma_id != None, ~(F.chroma_id < BOB), F.created_at <= when, F.updated_at > when, F.version <= 1),  # noqa: E711
        *((F.user_id == BOB) | (F.importance > 0), ~((F.user_id == BOB) & (F.importance > 0)), F.id.in_([])),
    ]


def exercise_vault(audit: OwnerAudit, layer: StorageLayer, exact: StorageLayer) -> None:
    """Everything for Alice, by the index (``layer``) and without (``exact``); then what an operator does for all."""
    embedder = HashingEmbedder()
    lines = [
        json.dumps({"user_id": BOB, "content": "imported", "id": "imported", "session_id": "sess_imported"}),
        json.dumps({"user_id": BOB, "content": "imported, too"}),
    ]
    with audit.of(ALICE):
        for one in (layer, exact):
            exercise_user(one.for_user(ALICE))
            assert one.import_user(lines, ALICE).added == 2
            assert one.import_user(lines, ALICE).skipped == 2
            assert one.erase_user(ALICE).counts["memory_chunks"] > MANY
            assert layer.sync().owed == 0
        assert list(layer.user_ids()) == [BOB, CAROL]
        # The exact index as any other index: only an operator's tools use it so.
        exact.for_user(ALICE).chunks.add_many([NewChunk("one"), NewChunk("two")])
        index = ExactIndex(Database(layer.engine), CHUNKS)
        index.open(IndexSpec(layer.vault_id, embedder.model, embedder.dimension))
        assert len(index.query(ALICE, embedder.embed_documents(["owed"])[0], 99, F.importance >= 0)) == 2
        assert index.count(ALICE) == 2 < index.count() == sum(len(batch) for batch in index.scan(2))
        assert [record.user_id for record in index.fetch([f"{BOB}_1"])] == [BOB]
        # More than one transaction takes: what is referred to is looked up before the first.
        much = [NewChunk("much") for _ in range(MANY)]
        with pytest.raises(NotFoundError):
            exact.for_user(ALICE).chunks.add_many([*much, NewChunk("elsewhere", session_id=f"sess_of_{BOB}")])
        with pytest.raises(ConflictError):
            exact.for_user(ALICE).chunks.add_many([*much, NewChunk("taken", id=f"{BOB}_1")])
    with audit.of(ALICE, BOB, CAROL):
        layer.indexing = "manual"
        for name in (ALICE, BOB, CAROL):
            layer.for_user(name).chunks.add("owed")
        assert layer.sync().owed == 0
        assert layer.import_user([json.dumps({"user_id": name, "content": "same"}) for name in (ALICE, BOB)]).users == 2
        layer.health()
        if layer.stats()["index"] == "sqlite-vec":
            inside = SqliteVecIndex(Database(layer.engine), CHUNKS)
            inside.open(IndexSpec(layer.vault_id, embedder.model, embedder.dimension))
            assert inside.count() == sum(len(batch) for batch in inside.scan(5)) == layer.stats()["vectors"]
        assert layer.create_index() is False
        assert layer.doctor().clean
    damage(layer)
    with audit.of(ALICE, BOB, CAROL):
        report = layer.doctor(repair=True)
        assert report.missing >= 1
        assert report.repaired >= report.missing + report.stale
        assert layer.doctor().clean


def damage(layer: StorageLayer) -> None:
    """A vector is lost, another one changed."""
    elsewhere = HashingEmbedder().embed_documents(["something else"])[0].tobytes()
    with layer.engine.begin() as connection:
        connection.execute(VECTORS.delete().where(VECTORS.c.chunk_id == f"{BOB}_1"))
        connection.execute(VECTORS.update().where(VECTORS.c.chunk_id == f"{BOB}_2").values(vector=elsewhere))


@contextmanager
def watched(path: Path, vectors: VectorIndex | str) -> Iterator[tuple[OwnerAudit, StorageLayer, StorageLayer]]:
    """A new vault with others' memories in it, and its audit, which saw it being founded.

    Of the two storage layers, the first asks the index, where it is given, and the second does not.
    """
    engine = create_engine(f"sqlite:///{path}")
    audit = OwnerAudit(engine)
    embedder = HashingEmbedder()
    with (
        pytest.MonkeyPatch.context() as patch,
        audit.of(),
        StorageLayer.open(engine, vectors=vectors, embedder=embedder, exact_limit=0) as layer,
        StorageLayer.open(engine, vectors=vectors, embedder=embedder) as exact,
    ):
        audit.users = None
        patch.setattr(chunks_module, "TRANSACTION_SIZE", MANY - 1)
        fill(layer)
        yield audit, layer, exact
    engine.dispose()


# The product as it is.


def public_methods() -> set[str]:
    """All that a caller may call and that sends SQL."""
    without_sql = {
        "for_user",
        "embed",
        "close",
        "transaction",
        "user_ids",
        "from_env",
        "create_index",
        "compact",
    }  # or not always
    classes = (StorageLayer, UserMemory, ChunkStore, SessionStore, ProceduralStore, JobStore)
    return {
        member.__qualname__
        for one in classes
        for name, member in inspect.getmembers(one, inspect.isroutine)
        if not name.startswith("_") and name not in without_sql
    }


@pytest.mark.parametrize("vectors", ["chroma", "exact", "sqlite-vec", pytest.param(ListIndex(), id="list")])
def test_every_statement_carries_the_owner(tmp_path: Path, vectors: VectorIndex | str) -> None:
    with watched(tmp_path / "memvault.db", vectors) as (audit, layer, exact):
        others = rows_of(layer, BOB, CAROL)
        with audit.of(ALICE):
            exercise_user(layer.for_user(ALICE))
        assert rows_of(layer, BOB, CAROL) == others
        with audit.of(ALICE):
            layer.erase_user(ALICE)
        exercise_vault(audit, layer, exact)
    assert audit.statements > 1000
    assert public_methods() - audit.callers == set()
    stale = CROSS_OWNER.keys() - audit.cross_owner
    # An index that lives in SQL is never owed everything, and the exact one cannot differ from it.
    unused = {"memvault.vectors.canonical:mark_all"} if vectors in ("exact", "sqlite-vec") else set()
    if vectors == "exact":
        unused.add("memvault.indexing.doctor:Doctor._without_vector")
    assert stale == unused | (set() if vectors == "sqlite-vec" else OF_SQLITE_VEC)


# The product with a predicate taken out: the audit has to fail.


@dataclass(frozen=True)
class Site:
    """One place in the product where a statement on an owned table is built."""

    file: Path
    function: str
    kind: str
    lines: range

    def __str__(self) -> str:
        return f"{self.file.stem}:{self.lines.start}:{self.function}-{self.kind}"


def sites() -> Iterator[Site]:
    """Every ``unit.select``, ``unit.update`` and ``unit.delete`` of the product."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Attribute(ast.Name("unit"), "select" | "update" | "delete" as kind)):
                        yield Site(file, function.name, kind, range(node.lineno, (node.end_lineno or node.lineno) + 1))


SITES = list({(site.file, site.lines): site for site in sites()}.values())


def without_owner(applies: Callable[[FrameType, bool], bool]) -> Callable[..., ColumnElement[bool]]:
    """`owner_is`, which for some statements lets everybody's rows through; asked with the frame of the builder."""

    def owner_is(table: Table, user_id: str, *, by_key: bool = False) -> ColumnElement[bool]:
        return true() if applies(sys._getframe(1), by_key) else OWNER_IS(table, user_id, by_key=by_key)

    return owner_is


OWNER_IS = unit_module.owner_is


def expect_a_leak(
    tmp_path: Path, break_the_product: Callable[[], None], vectors: VectorIndex | str | None = None
) -> None:
    with watched(tmp_path / "memvault.db", vectors or ListIndex()) as (audit, layer, exact):
        break_the_product()
        with pytest.raises(Leak):
            exercise_vault(audit, layer, exact)


def test_there_are_sites() -> None:
    assert len(SITES) > 20
    assert {site.kind for site in SITES} == {"select", "update", "delete"}


@pytest.mark.parametrize("by_key", [None, True, False], ids=["any", "by-key", "by-user"])
@pytest.mark.parametrize("kind", [None, "select", "update", "delete"])
def test_a_kind_of_statement_without_its_owner_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, by_key: bool | None
) -> None:
    def applies(builder: FrameType, keyed: bool) -> bool:
        return kind in (None, builder.f_code.co_name) and by_key in (None, keyed)

    expect_a_leak(tmp_path, lambda: monkeypatch.setattr(unit_module, "owner_is", without_owner(applies)))


@pytest.mark.parametrize("site", SITES, ids=str)
def test_one_statement_without_its_owner_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    def applies(builder: FrameType, _by_key: bool) -> bool:
        caller = builder.f_back
        assert caller is not None
        return caller.f_code.co_filename == str(site.file) and caller.f_lineno in site.lines

    vectors = "sqlite-vec" if site.file.stem in ("within", "sqlite_vec") else None
    expect_a_leak(tmp_path, lambda: monkeypatch.setattr(unit_module, "owner_is", without_owner(applies)), vectors)


@pytest.mark.parametrize("method", ["insert", "insert_new"])
def test_a_row_inserted_for_another_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    insert = getattr(unit_module.Unit, method)

    def for_carol(unit: unit_module.Unit, table: Table, rows: Sequence[Any]) -> Any:
        other = unit_module.Unit(unit.connection, CAROL)
        return insert(other, table, rows)

    expect_a_leak(tmp_path, lambda: monkeypatch.setattr(unit_module.Unit, method, for_carol))


# The audit itself: what it lets through, and what not.

SAMPLE = {"c", "v"}


@pytest.mark.parametrize(
    ("sql", "parameters"),
    [
        ("SELECT c.id FROM c WHERE c.user_id = ?", ["me"]),
        ("SELECT c.id FROM c WHERE +c.user_id = ? AND c.id IN (?, ?)", ["me", 1, 2]),
        ("SELECT c.id FROM c WHERE c.x = ? AND c.y = '?' AND (? = c.user_id)", [1, "me"]),
        ("SELECT 1 FROM c JOIN v ON c.id = v.c WHERE c.user_id = ? AND v.user_id = ?", ["me", "me"]),
        ("SELECT 1 FROM c AS a JOIN v AS b ON a.id = b.c AND b.user_id = ? WHERE a.user_id = ?", ["me", "me"]),
        ("SELECT 1 FROM free WHERE free.id IN (SELECT c.id FROM c WHERE c.user_id = ?)", ["me"]),
        ("WITH t AS (SELECT c.id FROM c WHERE c.user_id = ?) SELECT t.id FROM t", ["me"]),
        ("UPDATE c SET x=?, y=(c.y + ?) WHERE c.user_id = ? AND c.id = ?", [1, 2, "me", 3]),
        ("DELETE FROM c WHERE +c.user_id = ? AND c.id IN (?)", ["me", 1]),
        ("INSERT INTO c (id, user_id) VALUES (?, ?) ON CONFLICT DO NOTHING", [1, "me"]),
        ("INSERT INTO c (id, user_id) SELECT v.id, ? FROM v WHERE v.user_id = ?", ["me", "me"]),
    ],
)
def test_a_confined_statement_passes(sql: str, parameters: list[Any]) -> None:
    assert owners_bound(sql, parameters, SAMPLE) == {"me"}


@pytest.mark.parametrize(
    ("sql", "parameters"),
    [
        ("SELECT c.id FROM c", []),
        ("SELECT c.id FROM c WHERE c.id = ?", ["me"]),
        ("SELECT c.id FROM c WHERE c.user_id = ? OR c.id = ?", ["me", 1]),
        ("SELECT c.id FROM c WHERE NOT c.user_id = ?", ["me"]),
        ("SELECT c.id FROM c WHERE c.user_id != ?", ["me"]),
        ("SELECT c.id FROM c WHERE c.user_id = c.user_id", []),
        ("SELECT c.id FROM c WHERE c.user_id IN (?)", ["me"]),
        ("SELECT c.id FROM c WHERE c.user_id = 'me'", []),
        ("SELECT 1 FROM c JOIN v ON c.id = v.c WHERE c.user_id = ?", ["me"]),
        ("SELECT 1 FROM c, v WHERE c.user_id = ? AND v.id = ?", ["me", 1]),
        ("SELECT 1 FROM (c JOIN v ON c.id = v.c) WHERE c.user_id = ?", ["me"]),
        ("SELECT 1 FROM c AS a JOIN c AS b ON a.id = b.id WHERE a.user_id = ?", ["me"]),
        ("SELECT 1 FROM free WHERE free.id IN (SELECT c.id FROM c)", []),
        ("SELECT (SELECT count(*) FROM c) FROM free", []),
        ("SELECT 1 FROM c WHERE c.user_id = ? UNION ALL SELECT 1 FROM v", ["me"]),
        ("WITH t AS (SELECT c.id FROM c) SELECT t.id FROM t", []),
        ("UPDATE c SET x=? WHERE c.id = ?", [1, "me"]),
        ("UPDATE c SET user_id=? WHERE c.user_id = ?", ["you", "me"]),
        ("UPDATE c SET x=v.x FROM v WHERE c.user_id = ? AND v.id = c.id", ["me"]),
        ("DELETE FROM c", []),
        ("DELETE FROM c WHERE c.id IN (SELECT v.c FROM v WHERE v.user_id = ?)", ["me"]),
        ("INSERT INTO c (id) VALUES (?)", ["me"]),
        ("INSERT INTO c VALUES (?, ?)", [1, "me"]),
        ("INSERT INTO c (id, user_id) VALUES (?, 'me')", [1]),
        ("INSERT OR REPLACE INTO c (id, user_id) VALUES (?, ?)", [1, "me"]),
        ("INSERT INTO c (id, user_id) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET x = 1", [1, "me"]),
        ("INSERT INTO c (id, user_id) SELECT v.id, v.user_id FROM v WHERE v.user_id = ?", ["me"]),
        ("INSERT INTO c (id, user_id) SELECT v.id, ? FROM v", ["me"]),
        ("INSERT INTO c (id, user_id) VALUES (?, ?), (?, ?)", [1, "me", 2, "you"]),
        ("INSERT INTO free (id) SELECT v.id FROM v", []),
        ("SELECT 1 FROM c JOIN v ON c.id = v.c WHERE c.user_id = ? AND v.user_id = ?", ["me", "you"]),
        ("DROP TABLE c", []),
        ("PRAGMA foreign_key_check", []),
        ("VACUUM", []),
        ("SELECT 1; DELETE FROM c", []),
        ("SELECT FROM WHERE (", []),
    ],
)
def test_an_unconfined_statement_is_a_leak(sql: str, parameters: list[Any]) -> None:
    with pytest.raises(Leak):
        owners_bound(sql, parameters, SAMPLE)


def test_nothing_owned_binds_nobody() -> None:
    assert owners_bound("SELECT free.id FROM free WHERE free.user_id = ?", ["me"], SAMPLE) is None
    assert owners_bound("SAVEPOINT one", [], SAMPLE) is None
