"""Is the index true?"""

from __future__ import annotations

from typing import Annotated

import typer

from memvault import DoctorReport
from memvault.cli import output
from memvault.cli.vault import AsJson, DatabaseUrl, existing_vault
from memvault.errors import IndexMismatchError
from memvault.indexing.diagnosis import FINDINGS

FOUND = 1


def doctor(
    database_url: DatabaseUrl = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Owe the index whatever it has not got right, and pay it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare SQL with the index, both ways, while the vault is in use.

    Exits 0 where the index is clean, 1 where something was found, repaired or not, 3 where another process owns the
    index: then run it there, by `StorageLayer.doctor`, or here once that has ended.
    """
    try:
        with existing_vault(database_url) as storage, output.progress_bar() as bar:
            task = bar.add_task("comparing", total=None)
            report = storage.doctor(
                repair=repair, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
    except IndexMismatchError as exc:  # it cannot even be opened
        report = DoctorReport(clean=False, mismatched=1, reason=str(exc))
    if as_json:
        output.print_json(report.model_dump())
    else:
        _show(report)
    if not report.clean:
        raise typer.Exit(FOUND)


def _show(report: DoctorReport) -> None:
    if report.clean:
        typer.echo(f"clean: {report.compared:,} records compared")
        return
    if report.reason is not None:
        typer.echo(f"mismatched: {output.one_line(report.reason)}")
        return
    listing = output.Listing("finding", "records", "for example", right=("records",), folding=("for example",))
    for finding in FINDINGS:
        if count := getattr(report, finding):
            listing.add(finding, count, " ".join(report.examples.get(finding, [])))
    listing.show()
    found = sum(getattr(report, finding) for finding in FINDINGS)
    if report.repaired or report.owed:
        typer.echo(f"repaired {report.repaired:,} of {found:,}, {report.owed:,} still owed to the index")
    else:
        typer.echo(f"{found:,} records are not as SQL has them: `memvault doctor --repair`")
