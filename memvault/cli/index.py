"""Is the vault's index there, and how is it made by somebody who may?"""

from __future__ import annotations

from typing import Annotated

import typer

from memvault.cli.vault import DatabaseUrl, open_vault

app = typer.Typer(no_args_is_help=True, help="Make the vector index of a vault.")


@app.callback()
def _index() -> None:
    """One command so far; without this, typer would do without its name."""


@app.command()
def create(
    dimension: Annotated[
        int | None,
        typer.Option(min=1, help="Of the vectors, in a vault without embedder that has none yet.", show_default=False),
    ] = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make the index where it is missing, and fill it from SQL. Founds the vault where there is none.

    MEMVAULT_VECTORS and MEMVAULT_EMBEDDER choose for a new vault. The schema must be at head, by `memvault db upgrade`.
    Needs the right to create tables, and for pgvector its extension, or the right to create that.
    """
    with open_vault(database_url, schema="check") as storage:
        made = storage.create_index(dimension)
        held = storage.stats()
    typer.echo(f"{'made' if made else 'was there already'}: {held['index']}, {held['index_records']:,} records")
