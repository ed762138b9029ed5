"""Does every command do what its help says, on the streams and with the exit codes that scripts rely on?"""

from __future__ import annotations

import csv
import json
import os
import pty
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from memvault import NewChunk, StorageLayer
from memvault.cli.app import app
from memvault.database import migrate
from tests.support import eventually

USAGE, OWNERSHIP, FAILURE, INTERRUPTED, BROKEN_PIPE = 2, 3, 4, 130, 141
SAMPLE = str(resources.files("memvault.cli").joinpath("sample.jsonl"))
README = Path(__file__).parents[2] / "README.md"

OWNER = """
import os, sys
from memvault import StorageLayer
with StorageLayer.open(sys.argv[1], vectors="chroma", embedder="static", indexing="manual") as storage:
    assert storage.stats()["index_records"] is not None
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
"""A process that owns a vault's embedded index until its stdin is closed, and pays nothing."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("MEMVAULT_") or name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def sample_vault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vault that holds the sample, with the exact index. Not to be changed."""
    path = tmp_path_factory.mktemp("sample") / "memvault.db"
    with StorageLayer.open(f"sqlite:///{path}", vectors="exact") as storage, open(SAMPLE, encoding="utf-8") as lines:
        storage.import_user(lines)
    return path


@pytest.fixture
def sample_url(sample_vault: Path) -> str:
    return f"sqlite:///{sample_vault}"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where no database is yet."""
    return f"sqlite:///{tmp_path}/new.db"


def run(*arguments: str, input: str | bytes | None = None, env: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="memvault", input=input, env=env)


def fails(result: Result, code: int, *words: str) -> None:
    """The command failed with this code, and one line on stderr that says these words."""
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "memvault", *arguments],
        **{
            "capture_output": True,
            "text": True,
            "encoding": "utf-8",
            "timeout": 100,
            "check": False,
            "stdin": subprocess.DEVNULL,
            **options,
        },
    )


def rows(result: Result) -> list[dict[str, str]]:
    return list(csv.DictReader(result.stdout.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


def commands() -> Iterator[tuple[str, Any]]:
    """Every command and group, by what is typed for it."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for child, sub in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {child}", sub)

    yield from walk("memvault", typer.main.get_command(app))


# The documentation.


@pytest.mark.parametrize(("name", "command"), [pytest.param(*each, id=each[0]) for each in commands()])
def test_every_command_and_option_is_documented(name: str, command: Any) -> None:
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name} {parameter.name}"
    if not hasattr(command, "commands"):
        assert f"`{name}" in README.read_text(encoding="utf-8")


def test_help_goes_to_stdout() -> None:
    for arguments in (["--help"], ["db", "--help"], ["search", "--help"]):
        result = run(*arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "Usage: memvault" in result.stdout


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"memvault {metadata.version('memvault')}\n")


def test_wrong_usage_exits_2(sample_url: str) -> None:
    for arguments in (
        [],
        ["nonsense"],
        ["search", "maya"],
        ["search", "maya", "food", "-k", "0"],
        ["search", "maya", "food", "--type", "nonsense"],
        ["db", "downgrade"],
        ["db", "downgrade", "base", "--yse"],
    ):
        assert run(*arguments, env={"MEMVAULT_DATABASE_URL": sample_url}).exit_code == USAGE, arguments


# Which vault?


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats"],
        ["sync"],
        ["search", "maya", "food"],
        ["import", SAMPLE],
        ["db", "upgrade"],
        ["db", "downgrade", "base", "--yes"],
        ["db", "current"],
        ["db", "check"],
    ],
    ids=" ".join,
)
class TestWhichVault:
    def test_without_a_url_both_ways_to_give_one_are_named(self, arguments: list[str]) -> None:
        fails(run(*arguments), USAGE, "--database-url", "MEMVAULT_DATABASE_URL")

    def test_a_url_that_cannot_work(self, arguments: list[str]) -> None:
        fails(run(*arguments, "--database-url", "nonsense"), USAGE, "sqlite:///")
        fails(run(*arguments, "--database-url", "oracle://me:secret@host/db"), USAGE, "oracle")
        assert "secret" not in run(*arguments, "--database-url", "oracle://me:secret@host/db").output

    def test_only_what_writes_makes_a_vault(self, arguments: list[str], url: str, tmp_path: Path) -> None:
        result = run(*arguments, env={"MEMVAULT_DATABASE_URL": url, "MEMVAULT_VECTORS": "exact"})
        if arguments[0] == "import" or arguments == ["db", "upgrade"]:
            assert result.exit_code == 0, result.output
            assert (tmp_path / "new.db").is_file()
        else:
            fails(result, FAILURE, "new.db", "memvault db upgrade")
            assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["stats"], ["sync"], ["search", "maya", "food"]], ids=" ".join)
def test_looking_founds_no_vault_and_migrates_none(arguments: list[str], url: str) -> None:
    sqlite3.connect(url.removeprefix("sqlite:///")).close()
    Path(url.removeprefix("sqlite:///")).touch()
    fails(run(*arguments, "--database-url", url), FAILURE, "memvault db upgrade")
    assert migrate.current(url) is None

    migrate.upgrade(url)
    fails(run(*arguments, "--database-url", url), FAILURE, "no vault yet")
    with StorageLayer.open(url, vectors="exact", embedder="none") as storage:  # the choice was still free
        assert storage.stats()["index"] == "exact"


def test_the_option_wins_over_the_environment(sample_url: str, url: str) -> None:
    assert run("stats", "--database-url", sample_url, env={"MEMVAULT_DATABASE_URL": url}).exit_code == 0


# db


def test_db_moves_the_schema_and_says_where_it_stands(url: str) -> None:
    head = migrate.head()
    env = {"MEMVAULT_DATABASE_URL": url}
    assert run("db", "upgrade", env=env).stdout == f"at revision {head}\n"
    assert run("db", "current", env=env).stdout == f"{head}\n"
    assert run("db", "check", env=env).stdout == f"at head, {head}\n"
    assert run("db", "downgrade", "base", "--yes", env=env).stdout == "at revision none\n"
    assert run("db", "current", env=env).stdout == "none\n"
    fails(run("db", "check", env=env), FAILURE, head, "memvault db upgrade")
    fails(run("db", "upgrade", "nonsense", env=env), FAILURE, "nonsense")
    assert run("db", "upgrade", "head", env=env).exit_code == 0
    assert run("db", "downgrade", "-1", "--yes", env=env).exit_code == 0
    assert migrate.current(url) == ([None, *(revision for revision, _ in migrate.history())])[-2]


@pytest.mark.parametrize(
    ("change", "word"),
    [("ALTER TABLE sessions ADD COLUMN mood TEXT", "mood"), ("DROP INDEX idx_memory_user", "idx_memory_user")],
)
def test_check_compares_the_tables_with_the_declared_ones(url: str, change: str, word: str) -> None:
    migrate.upgrade(url)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        connection.execute(change)
    connection.close()
    fails(run("db", "check", "--database-url", url), FAILURE, word)


def test_history_needs_no_database_and_marks_one_given(url: str) -> None:
    revisions = [revision for revision, _ in migrate.history()]
    assert [row["revision"] for row in rows(run("db", "history"))] == revisions
    assert rows(run("db", "history"))[-1]["mark"] == "head"
    assert rows(run("db", "history", "--database-url", url))[-1]["mark"] == "head"
    migrate.upgrade(url)
    assert rows(run("db", "history", "--database-url", url))[-1]["mark"] == "current, head"


def test_a_downgrade_is_confirmed(url: str) -> None:
    migrate.upgrade(url)
    fails(run("db", "downgrade", "base", "--database-url", url), USAGE, "--yes")
    assert migrate.current(url) == migrate.head()
    for answer, code, stands in (
        (b"n\n", INTERRUPTED, migrate.head()),
        (b"\x03", INTERRUPTED, migrate.head()),
        (b"y\n", 0, None),
    ):
        assert (
            at_terminal("db", "downgrade", "base", "--database-url", url, prompt=b"[y/N]: ", answer=answer)[0] == code
        )
        assert migrate.current(url) == stands


AT_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "memvault", *sys.argv[1:]])
"""
"""The real command with its stdin as controlling terminal, so that Ctrl-C reaches it."""


def at_terminal(*arguments: str, prompt: bytes = b"", answer: bytes = b"") -> tuple[int, str]:
    """The exit code and the output of the real command at a terminal, where the prompt is answered."""
    ours, theirs = pty.openpty()
    command = subprocess.Popen(
        [sys.executable, "-c", AT_TERMINAL, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    shown = b""
    answered = not prompt
    while True:
        if answered and not select.select([ours], [], [], 5)[0]:
            os.write(ours, answer)  # CPython's readline can miss a Ctrl-C between its prompt and its select
            continue
        try:
            some = os.read(ours, 65536)
        except OSError:  # how Linux says that nobody has the terminal open any more
            break
        shown += some
        if not answered and prompt in shown:
            os.write(ours, answer)
            answered = True
    os.close(ours)
    return command.wait(timeout=60), shown.decode()


# stats


def test_stats(sample_url: str) -> None:
    shown = {row["name"]: row["value"] for row in rows(run("stats", "--database-url", sample_url))}
    assert shown["users"] == "3"
    assert shown["rows of memory_chunks"] == "251"
    assert shown["debts"] == "0"
    held = json.loads(run("stats", "--json", "--database-url", sample_url).stdout)
    assert held["rows"]["memory_chunks"] == 251
    assert held["vectors"] == held["index_records"] == 239
    assert (held["index"], held["debts"], held["last_error"]) == ("exact", 0, None)


# search


def test_search_prints_a_line_a_hit_with_nothing_lost(sample_url: str) -> None:
    question = "What food should I avoid cooking for them?"
    found = rows(run("search", "maya", question, "--database-url", sample_url))
    with StorageLayer.open(sample_url) as storage:
        hits = storage.for_user("maya").search(question, k=10)
    assert [row["content"] for row in found] == [hit.chunk.content for hit in hits]
    assert [row["rank"] for row in found] == [str(rank) for rank in range(1, 11)]
    assert [row["session"] for row in found] == [hit.chunk.session_id for hit in hits]
    assert found[0]["type"] == hits[0].chunk.memory_type
    assert found[0]["date"] == hits[0].chunk.created_at.date().isoformat()
    assert float(found[0]["similarity"]) == pytest.approx(hits[0].similarity, abs=0.001)
    assert float(found[0]["score"]) == pytest.approx(hits[0].score, abs=0.001)


def test_search_as_json(sample_url: str) -> None:
    result = run("search", "maya", "zoë", "-k", "3", "--type", "semantic", "--json", "--database-url", sample_url)
    assert "Zoë" in result.stdout
    found = json.loads(result.stdout)
    assert [hit["rank"] for hit in found] == [1, 2, 3]
    assert {hit["chunk"]["memory_type"] for hit in found} == {"semantic"}
    assert {hit["chunk"]["user_id"] for hit in found} == {"maya"}
    assert all(0 <= hit["score"] <= 1 and -1 <= hit["similarity"] <= 1 for hit in found)


def test_search_that_finds_nothing(sample_url: str) -> None:
    result = run("search", "nobody", "food", "--database-url", sample_url)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "nothing found" in result.stderr
    assert json.loads(run("search", "nobody", "food", "--json", "--database-url", sample_url).stdout) == []
    fails(run("search", " ", "food", "--database-url", sample_url), USAGE, "user_id")


def test_a_stored_text_is_neither_markup_nor_a_command_to_the_terminal(url: str) -> None:
    content = "see [bold]notes[/] and [/nothing]\n\x1b[31mred\x07é\ttab"
    with StorageLayer.open(url, vectors="exact") as storage:
        storage.for_user("u").chunks.add(content)
    clean = "see [bold]notes[/] and [/nothing] [31mred é tab"
    assert [row["content"] for row in rows(run("search", "u", "notes", "--database-url", url))] == [clean]
    assert (
        json.loads(run("search", "u", "notes", "--json", "--database-url", url).stdout)[0]["chunk"]["content"]
        == content
    )
    code, shown = at_terminal("search", "u", "notes", "--database-url", url)
    assert code == 0
    assert clean.split(" [31m")[0] in shown
    assert "\x1b[31mred" not in shown


def test_search_at_a_terminal_breaks_lines_and_cuts_nothing(sample_url: str) -> None:
    question = "What food should I avoid cooking for them?"
    expected = rows(run("search", "maya", question, "-k", "3", "--database-url", sample_url))
    code, shown = at_terminal("search", "maya", question, "-k", "3", "--database-url", sample_url)
    assert code == 0
    words = shown.split()
    for row in expected:
        assert set(row["content"].split()) <= set(words)


def test_no_color(sample_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("stats", "--database-url", "sqlite:///nowhere.db")
    assert "\x1b[1;31m" in at_terminal(*arguments)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in at_terminal(*arguments)[1]


def test_a_stdout_that_is_not_utf8(sample_url: str) -> None:
    arguments = ("search", "maya", "zoë", "-k", "1", "--database-url", sample_url)
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    table = process(*arguments, env=env)
    assert (table.returncode, table.stderr) == (0, "")
    assert "Zo\\xeb" in table.stdout
    assert "Zoë" in json.loads(process(*arguments, "--json", env=env).stdout)[0]["chunk"]["content"]


# import


def test_importing_twice_adds_nothing(url: str) -> None:
    env = {"MEMVAULT_DATABASE_URL": url, "MEMVAULT_VECTORS": "exact"}
    first = run("import", SAMPLE, env=env)
    assert (first.stdout, first.stderr) == ("added 251, skipped 0, users 3\n", "")
    assert json.loads(run("import", SAMPLE, "--json", env=env).stdout) == {"added": 0, "skipped": 251, "users": 3}


def test_import_from_stdin_for_a_user_with_a_byte_order_mark(url: str) -> None:
    env = {"MEMVAULT_DATABASE_URL": url, "MEMVAULT_VECTORS": "exact"}
    line = '\ufeff{"user_id": "else", "content": "Grüße 🎹"}\r\n\n'
    assert run("import", "-", "--user", "zoë", input=line.encode(), env=env).exit_code == 0
    assert [row["content"] for row in rows(run("search", "zoë", "Grüße", env=env))] == ["Grüße 🎹"]
    assert rows(run("search", "else", "Grüße", env=env)) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", ["line 2", "JSON"]),
        (b'{"user_id": "u", "content": "x", "colour": 1}', ["line 2", "colour"]),
        (b'{"user_id": "u", "content": "x", "created_at": "yesterday"}', ["line 2", "created_at"]),
        (b'{"user_id": "u", "content": "\xff"}', ["line 2", "UTF-8"]),
        (b'{"user_id": "u", "content": " "}', ["2", "content"]),
    ],
)
def test_an_import_error_names_the_line(url: str, line: bytes, words: list[str]) -> None:
    lines = b'{"user_id": "u", "content": "good"}\n' + line + b"\n"
    result = run("import", "-", input=lines, env={"MEMVAULT_DATABASE_URL": url, "MEMVAULT_VECTORS": "exact"})
    fails(result, USAGE, *words)


def test_a_file_that_cannot_be_read_makes_no_vault(url: str, tmp_path: Path) -> None:
    for name in ("missing.jsonl", str(tmp_path)):
        # Wide enough for any folder's name: click breaks its lines.
        result = run("import", name, "--database-url", url, env={"TERMINAL_WIDTH": "500", "COLUMNS": "500"})
        assert result.exit_code == USAGE
        assert "cannot be read" in result.stderr
    assert list(tmp_path.iterdir()) == []


# Errors, signals, pipes.


def test_an_error_is_one_line_and_its_traceback_is_for_who_asks() -> None:
    arguments = ("stats", "--database-url", "sqlite:///nowhere.db")
    plain = process(*arguments)
    assert (plain.returncode, plain.stdout) == (FAILURE, "")
    assert plain.stderr.startswith("error: ")
    assert len(plain.stderr.splitlines()) == 1
    for asked in (
        process("--debug", *arguments),
        process(*arguments, env={**os.environ, "MEMVAULT_DEBUG": "1"}),
    ):
        assert asked.returncode == FAILURE
        assert "Traceback" in asked.stderr
        assert asked.stderr.splitlines()[-1] == plain.stderr.splitlines()[0]


def test_a_damaged_database_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "broken.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 8000)
    fails(run("stats", "--database-url", "sqlite:///broken.db"), FAILURE)


def test_the_reader_of_a_pipe_may_go(sample_url: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = process(
        "search", "maya", "food", "-k", "80", "--database-url", sample_url,
        capture_output=False, stdout=writing, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


def test_an_interrupted_import_ends_at_once_and_goes_on_later(url: str) -> None:
    env = {**os.environ, "MEMVAULT_DATABASE_URL": url, "MEMVAULT_VECTORS": "exact"}
    importing = subprocess.Popen(
        [sys.executable, "-m", "memvault", "import", "-"],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert importing.stdin is not None
    line = {"user_id": "u", "content": "one of many"}
    batch = [json.dumps({**line, "created_at": f"2026-01-01T00:00:00.{number:06}+00:00"}) for number in range(6000)]
    importing.stdin.write("".join(f"{line}\n" for line in batch).encode())
    importing.stdin.flush()  # by now it has read 5,000 lines and more, and waits for the rest
    importing.send_signal(signal.SIGINT)
    out, err = importing.communicate(timeout=60)
    assert (importing.returncode, out) == (INTERRUPTED, b"")
    assert err.decode().splitlines()[-1] == "interrupted"
    again = run("import", "-", "--json", input="\n".join(batch), env=env)
    report = json.loads(again.stdout)
    assert report["added"] + report["skipped"] == 6000
    assert report["skipped"] in (0, 5000)


# sync, and the embedded index's one owner.


def test_sync_pays_what_is_owed(url: str) -> None:
    env = {"MEMVAULT_DATABASE_URL": url, "MEMVAULT_INDEXING": "manual"}
    done = run("import", SAMPLE, env=env)
    assert (done.exit_code, done.stdout) == (0, "added 251, skipped 0, users 3\n")
    assert "239 records are still owed" in done.stderr
    assert run("sync", env=env).stdout == "paid 239, failed 0, owed 0\n"
    assert json.loads(run("sync", "--json", env=env).stdout) == {"paid": 0, "failed": 0, "owed": 0}


def test_sync_fails_where_the_index_cannot_be_reached(url: str, tmp_path: Path) -> None:
    env = {"MEMVAULT_DATABASE_URL": url, "MEMVAULT_INDEXING": "manual"}
    run("import", SAMPLE, env=env)
    shutil.rmtree(tmp_path / "new.db.chroma")
    (tmp_path / "new.db.chroma").write_text("no folder")
    result = process("sync", env={**os.environ, **env})
    assert result.returncode == FAILURE, result.stderr
    assert "owed 239" in result.stdout
    assert "239" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_sync_names_the_owner_of_the_index(url: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        pid = owner.stdout.readline().strip()
        env = {"MEMVAULT_DATABASE_URL": url}
        imported = run("import", SAMPLE, env=env)
        assert imported.exit_code == 0
        assert pid in imported.stderr
        fails(run("sync", env=env), OWNERSHIP, f"process {pid} ", "239")
        held = json.loads(run("stats", "--json", env=env).stdout)
        assert (held["debts"], held["index_records"], held["index_owner_pid"]) == (239, None, int(pid))
        assert len(rows(run("search", "maya", "food", env=env))) == 10
    finally:
        owner.communicate()
    assert owner.returncode == 0
    assert run("sync", env={"MEMVAULT_DATABASE_URL": url}).stdout == "paid 239, failed 0, owed 0\n"


@contextmanager
def watching(url: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "memvault", "sync", "--watch", *arguments],
        env={**os.environ, "MEMVAULT_DATABASE_URL": url},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sync_can_go_on_paying_for_others(url: str) -> None:
    env = {"MEMVAULT_DATABASE_URL": url, "MEMVAULT_INDEXING": "manual"}
    run("import", SAMPLE, env=env)
    with watching(url, "--json") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (first["paid"], first["owed"], first["index_owner_pid"]) == (239, 0, process.pid)
        with StorageLayer.open(url, indexing="background") as storage:
            storage.for_user("u").chunks.add("owed to the index that the other process has")
            assert storage.health()["index_owner_pid"] == process.pid
            eventually(lambda: storage.health()["debts"] == 0)
        assert json.loads(process.stdout.readline())["paid"] == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_sync_waits_for_the_owner_to_go(url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        run("import", SAMPLE, env={"MEMVAULT_DATABASE_URL": url})
        with watching(url) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("paid 0, owed 239, the oldest for ")
            assert f"process {owner.pid};" in first
            owner.kill()
            assert process.stdout.readline() == "paid 239, owed 0\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def test_a_shell_command_beside_a_vault_without_an_embedder(url: str) -> None:
    with StorageLayer.open(url, vectors="exact", embedder="none") as storage:
        storage.for_user("u").chunks.add_many([NewChunk("here", embedding=[1.0, 0.0])])
    assert run("stats", "--database-url", url, env={"MEMVAULT_EMBEDDER": "none"}).exit_code == 0
    fails(run("search", "u", "here", "--database-url", url), USAGE)
