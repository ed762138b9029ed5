"""Is the schema that the migrations make the declared one, the seed's included, and what does it refuse?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import IntegrityError

from memvault import StorageLayer, create_engine, models
from memvault.database import migrate
from memvault.database.base import VERSION_TABLE
from tests.database.migrating import OURS, alembic_on, copy_migrations, declarations, raw, remove_revisions, url_of

SEED = {
    "memory_chunks": (
        "id user_id session_id memory_type content importance token_count compressed compression_source "
        "source_session_id chroma_id created_at updated_at metadata"
    ).split(),
    "procedural_memory": "id user_id key value confidence updated_at source_chunk_id".split(),
    "sessions": "id user_id started_at last_activity ended_at compressed memory_count total_tokens".split(),
    "compression_jobs": (
        "id user_id status sessions_compressed memories_created error created_at completed_at"
    ).split(),
}

SEED_INDEXES = {
    # name: table, first columns, unique
    "idx_memory_user": ("memory_chunks", ["user_id"], False),
    "idx_memory_user_type": ("memory_chunks", ["user_id", "memory_type"], False),
    "idx_memory_session": ("memory_chunks", ["session_id"], False),
    "idx_memory_compressed": ("memory_chunks", ["user_id", "compressed"], False),
    "idx_proc_user_key": ("procedural_memory", ["user_id", "key"], True),
    "idx_sessions_user": ("sessions", ["user_id"], False),
}

NOW = "2024-05-01 12:00:00.000000"

ROWS: dict[str, dict[str, Any]] = {
    # One valid row a table, parents first; of the seed's tables no more than the seed's columns.
    "sessions": {
        "id": "sess_00000001",
        "user_id": "alice",
        "started_at": NOW,
        "last_activity": NOW,
        "ended_at": None,
        "compressed": False,
        "memory_count": 1,
        "total_tokens": 6,
    },
    "memory_chunks": {
        "id": "mem_000000000001",
        "user_id": "alice",
        "session_id": "sess_00000001",
        "memory_type": "semantic",
        "content": "Prefers concise answers",
        "importance": 0.72,
        "token_count": 6,
        "compressed": False,
        "compression_source": None,
        "source_session_id": None,
        "chroma_id": "mem_000000000001",
        "created_at": NOW,
        "updated_at": NOW,
        "metadata": '{"topic": "style"}',
    },
    "procedural_memory": {
        "id": "proc_000000000001",
        "user_id": "alice",
        "key": "communication_style",
        "value": '{"tone": "direct"}',
        "confidence": 0.9,
        "updated_at": NOW,
        "source_chunk_id": "mem_000000000001",
    },
    "compression_jobs": {
        "id": "job_00000001",
        "user_id": "alice",
        "status": "queued",
        "sessions_compressed": 0,
        "memories_created": 0,
        "error": None,
        "created_at": NOW,
        "completed_at": None,
    },
    "index_outbox": {
        "index_id": 1,
        "chunk_id": "mem_000000000001",
        "user_id": "alice",
        "generation": 1,
        "attempts": 0,
        "marked_at": NOW,
    },
    "owners": {
        "number": 1,
        "user_id": "alice",
        "incarnation": "0" * 32,
        "epoch": 0,
        "removed_epoch": 0,
        "vector_count": 0,
    },
    "vector_indexes": {
        "id": 1,
        "spec": "exact",
        "model": "none",
        "transactional": True,
        "state": "live",
        "created_at": NOW,
    },
}


class Violation(NamedTuple):
    table: str
    column: str
    value: object
    constraint: str


VIOLATIONS = [
    *(
        Violation("memory_chunks", "memory_type", value, "ck_memory_chunks_memory_type")
        for value in ("fact", "Semantic", "")
    ),
    *(
        Violation("memory_chunks", "importance", value, "ck_memory_chunks_importance_range")
        for value in (-0.01, 1.01, 9e999, -9e999)
    ),
    Violation("memory_chunks", "token_count", -1, "ck_memory_chunks_token_count_not_negative"),
    Violation("memory_chunks", "version", 0, "ck_memory_chunks_version_from_one"),
    *(
        Violation("procedural_memory", "confidence", value, "ck_procedural_memory_confidence_range")
        for value in (-0.01, 1.01)
    ),
    Violation("sessions", "memory_count", -1, "ck_sessions_memory_count_not_negative"),
    Violation("sessions", "total_tokens", -1, "ck_sessions_total_tokens_not_negative"),
    *(Violation("compression_jobs", "status", value, "ck_compression_jobs_status") for value in ("done", "QUEUED", "")),
    Violation("compression_jobs", "sessions_compressed", -1, "ck_compression_jobs_sessions_compressed_not_negative"),
    Violation("compression_jobs", "memories_created", -1, "ck_compression_jobs_memories_created_not_negative"),
    Violation("compression_jobs", "attempts", -1, "ck_compression_jobs_attempts_not_negative"),
    Violation("index_outbox", "attempts", -1, "ck_index_outbox_attempts_not_negative"),
    Violation("owners", "vector_count", -1, "ck_owners_vector_count_not_negative"),
    Violation("vector_indexes", "state", "dead", "ck_vector_indexes_state"),
]


@pytest.fixture
def migrated(tmp_path: Path) -> Path:
    path = tmp_path / "migrated.db"
    migrate.upgrade(url_of(path))
    return path


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    path = tmp_path / "declared.db"
    engine = create_engine(url_of(path))
    models.metadata.create_all(engine)
    engine.dispose()
    return path


@pytest.fixture
def engine(migrated: Path) -> Iterator[Engine]:
    engine = create_engine(url_of(migrated))
    yield engine
    engine.dispose()


def insert(engine: Engine, table: str, **changes: object) -> None:
    row = {**ROWS[table], **changes}
    names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({places})"), row)


def reflected(path: Path) -> dict[str, dict[str, Any]]:
    """What SQLAlchemy reads back from a file, table by table."""
    engine = create_engine(url_of(path))
    inspector = inspect(engine)

    def by_name(found: list[Any]) -> list[Any]:
        return sorted(found, key=lambda item: str(item["name"]))

    facts = {
        table: {
            "columns": [{**column, "type": str(column["type"])} for column in inspector.get_columns(table)],
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": by_name(inspector.get_foreign_keys(table)),
            "unique": by_name(inspector.get_unique_constraints(table)),
            "checks": by_name(inspector.get_check_constraints(table)),
            "indexes": [
                {**index, "dialect_options": {key: str(value) for key, value in index["dialect_options"].items()}}
                for index in by_name(inspector.get_indexes(table))
            ],
        }
        for table in inspector.get_table_names()
        if table != VERSION_TABLE
    }
    engine.dispose()
    return facts


class TestMigratedIsDeclared:
    def test_statement_by_statement(self, migrated: Path, declared: Path) -> None:
        made = declarations(migrated)
        del made[VERSION_TABLE]
        assert made == declarations(declared)

    def test_as_reflected(self, migrated: Path, declared: Path) -> None:
        made = reflected(migrated)
        assert set(made) == OURS
        assert made == reflected(declared)

    def test_every_constraint_has_a_name(self, migrated: Path) -> None:
        for table, facts in reflected(migrated).items():
            # SQLite takes AUTOINCREMENT with the column's own PRIMARY KEY only, and that has no name.
            keys = [] if table == "owners" else [facts["primary key"]]
            named = [*keys, *facts["foreign keys"], *facts["unique"], *facts["checks"]]
            assert all(constraint["name"] for constraint in named), table

    def test_a_revision_generated_from_nothing_is_the_schema_and_needs_neither_memvault_nor_sqlmodel(
        self, tmp_path: Path, declared: Path
    ) -> None:
        ini = copy_migrations(tmp_path / "copy")
        versions = remove_revisions(ini)
        path = tmp_path / "generated.db"
        engine = create_engine(url_of(path))
        alembic_on(engine, ini, "revision", "everything", autogenerate=True)
        (generated,) = versions.glob("*.py")
        source = generated.read_text(encoding="utf-8")
        assert "memvault" not in source.replace(VERSION_TABLE, "")
        assert "sqlmodel" not in source
        alembic_on(engine, ini, "upgrade", "head")
        engine.dispose()
        made = declarations(path)
        del made[VERSION_TABLE]
        assert made == declarations(declared)


class TestSeed:
    @pytest.mark.parametrize("table", SEED)
    def test_columns_in_the_seeds_order(self, table: str, migrated: Path) -> None:
        with raw(migrated) as connection:
            columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
        assert [column[1] for column in columns[: len(SEED[table])]] == SEED[table]
        for _, name, _, not_null, default, _ in columns[len(SEED[table]) :]:
            assert default is not None or not not_null, f"{name} would refuse an INSERT that does not know it"

    @pytest.mark.parametrize("name", SEED_INDEXES)
    def test_indexes(self, name: str, migrated: Path) -> None:
        table, columns, unique = SEED_INDEXES[name]
        found = {index["name"]: index for index in reflected(migrated)[table]["indexes"]}[name]
        assert found["column_names"][: len(columns)] == columns
        assert bool(found["unique"]) is unique
        if unique:
            assert found["column_names"] == columns

    def test_an_insert_of_the_seeds_columns_is_a_row_for_the_api(self, migrated: Path, engine: Engine) -> None:
        for table in ("sessions", "memory_chunks", "procedural_memory", "compression_jobs"):
            assert list(ROWS[table]) == SEED[table]
            insert(engine, table)
        with StorageLayer.open(url_of(migrated), vectors="exact", embedder="none", schema="check") as storage:
            alice = storage.for_user("alice")
            chunk = alice.chunks.get("mem_000000000001")
            assert chunk is not None
            assert (chunk.version, chunk.metadata, chunk.importance) == (1, {"topic": "style"}, 0.72)
            assert chunk.created_at.isoformat() == "2024-05-01T12:00:00+00:00"
            preference = alice.procedural.get("communication_style")
            assert preference is not None
            assert preference.value == {"tone": "direct"}
            session, job = alice.sessions.get("sess_00000001"), alice.jobs.get("job_00000001")
            assert session is not None
            assert job is not None
            assert (session.memory_count, job.status) == (1, "queued")


class TestRefusals:
    @pytest.fixture
    def engine(self, database_url: str) -> Iterator[Engine]:
        engine = create_engine(database_url)
        yield engine
        engine.dispose()

    @pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda one: f"{one.table}.{one.column}={one.value!r}")
    def test_each_check_refuses(self, violation: Violation, engine: Engine) -> None:
        if violation.table in ("memory_chunks", "procedural_memory"):
            insert(engine, "sessions")
        if violation.table == "procedural_memory":
            insert(engine, "memory_chunks")
        with pytest.raises(IntegrityError, match=rf"(?i)check constraint .*\b{violation.constraint}\b"):
            insert(engine, violation.table, **{violation.column: violation.value})
        insert(engine, violation.table)

    @pytest.mark.usefixtures("vault_path")
    @pytest.mark.parametrize(
        ("table", "column"), [("memory_chunks", "importance"), ("procedural_memory", "confidence")]
    )
    def test_a_text_is_no_number_though_sqlite_would_take_it(self, engine: Engine, table: str, column: str) -> None:
        insert(engine, "sessions")
        if table == "procedural_memory":
            insert(engine, "memory_chunks")
        with pytest.raises(IntegrityError, match=rf"ck_{table}_{column}"):
            insert(engine, table, **{column: "much"})

    def test_no_check_was_forgotten(self, declared: Path) -> None:
        checks = {check["name"] for facts in reflected(declared).values() for check in facts["checks"]}
        assert checks == {violation.constraint for violation in VIOLATIONS}

    def test_the_bounds_are_in_the_range(self, engine: Engine) -> None:
        insert(engine, "sessions", memory_count=0, total_tokens=0)
        for place, bound in enumerate((0, 1, 0.0, 1.0)):
            insert(engine, "memory_chunks", id=f"mem_{place}", importance=bound, token_count=0)
            insert(
                engine, "procedural_memory", id=f"proc_{place}", key=str(place), confidence=bound, source_chunk_id=None
            )
        for place, memory_type in enumerate(("episodic", "semantic", "working", "procedural")):
            insert(engine, "memory_chunks", id=f"mem_of_type_{place}", memory_type=memory_type)
        for place, status in enumerate(("queued", "running", "completed", "failed")):
            insert(engine, "compression_jobs", id=f"job_{place}", status=status)

    def test_a_key_is_unique_within_a_user(self, engine: Engine) -> None:
        insert(engine, "procedural_memory", source_chunk_id=None)
        insert(engine, "procedural_memory", id="proc_2", user_id="bob", source_chunk_id=None)
        with pytest.raises(IntegrityError, match="(?i)unique constraint.*(idx_proc_user_key|memory.key)"):
            insert(engine, "procedural_memory", id="proc_3", source_chunk_id=None)

    def test_one_index_is_live(self, engine: Engine) -> None:
        insert(engine, "vector_indexes")
        insert(engine, "vector_indexes", id=2, state="building")
        insert(engine, "vector_indexes", id=3, state="retired")
        insert(engine, "vector_indexes", id=4, state="retired")
        with pytest.raises(IntegrityError, match="(?i)unique constraint.*(uq_vector_indexes_live|indexes.state)"):
            insert(engine, "vector_indexes", id=5)

    @pytest.mark.parametrize(
        ("table", "column"), [("memory_chunks", "session_id"), ("procedural_memory", "source_chunk_id")]
    )
    def test_a_parent_must_exist(self, table: str, column: str, engine: Engine) -> None:
        with pytest.raises(IntegrityError, match="(?i)foreign key constraint"):
            insert(engine, table, **{column: "nobody"})

    def test_an_owners_number_is_never_given_out_twice(self, engine: Engine) -> None:
        given = []
        for _ in range(3):
            with engine.begin() as connection:
                names = [name for name in ROWS["owners"] if name != "number"]
                places = ", ".join(f":{name}" for name in names)
                statement = f"INSERT INTO owners ({', '.join(names)}) VALUES ({places}) RETURNING number"
                given.append(connection.execute(text(statement), ROWS["owners"]).scalar_one())
            with engine.begin() as connection:
                connection.exec_driver_sql("DELETE FROM owners")
        assert given == sorted(set(given))
