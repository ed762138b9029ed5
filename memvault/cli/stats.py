"""What is in the vault, and how does its index stand?"""

from __future__ import annotations

from memvault.cli import output
from memvault.cli.vault import AsJson, DatabaseUrl, existing_vault


def stats(database_url: DatabaseUrl = None, as_json: AsJson = False) -> None:
    """Show what the vault holds: users, rows by table, the index, and what the index is owed."""
    with existing_vault(database_url) as storage:
        health = storage.health()
        held = {
            "database": storage.engine.url.render_as_string(hide_password=True),
            "vault_id": storage.vault_id,
            **storage.stats(),
            "oldest_debt_s": health["oldest_debt_s"],
            "index_owner_pid": health["index_owner_pid"],
            "last_error": health["last_error"],
        }
    if as_json:
        output.print_json(held)
        return
    shown = output.Listing("name", "value", folding=("value",))
    for name in ("database", "vault_id", "users"):
        shown.add(name, held[name])
    for table, count in held["rows"].items():
        shown.add(f"rows of {table}", count)
    for name in ("model", "dimension", "index", "index_records", "debts"):
        shown.add(name.replace("_", " "), held[name])
    if held["oldest_debt_s"] is not None:
        shown.add("oldest debt", f"{held['oldest_debt_s']:.0f} s")
    for name in ("index_owner_pid", "last_error"):
        if held[name] is not None:
            shown.add(name.replace("_", " "), str(held[name]))
    shown.show()
