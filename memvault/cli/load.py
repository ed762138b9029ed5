"""How does a file of memories get into the vault?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from memvault.cli import output
from memvault.cli.vault import AsJson, DatabaseUrl, open_vault
from memvault.errors import ValidationError

STDIN = Path("-")


def load(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="JSON Lines, one memory a line; - reads them from stdin."),
    ],
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="ID", help="Import for this user, whomever the lines name.", show_default=False),
    ] = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Import memories from JSON Lines; importing a file twice adds nothing. Makes the vault where there is none."""
    with _opened(file) as stream, open_vault(database_url) as storage:
        lines = _Lines(stream)
        with output.progress_bar() as progress:
            task = progress.add_task("importing", total=None if file == STDIN else file.stat().st_size)
            report = storage.import_user(
                lines,
                user,
                progress=lambda done: progress.update(
                    task, completed=lines.bytes_read, description=f"imported {done:,} lines"
                ),
            )
        if storage.indexing != "manual":
            storage.sync()
        health = storage.health()
    if as_json:
        output.print_json(report.model_dump())
    else:
        typer.echo(f"added {report.added:,}, skipped {report.skipped:,}, users {report.users:,}")
    if health["debts"]:
        owner = health["index_owner_pid"]
        whose = "" if owner is None else f", which process {owner} owns and pays"
        output.note(f"{health['debts']:,} records are still owed to the index{whose}; searches find them all the same")


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    if file == STDIN:
        yield sys.stdin.buffer
        return
    try:
        stream = file.open("rb")
    except OSError as exc:
        raise typer.BadParameter(f"{file} cannot be read: {exc.strerror}", param_hint="FILE") from exc
    with stream:
        yield stream


class _Lines:
    """The lines of a file in UTF-8, with or without a byte order mark; ``bytes_read`` of it so far."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.bytes_read = 0

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._stream, start=1):
            self.bytes_read += len(line)
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as exc:
                raise ValidationError(f"line {number}: not UTF-8 (byte {exc.start + 1} of the line)") from exc
