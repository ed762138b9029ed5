"""What is the command `memvault`? Its subcommands, and what becomes of their errors.

Exit codes: 0 done, 1 the doctor found something, 2 used wrongly, 3 another process owns the index, 4 any other error,
130 interrupted, 141 the reader of a pipe has gone (what a shell reports for SIGPIPE).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import traceback
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from memvault.cli import compact, db, demo, doctor, index, load, output, search, stats, sync
from memvault.errors import ConfigurationError, IndexOwnershipError, MemvaultError, ValidationError

USAGE, OWNERSHIP, FAILURE, INTERRUPTED, BROKEN_PIPE = 2, 3, 4, 130, 141


class _Boundary(TyperGroup):
    """Turns what a command raises into one line and an exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer's own context, by its public name
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()
            return answer
        except MemvaultError as exc:
            if ctx.params.get("debug"):
                traceback.print_exc()
            output.error(str(exc))
            raise typer.Exit(exit_code(exc)) from exc
        except (KeyboardInterrupt, typer.Abort) as exc:
            output.note("interrupted")
            raise typer.Exit(INTERRUPTED) from exc
        except BrokenPipeError as exc:
            _forget_stdout()
            raise typer.Exit(BROKEN_PIPE) from exc
        except OSError as exc:
            if ctx.params.get("debug"):
                traceback.print_exc()
            output.error(str(exc))
            raise typer.Exit(FAILURE) from exc


app = typer.Typer(
    cls=_Boundary,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Agent memory on SQL, with a vector index. Every command takes --database-url, or MEMVAULT_DATABASE_URL.",
)
app.add_typer(db.app, name="db")
app.add_typer(index.app, name="index")
app.command("stats")(stats.stats)
app.command("search")(search.search)
app.command("import")(load.load)
app.command("sync")(sync.sync)
app.command("doctor")(doctor.doctor)
app.command("compact")(compact.compact)
app.command("demo")(demo.demo)


def exit_code(error: MemvaultError) -> int:
    """The exit code of an error."""
    if isinstance(error, ConfigurationError | ValidationError):
        return USAGE
    return OWNERSHIP if isinstance(error, IndexOwnershipError) else FAILURE


def main() -> None:
    """The entry point of ``memvault`` and of ``python -m memvault``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without é shows \xe9 rather than a traceback
    app(prog_name="memvault")


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("memvault")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        typer.echo(f"memvault {version}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="MEMVAULT_DEBUG", help="Show tracebacks, and what memvault logs."),
    ] = False,
) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s: %(message)s", level=logging.WARNING)
    if debug:
        logging.getLogger("memvault").setLevel(logging.DEBUG)


def _forget_stdout() -> None:
    """Let the interpreter's last flush go nowhere: it would fail again, and say so."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
