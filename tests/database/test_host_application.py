"""May a service and memvault share a PostgreSQL database, each with tables and migrations of its own?"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlmodel import Session, col, select

from memvault import SchemaError, StorageLayer, create_engine, models
from memvault.database import migrate
from memvault.database.base import VERSION_TABLE
from tests.database.catalog import Contents, Declarations, contents, declarations, tables
from tests.database.hosting import Host, LoginSession
from tests.database.migrating import OURS, alembic, alembic_on, copy_migrations, fill_vault
from tests.postgres import Postgres

SCHEMA = "memvault"

THEIRS = {"public.sessions", "public.invoice", f"public.{Host.VERSION_TABLE}"}


@pytest.fixture(scope="module", params=["postgres18"])
def server(request: pytest.FixtureRequest) -> Postgres:
    """Nothing here depends on the version."""
    running: Postgres = request.getfixturevalue(request.param)
    return running


@pytest.fixture(scope="module")
def host(server: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The service, its first revision generated; each test's database is at the same URL."""
    made = Host(tmp_path_factory.mktemp("service") / "host", server.create_database("fresh"))
    assert "create_table('sessions'" in made.revise("first")
    server.drop_database("fresh")
    return made


def held(server: Postgres, prefix: str) -> tuple[Declarations, Contents]:
    """What is declared and stored under the schema."""
    return (
        {name: value for name, value in declarations(server, "fresh").items() if name.startswith(prefix)},
        {name: value for name, value in contents(server, "fresh").items() if name.startswith(prefix)},
    )


def statements_in(source: str) -> list[str]:
    """What the functions of a revision do."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert len(functions) == 2
    bodies = [ast.unparse(statement) for function in functions for statement in function.body]
    return [statement for statement in bodies if statement != "pass" and not statement.startswith(("'", '"'))]


class TestMigrations:
    @pytest.mark.parametrize("order", [["host", "memvault"], ["memvault", "host"]], ids="-then-".join)
    def test_neither_touches_the_other(self, server: Postgres, fresh: str, host: Host, order: list[str]) -> None:
        for name in order:
            if name == "host":
                host.run("upgrade", "head")
                host.sign_in(server, "fresh")
            else:
                fill_vault(fresh, schema_name=SCHEMA)
        theirs, ours = held(server, "public."), held(server, f"{SCHEMA}.")
        assert set(theirs[1]) == THEIRS
        assert set(ours[1]) == {f"{SCHEMA}.{name}" for name in OURS | {VERSION_TABLE}}
        assert all({**theirs[1], **ours[1]}.values())

        assert statements_in(host.revise("nothing")) == []
        host.forget("nothing")
        migrate.require_declared(fresh, schema_name=SCHEMA)
        assert (held(server, "public."), held(server, f"{SCHEMA}.")) == (theirs, ours)

        first, second = order
        for name in order:
            if name == "host":
                host.run("downgrade", "base")
                assert contents(server, "fresh")[f"public.{Host.VERSION_TABLE}"] == []
            else:
                migrate.downgrade(fresh, "base", schema_name=SCHEMA)
                assert contents(server, "fresh")[f"{SCHEMA}.{VERSION_TABLE}"] == []
            if name == first:
                kept = {"host": ("public.", theirs), "memvault": (f"{SCHEMA}.", ours)}[second]
                assert held(server, kept[0]) == kept[1]
        assert tables(server, "fresh") == {Host.VERSION_TABLE}
        assert tables(server, "fresh", SCHEMA) == {VERSION_TABLE}

    def test_memvault_generates_nothing_for_the_service(
        self, server: Postgres, fresh: str, host: Host, tmp_path: Path
    ) -> None:
        host.run("upgrade", "head")
        migrate.upgrade(fresh, schema_name=SCHEMA)
        copied = copy_migrations(tmp_path / "copy")
        engine = create_engine(fresh, schema_name=SCHEMA)
        alembic_on(engine, copied, "revision", "nothing", autogenerate=True)
        engine.dispose()
        (generated,) = (copied.parent / "alembic" / "versions").glob("*_nothing.py")
        assert statements_in(generated.read_text(encoding="utf-8")) == []
        checked = alembic("-x", f"schema_name={SCHEMA}", "check", cwd=tmp_path, url=fresh)
        assert checked.code == 0, checked.out + checked.err

        # Without a schema of its own it keeps out.
        before = held(server, "")
        for call in (migrate.upgrade, lambda url: migrate.downgrade(url, "base"), fill_vault):
            with pytest.raises(SchemaError, match=r"sessions.*schema_name"):
                call(fresh)
        assert held(server, "") == before


@pytest.fixture
def shared(server: Postgres, fresh: str) -> str:
    """The URL of a database that both are in, with rows."""
    server.execute("CREATE TABLE sessions (id SERIAL PRIMARY KEY, token TEXT, user_id TEXT)", "fresh")
    server.execute("INSERT INTO sessions (token, user_id) VALUES ('t0', 'alice'), ('t1', 'bob')", "fresh")
    fill_vault(fresh, schema_name=SCHEMA)
    return fresh


def tokens(engine: Engine) -> list[str]:
    with Session(engine) as session:
        return sorted(session.exec(select(LoginSession.token)))


class TestOneTransaction:
    """The service's Session, in which memvault writes, too."""

    @pytest.mark.parametrize("commit", [True, False])
    @pytest.mark.parametrize("bound_to", ["the vault's", "the service's", "the service's, with the schema"])
    def test_of_both(self, server: Postgres, shared: str, commit: bool, bound_to: str) -> None:
        with StorageLayer.open(shared, schema_name=SCHEMA) as storage:
            engine = {
                "the vault's": storage.engine,
                "the service's": create_engine(shared),
                "the service's, with the schema": create_engine(shared, schema_name=SCHEMA),
            }[bound_to]
            before = storage.for_user("alice").chunks.count(), len(contents(server, "fresh")[f"{SCHEMA}.sessions"])
            with Session(engine) as session:
                alice = storage.for_user("alice", sql_session=session)
                session.add(LoginSession(token="t2", user_id="alice"))
                conversation = alice.sessions.start()
                alice.chunks.add("together", session_id=conversation.id, embedding=[1.0, 0.0, 0.0])
                login = session.exec(select(LoginSession).where(LoginSession.token == "t2")).one()
                assert login.user_id == "alice"
                assert alice.sessions.get(conversation.id) is not None
                if commit:
                    session.commit()
                else:
                    session.rollback()
            more = int(commit)
            assert tokens(engine) == ["t0", "t1", "t2"][: 2 + more]
            assert storage.for_user("alice").chunks.count() == before[0] + more
            assert len(contents(server, "fresh")[f"{SCHEMA}.sessions"]) == before[1] + more
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
            engine.dispose()

    def test_a_query_by_hand_over_both(self, shared: str) -> None:
        with StorageLayer.open(shared, schema_name=SCHEMA) as storage, Session(storage.engine) as session:
            found = session.exec(
                select(LoginSession.token, models.MemoryChunk.content, models.Session.memory_count)
                .join(models.Session, col(models.Session.user_id) == LoginSession.user_id)
                .join(models.MemoryChunk, col(models.MemoryChunk.session_id) == models.Session.id)
                .where(models.MemoryChunk.user_id == "bob")
                .order_by(col(models.MemoryChunk.content))
            ).all()
        assert found == [("t1", f"memory {place}", 3) for place in range(3)]

    def test_what_memvault_does_alone_leaves_the_service_alone(self, server: Postgres, shared: str) -> None:
        theirs = held(server, "public.")
        engine = create_engine(shared, pool_size=1, max_overflow=0)
        with StorageLayer.open(engine, schema_name=SCHEMA, schema="upgrade") as storage:
            alice = storage.for_user("alice")
            with alice.transaction() as tx:
                tx.chunks.add("text", embedding=[1.0, 0.0, 0.0])
                tx.sessions.start()
            assert len(alice.search(embedding=[1.0, 0.0, 0.0])) == 4
            assert tokens(engine) == ["t0", "t1"]  # on the same connection, whose search path is as it was
            storage.erase_user("alice")
            assert storage.stats()["users"] == 1
        assert held(server, "public.") == theirs
        assert tokens(engine) == ["t0", "t1"]
        engine.dispose()
