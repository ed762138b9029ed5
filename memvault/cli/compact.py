"""How much disk space can be given back?"""

from __future__ import annotations

from memvault.cli import output
from memvault.cli.vault import AsJson, DatabaseUrl, existing_vault


def compact(database_url: DatabaseUrl = None, as_json: AsJson = False) -> None:
    """Give back the disk space of what was deleted: the index is made anew from SQL, a SQLite file is written anew.

    Takes as much room again while it runs, and a while: half a millisecond for each record of Chroma. Searches and
    writes go on. Exits 3 where another process owns the index.
    """
    with existing_vault(database_url) as storage:
        report = storage.compact()
    if as_json:
        output.print_json(report.model_dump())
        return
    listing = output.Listing("part", "before", "after", right=("before", "after"))
    for part in ("database", "index"):
        before, after = getattr(report, f"{part}_before"), getattr(report, f"{part}_after")
        if before is not None:
            listing.add(part, before, after)
    listing.show()
