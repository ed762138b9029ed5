"""What do the tests of schema and migrations share? Alembic as a user runs it, vaults with rows, a look into files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Engine, insert

from memvault import StorageLayer
from memvault.database import base, migrate
from memvault.database.base import VERSION_TABLE
from memvault.database.engine import sqlite_driver
from memvault.vectors.outbox import OUTBOX

CHECKOUT = Path(__file__).resolve().parents[2]
INI = CHECKOUT / "alembic.ini"
OURS = base.table_names()
HEAD, NEXT = migrate.head(), "next"
"""The package's newest revision, and one that tests put on top of it."""
WAIT = 60.0
"""Seconds after which a process counts as hung."""


def url_of(path: Path) -> str:
    """The URL of a database file, whatever is in its name."""
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


# Processes


@dataclass(frozen=True)
class Done:
    """How a process ended."""

    code: int
    out: str
    err: str

    def complaint(self) -> str:
        """What the alembic command says when it fails for a reason that is the user's to mend: one line a stream."""
        assert self.code != 0
        assert "Traceback" not in self.out + self.err
        (said,) = self.out.splitlines()
        (logged,) = (line for line in self.err.splitlines() if not line.startswith("INFO "))
        assert said.startswith("FAILED: ")
        assert said.removeprefix("FAILED: ") in logged
        return said


def start_python(
    *arguments: str, cwd: Path, url: str | None = None, package: Path = CHECKOUT, **variables: str
) -> subprocess.Popen[str]:
    """A fresh interpreter that imports memvault from ``package``; ``url`` and ``variables`` go into the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMVAULT_")}
    environment["PYTHONPATH"] = str(package)
    if url is not None:
        environment["MEMVAULT_DATABASE_URL"] = url
    environment.update(variables)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Done:
    try:
        out, err = process.communicate(timeout=WAIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Done(process.returncode, out, err)


def run_python(*arguments: str, cwd: Path, url: str | None = None, package: Path = CHECKOUT, **variables: str) -> Done:
    return finish(start_python(*arguments, cwd=cwd, url=url, package=package, **variables))


def alembic(
    *arguments: str, cwd: Path, url: str | None = None, ini: Path = INI, package: Path = CHECKOUT, **variables: str
) -> Done:
    """`python -m alembic`, from any working directory."""
    return run_python("-m", "alembic", "-c", str(ini), *arguments, cwd=cwd, url=url, package=package, **variables)


def alembic_together(*commands: Sequence[str], cwd: Path, url: str) -> list[Done]:
    """Several alembic commands at once, each with its ini first."""
    running = [start_python("-m", "alembic", "-c", ini, *arguments, cwd=cwd, url=url) for ini, *arguments in commands]
    return [finish(process) for process in running]


def alembic_on(engine: Engine, ini: Path, name: str, *arguments: Any, **options: Any) -> None:
    """An alembic command in this process, with the migrations beside ``ini``, as `migrate` runs it."""
    config = Config(ini)
    with engine.connect() as connection:
        config.attributes[migrate.CONNECTION] = connection
        getattr(command, name)(config, *arguments, **options)


# Migrations


def copy_migrations(folder: Path) -> Path:
    """alembic/ and alembic.ini in another folder; returns the ini."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(CHECKOUT / "alembic", folder / "alembic", ignore=shutil.ignore_patterns("__pycache__"))
    return Path(shutil.copy(INI, folder / "alembic.ini"))


def install(folder: Path) -> Path:
    """The package as a wheel lays it out: memvault/ with the migrations in memvault/_migrations; returns the ini."""
    shutil.copytree(CHECKOUT / "memvault", folder / "memvault", ignore=shutil.ignore_patterns("__pycache__"))
    return copy_migrations(folder / "memvault" / "_migrations")


def remove_revisions(ini: Path) -> Path:
    """All of ours; the folder that they were in."""
    versions = ini.parent / "alembic" / "versions"
    for revision in versions.glob("*.py"):
        revision.unlink()
    return versions


def write_revision(ini: Path, upgrade: str) -> None:
    """A revision `NEXT` on top of ours, its upgrade() with this body; in place of an earlier one."""
    header = f"""\
        import pathlib
        import time

        import sqlalchemy as sa
        from alembic import op

        revision = "{NEXT}"
        down_revision = "{HEAD}"


        def downgrade() -> None:
            raise NotImplementedError


        def upgrade() -> None:
        """
    body = indent(dedent(upgrade), "    ")
    (ini.parent / "alembic" / "versions" / f"{NEXT}.py").write_text(dedent(header) + body, encoding="utf-8")


# Databases


@contextmanager
def raw(path: Path) -> Iterator[Any]:
    """The driver's own connection, in autocommit: the same SQLite library as memvault's, without anything it sets."""
    connection = sqlite_driver().connect(str(path), isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def script(path: Path, statements: str) -> None:
    with raw(path) as connection:
        connection.executescript(statements)


def declarations(path: Path) -> dict[str, list[str]]:
    """Each CREATE statement of the file by name: columns in their order, then the constraints sorted."""
    found: dict[str, list[str]] = {}
    with raw(path) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    for name, sql in rows:
        # ADD COLUMN writes on in the line of the last column.
        lines = [line.strip(" ,\t") for line in re.split(r"\n|, (?=[a-z_]+ [A-Z])", sql)]
        constraints = [line for line in lines if line.startswith("CONSTRAINT ")]
        found[name] = [line for line in lines if line not in constraints] + sorted(constraints)
    return found


def contents(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables, the version table's and a host's included."""
    with raw(path) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(connection.execute(f'SELECT * FROM "{name}"').fetchall(), key=repr) for name in names}


def tables(path: Path) -> set[str]:
    return set(contents(path))


def version_rows(path: Path) -> list[tuple[Any, ...]]:
    return contents(path)[VERSION_TABLE]


VECTORS = [[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.5, 0.5, 1.0]]


def fill(path: Path) -> None:
    """A vault at head with rows in every table."""
    fill_vault(url_of(path))
    held = contents(path)
    assert all(held[name] for name in OURS)


def fill_vault(url: str, **options: Any) -> None:
    """As `fill`, wherever the vault is."""
    with StorageLayer.open(url, vectors="exact", embedder="none", schema="upgrade", **options) as storage:
        for user_id in ("alice", "bob"):
            user = storage.for_user(user_id)
            session = user.sessions.start()
            chunks = [
                user.chunks.add(f"memory {place}", session_id=session.id, embedding=vector, metadata={"n": place})
                for place, vector in enumerate(VECTORS)
            ]
            user.procedural.set("style", {"tone": "direct"}, confidence=0.9, source_chunk_id=chunks[0].id)
            user.jobs.enqueue()
        debt = {"index_id": 1, "chunk_id": "mem_gone", "user_id": "alice", "generation": 1, "attempts": 0}
        with storage.engine.begin() as connection:  # the exact index lives in the transaction, and is never owed
            connection.execute(insert(OUTBOX).values(**debt, marked_at=datetime(2024, 5, 1, tzinfo=UTC)))
