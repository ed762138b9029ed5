"""Is the index paid what it is owed?"""

from __future__ import annotations

import typer

from memvault.cli import output
from memvault.cli.vault import AsJson, DatabaseUrl, existing_vault
from memvault.errors import IndexOwnershipError, VectorIndexError


def sync(database_url: DatabaseUrl = None, as_json: AsJson = False) -> None:
    """Pay now what is owed to the index. Exits 3 where another process owns it, and 4 where payment failed."""
    with existing_vault(database_url) as storage:
        report = storage.sync()
        health = storage.health()
    if as_json:
        output.print_json(report.model_dump())
    else:
        typer.echo(f"paid {report.paid:,}, failed {report.failed:,}, owed {report.owed:,}")
    if report.failed:
        raise VectorIndexError(f"{report.failed:,} debts could not be paid, and stay owed: {health['last_error']}")
    if report.owed and health["index_owned_elsewhere"]:
        owner = health["index_owner_pid"]
        raise IndexOwnershipError(
            f"{f'process {owner}' if owner else 'another process'} owns the index and pays its debts; "
            f"{report.owed:,} are still owed. Sync there, or here once it has ended",
            owner_pid=owner,
        )
    if report.owed and health["last_error"] is not None:
        raise VectorIndexError(f"the index cannot be reached, {report.owed:,} debts stay owed: {health['last_error']}")
