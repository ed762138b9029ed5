"""Does a vault keep to the PostgreSQL schema that it was given, and is told what to do where it may not?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import make_url

import memvault
from memvault import ConfigurationError, SchemaError, StorageLayer, create_engine
from memvault.database import migrate
from memvault.database.base import VERSION_TABLE
from tests.database.catalog import advisory_locks, contents, declarations, tables
from tests.database.conftest import NewDatabase
from tests.database.migrating import INI, OURS, alembic, alembic_on, fill_vault, run_python
from tests.postgres import Postgres

ODD_NAMES = ["memvault", "Mem Vault", 'quo"ted', "it's", "100% %s %(x)s", "ümläut", "select", "a.b", "$users"]

MADE = OURS | {VERSION_TABLE}


@pytest.fixture(params=["postgres18"])
def server(request: pytest.FixtureRequest) -> Postgres:
    """Nothing here depends on the version."""
    running: Postgres = request.getfixturevalue(request.param)
    return running


class TestOneSchema:
    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_holds_everything(self, server: Postgres, fresh: str, name: str) -> None:
        fill_vault(fresh, schema_name=name)
        assert tables(server, "fresh", name) == MADE
        assert tables(server, "fresh") == set()
        assert all(contents(server, "fresh").values())
        assert migrate.current(fresh) is None
        assert migrate.current(fresh, schema_name=name) == migrate.head()
        migrate.require_declared(fresh, schema_name=name)
        with StorageLayer.open(fresh, schema_name=name) as storage:  # "check" is the default
            assert [chunk.content for chunk in storage.for_user("alice").chunks.list().items] == [
                "memory 0",
                "memory 1",
                "memory 2",
            ]
        migrate.downgrade(fresh, "base", schema_name=name)
        assert contents(server, "fresh") == {f"{name}.{VERSION_TABLE}": []}

    def test_is_the_engines_too(self, server: Postgres, fresh: str) -> None:
        engine = create_engine(fresh, schema_name="memory")
        migrate.upgrade(engine)
        migrate.require_declared(engine)
        alembic_on(engine, INI, "check")
        fill_vault(fresh, schema_name="memory")
        with StorageLayer.open(engine) as storage:
            assert storage.for_user("bob").chunks.count() == 3
        assert tables(server, "fresh", "memory") == MADE
        engine.dispose()

    def test_a_second_vault_in_the_database_is_another(self, server: Postgres, fresh: str) -> None:
        for name in (None, "one", "two"):
            fill_vault(fresh, schema_name=name)
        with (
            StorageLayer.open(fresh) as default,
            StorageLayer.open(fresh, schema_name="one") as one,
            StorageLayer.open(fresh, schema_name="two") as two,
        ):
            assert len({layer.vault_id for layer in (default, one, two)}) == 3
            one.erase_user("alice")
            two.for_user("alice").chunks.add("a fourth", embedding=[1.0, 2.0, 3.0])
            counts = [layer.for_user("alice").chunks.count() for layer in (default, one, two)]
            assert counts == [3, 0, 4]
            hits = [layer.for_user("alice").search(embedding=[1.0, 2.0, 3.0]) for layer in (default, one, two)]
            assert [len(found) for found in hits] == [3, 0, 4]
        before = contents(server, "fresh")
        migrate.downgrade(fresh, "base", schema_name="one")
        after = contents(server, "fresh")
        assert after.pop(f"one.{VERSION_TABLE}") == []
        assert after == {name: rows for name, rows in before.items() if not name.startswith("one.")}

    def test_engines_of_one_url_keep_theirs_apart(self, fresh: str) -> None:
        fill_vault(fresh, schema_name="one")
        fill_vault(fresh, schema_name="two")
        shared = create_engine(fresh)
        with StorageLayer.open(shared, schema_name="one") as one, StorageLayer.open(shared, schema_name="two") as two:
            one.erase_user("alice")
            assert two.for_user("alice").chunks.count() == 3
            assert one.for_user("bob").chunks.count() == 3
        assert shared.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        shared.dispose()


class TestCommandLine:
    def test_by_the_environment(self, server: Postgres, fresh: str, tmp_path: Path) -> None:
        done = alembic("upgrade", "head", cwd=tmp_path, url=fresh, MEMVAULT_SCHEMA_NAME="by variable")
        assert done.code == 0, done.err
        assert tables(server, "fresh", "by variable") == MADE
        ours = run_python(
            *("-m", "memvault", "db", "current"), cwd=tmp_path, url=fresh, MEMVAULT_SCHEMA_NAME="by variable"
        )
        assert (ours.code, ours.out.strip()) == (0, migrate.head()), ours.err

    def test_by_x_which_wins(self, server: Postgres, fresh: str, tmp_path: Path) -> None:
        done = alembic(
            *("-x", "schema_name=by x", "upgrade", "head"), cwd=tmp_path, url=fresh, MEMVAULT_SCHEMA_NAME="by variable"
        )
        assert done.code == 0, done.err
        assert set(contents(server, "fresh")) == {f"by x.{name}" for name in MADE}

    def test_from_env(self, server: Postgres, fresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"DATABASE_URL": fresh, "SCHEMA_NAME": "by variable", "SCHEMA": "upgrade"}.items():
            monkeypatch.setenv(f"MEMVAULT_{name}", value)
        monkeypatch.setenv("MEMVAULT_VECTORS", "exact")
        with StorageLayer.from_env() as storage:
            storage.for_user("alice").procedural.set("key", 1)
        assert len(contents(server, "fresh")["by variable.procedural_memory"]) == 1
        assert tables(server, "fresh") == set()


class TestRefused:
    @pytest.mark.parametrize(
        "name", ["", " ", "a\0b", "pg_catalog", "pg_mine", "information_schema", "$user", "x" * 64, 7]
    )
    def test_names_that_cannot_be(self, server: Postgres, fresh: str, name: object) -> None:
        calls = (
            lambda: StorageLayer.open(fresh, schema_name=name, schema="upgrade"),  # type: ignore[arg-type]
            lambda: create_engine(fresh, schema_name=name),  # type: ignore[arg-type]
            lambda: migrate.upgrade(fresh, schema_name=name),  # type: ignore[arg-type]
        )
        for call in calls:
            with pytest.raises(ConfigurationError, match="schema_name"):
                call()
        assert declarations(server, "fresh") == {}

    def test_on_sqlite(self, vault_path: Path) -> None:
        url = f"sqlite:///{vault_path}"
        for call in (StorageLayer.open, create_engine, migrate.upgrade):
            with pytest.raises(ConfigurationError, match="PostgreSQL"):
                call(url, schema_name="memvault")

    def test_a_schema_that_was_never_migrated(self, server: Postgres, fresh: str) -> None:
        fill_vault(fresh)
        with pytest.raises(SchemaError, match="memvault db upgrade"):
            StorageLayer.open(fresh, schema_name="elsewhere", vectors="exact")
        assert tables(server, "fresh", "elsewhere") == set()


class TestRights:
    """A role that may do little: what its error says to run is run, and is enough."""

    ROLE = "odd role"

    @pytest.fixture
    def theirs(self, server: Postgres, fresh: str) -> Iterator[str]:
        """The URL of the fresh database for a role with no more rights than any."""
        server.execute(f'CREATE ROLE "{self.ROLE}" LOGIN')
        yield server.url("fresh", self.ROLE)
        server.execute(f'DROP OWNED BY "{self.ROLE}" CASCADE', "fresh")
        server.execute(f'DROP ROLE "{self.ROLE}"')

    @pytest.fixture
    def engine(self, theirs: str) -> Iterator[Engine]:
        engine = create_engine(theirs)
        yield engine
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        engine.dispose()

    @pytest.mark.parametrize("schema", [None, "there", "not there"])
    def test_what_the_error_names_is_enough(
        self, server: Postgres, theirs: str, engine: Engine, schema: str | None, fresh: str
    ) -> None:
        if schema == "there":
            server.execute("CREATE SCHEMA there", "fresh")
        before = declarations(server, "fresh")
        for attempt in (
            lambda: migrate.upgrade(theirs, schema_name=schema),
            lambda: StorageLayer.open(engine, schema_name=schema, schema="upgrade", vectors="exact"),
        ):
            with pytest.raises(SchemaError, match=self.ROLE) as caught:
                attempt()
        assert declarations(server, "fresh") == before
        assert advisory_locks(server) == 0
        advised = re.search(r"can run: (.*)$", str(caught.value))
        assert advised is not None
        server.execute(advised[1], "fresh")
        migrate.upgrade(theirs, schema_name=schema)
        fill_vault(theirs, schema_name=schema)
        assert tables(server, "fresh", schema or "public") == MADE

    def test_one_that_may_only_use_the_tables_needs_no_more(
        self, server: Postgres, fresh: str, theirs: str, engine: Engine
    ) -> None:
        fill_vault(fresh, schema_name="memory")
        server.execute(
            f'GRANT USAGE ON SCHEMA memory TO "{self.ROLE}"; '
            f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA memory TO "{self.ROLE}"; '
            f'GRANT USAGE ON ALL SEQUENCES IN SCHEMA memory TO "{self.ROLE}"',
            "fresh",
        )
        with StorageLayer.open(theirs, schema_name="memory") as storage:
            carol = storage.for_user("carol")
            carol.chunks.add("hers", embedding=[1.0, 0.0, 0.0])
            assert [hit.chunk.content for hit in carol.search(embedding=[1.0, 0.0, 0.0])] == ["hers"]
            storage.erase_user("carol")


def test_the_search_path_of_the_role_is_the_default_schema(server: Postgres, new_database: NewDatabase) -> None:
    """Without a schema_name, memvault is where an administrator put it."""
    url = new_database("fresh")
    server.execute("CREATE SCHEMA chosen; ALTER DATABASE fresh SET search_path TO chosen", "fresh")
    fill_vault(url)
    assert tables(server, "fresh", "chosen") == MADE
    assert tables(server, "fresh") == set()
    by_option = make_url(url).update_query_dict({"options": "-csearch_path=public"})
    engine = memvault.create_engine(by_option)
    migrate.upgrade(engine)
    assert tables(server, "fresh") == MADE
    engine.dispose()
