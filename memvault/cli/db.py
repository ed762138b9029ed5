"""Where does the vault's schema stand, and how is it moved?"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer
from sqlalchemy import URL

from memvault.cli import output
from memvault.cli.vault import DatabaseUrl, require_database, require_url, schema_name
from memvault.database import migrate
from memvault.errors import ConfigurationError, NotFoundError

app = typer.Typer(no_args_is_help=True, help="Move the vault's schema between revisions, or see where it stands.")


@app.command()
def upgrade(
    revision: Annotated[str, typer.Argument(metavar="[REVISION]", help="Where to: a revision, or head.")] = "head",
    database_url: DatabaseUrl = None,
) -> None:
    """Migrate the database up to a revision, atomically; makes the database where there is none."""
    url = require_url(database_url)
    migrate.upgrade(url, revision, schema_name=schema_name())
    _report(url)


# A relative revision such as -1 looks like an option.
@app.command(context_settings={"ignore_unknown_options": True})
def downgrade(
    revision: Annotated[
        str,
        typer.Argument(metavar="REVISION", help="Where to: a revision, -1 for one step, or base for nothing at all."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    database_url: DatabaseUrl = None,
) -> None:
    """Migrate the database down to a revision. This deletes data: whatever the revisions undone had brought."""
    url = require_database(database_url)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigurationError("a downgrade deletes data, and there is no terminal to confirm it at; give --yes")
        place = url.render_as_string(hide_password=True)
        question = f"Downgrade {place} to {revision}? What later revisions brought is deleted, with all that is in it."
        typer.confirm(question, abort=True, err=True)
    migrate.downgrade(url, revision, schema_name=schema_name())
    _report(url)


@app.command()
def current(database_url: DatabaseUrl = None) -> None:
    """Print the revision at which the database stands, or none."""
    typer.echo(migrate.current(require_database(database_url), schema_name=schema_name()) or "none")


@app.command()
def check(database_url: DatabaseUrl = None) -> None:
    """Exit 0 where the database stands at head and has the declared tables, else 4."""
    url = require_database(database_url)
    migrate.require_head(url, schema_name=schema_name())
    migrate.require_declared(url, schema_name=schema_name())
    typer.echo(f"at head, {migrate.head()}")


@app.command()
def history(database_url: DatabaseUrl = None) -> None:
    """List the revisions, oldest first; given a database, mark the one at which it stands."""
    stands: str | None = None
    if database_url:
        with suppress(NotFoundError):
            stands = migrate.current(require_database(database_url), schema_name=schema_name())
    shown = output.Listing("revision", "what it brings", "mark", folding=("what it brings",))
    for revision, brings in migrate.history():
        marks = [name for name, at in (("current", stands), ("head", migrate.head())) if at == revision]
        shown.add(revision, brings, ", ".join(marks))
    shown.show()


def _report(url: URL) -> None:
    typer.echo(f"at revision {migrate.current(url, schema_name=schema_name()) or 'none'}")
