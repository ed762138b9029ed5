"""How does a command speak? Data to stdout, all else to stderr; tables for eyes on a terminal, tabs for a pipe."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the boundary of `app`, which knows the exit code; Rich itself would exit 1."""
        raise  # Rich calls this while it handles the BrokenPipeError


class Listing:
    """Rows under named columns.

    On a terminal a table, in which the columns ``folding`` take the room that the others leave and break their lines
    in it. In a pipe a line a row, tabs between the cells, nothing cut, broken or padded.
    """

    def __init__(self, *columns: str, right: tuple[str, ...] = (), folding: tuple[str, ...] = ()) -> None:
        self._columns = columns
        self._right = right
        self._folding = folding
        self._rows: list[tuple[object, ...]] = []

    def add(self, *cells: object) -> None:
        """Add a row: as text and never as markup, for a memory may well contain ``[bold]``."""
        self._rows.append(cells)

    def show(self) -> None:
        """Print it."""
        console = stdout()
        if console.is_terminal:
            console.print(self.table())
            return
        for row in (self._columns, *self._rows):
            sys.stdout.write("\t".join(map(_raw, row)) + "\n")

    def table(self, *, last: str = "", **options: Any) -> Table:
        """As a Rich table, its last row in the style ``last``."""
        made = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, **options)
        for column in self._columns:
            made.add_column(
                column,
                justify="right" if column in self._right else "left",
                no_wrap=column not in self._folding,
                overflow="fold",
            )
        for number, row in enumerate(self._rows, start=1):
            style = last if number == len(self._rows) else ""
            made.add_row(*(cell if isinstance(cell, Text) else Text(_pretty(cell)) for cell in row), style=style)
        return made


def stdout(*, pipe_width: int | None = None) -> Console:
    """For data. ``pipe_width``: columns where stdout is no terminal and COLUMNS is not set."""
    console = _console(sys.stdout)
    if pipe_width is not None and not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = pipe_width
    return console


def stderr() -> Console:
    """For progress, notes and errors."""
    return _console(sys.stderr)


def print_json(value: Any) -> None:
    """Print a JSON document; characters that stdout cannot encode are escaped as JSON escapes them."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, allow_nan=False, indent=2)
    sys.stdout.write(f"{text}\n")


def compact_json(value: Any) -> str:
    """A JSON value on one line, to be read."""
    return json.dumps(value, ensure_ascii=False)


def note(text: str) -> None:
    """A remark beside the data."""
    stderr().print(Text(one_line(text), style="dim"), soft_wrap=True)


def error(text: str) -> None:
    """What went wrong, on one line."""
    stderr().print(Text.assemble(("error: ", "bold red"), one_line(text)), soft_wrap=True)


def one_line(text: str) -> str:
    """The text without line breaks, and without the escape sequences by which a stored text could drive a terminal."""
    return _CONTROL.sub(" ", text).strip()


def progress_bar() -> Progress:
    """A bar on stderr, where that is a terminal; else nothing."""
    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _pretty(cell: object) -> str:
    if cell is None:
        return "–"
    return f"{cell:,}" if isinstance(cell, int) else _raw(cell)


def _raw(cell: object) -> str:
    if cell is None:
        return ""
    return f"{cell:.3f}" if isinstance(cell, float) else one_line(str(cell))


def _console(stream: TextIO) -> Console:
    return _Console(file=stream, highlight=False)
