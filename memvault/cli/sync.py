"""Is the index paid what it is owed?"""

from __future__ import annotations

import signal
import threading
from typing import Annotated, Any

import typer

from memvault import StorageLayer
from memvault.cli import output
from memvault.cli.vault import AsJson, DatabaseUrl, existing_vault
from memvault.errors import IndexOwnershipError, StorageError, VectorIndexError

WATCH_S = 1.0
"""Seconds between two looks at what is owed."""


def sync(
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on paying until interrupted; tell what changes, one line each time.")
    ] = False,
) -> None:
    """Pay now what is owed to the index. Exits 3 where another process owns it, and 4 where payment failed."""
    with existing_vault(database_url) as storage:
        if watch:
            _watch(storage, as_json)
            return
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


def _watch(storage: StorageLayer, as_json: bool) -> None:
    """Pay until SIGINT or SIGTERM, beside a service or in its stead: where another process owns the index, wait."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    told: dict[str, Any] = {}
    while not stop.is_set():
        try:
            report, health = storage.sync(), storage.health()
            state = {
                "owed": report.owed,
                "last_error": health["last_error"],
                "index_owner_pid": health["index_owner_pid"],
            }
            oldest = health["oldest_debt_s"]
            paid = report.paid
        except StorageError as exc:  # the database is away for a moment; watching goes on
            state, oldest, paid = {"owed": None, "last_error": str(exc), "index_owner_pid": None}, None, 0
        if paid or state != told:
            _tell({"paid": paid, **state, "oldest_debt_s": oldest}, as_json)
            told = state
        stop.wait(WATCH_S)


def _tell(state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(output.compact_json(state))
        return
    owed = (
        "the database does not answer" if state["owed"] is None else f"paid {state['paid']:,}, owed {state['owed']:,}"
    )
    if state["owed"]:
        owed += f", the oldest for {state['oldest_debt_s'] or 0:.0f} s"
    typer.echo(f"{owed}{f': {error}' if (error := state['last_error']) else ''}")
