"""What does a user's memory answer to a question?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from memvault.cli import output
from memvault.cli.vault import AsJson, DatabaseUrl, existing_vault
from memvault.filters import F
from memvault.values import Hit, MemoryType


def search(
    user: Annotated[str, typer.Argument(metavar="USER", help="Whose memories: a user id.")],
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to look for, in plain words.")],
    k: Annotated[int, typer.Option("-k", min=1, help="How many memories at most.")] = 10,
    memory_type: Annotated[
        MemoryType | None, typer.Option("--type", help="Memories of this type only.", show_default=False)
    ] = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Search the memories of one user by meaning, best first."""
    where = None if memory_type is None else F.memory_type == memory_type
    with existing_vault(database_url) as storage:
        hits = storage.for_user(user).search(query, k=k, where=where)
    if as_json:
        output.print_json(
            [{"rank": rank, **hit.model_dump(mode="json", exclude={"why"})} for rank, hit in enumerate(hits, 1)]
        )
        return
    if not hits:
        output.note(f"nothing found for {user}")
        return
    listing = _for_eyes(hits) if output.stdout().is_terminal else _for_pipes(hits)
    listing.show()


def _for_eyes(hits: Sequence[Hit]) -> output.Listing:
    """Where a memory comes from stands below it: seven columns would leave it eleven characters of eighty."""
    shown = output.Listing(
        "rank", "score", "similarity", "content", right=("rank", "score", "similarity"), folding=("content",)
    )
    for rank, hit in enumerate(hits, start=1):
        content = Text(output.one_line(hit.chunk.content))
        content.append("\n" + "  ".join(_origin(hit)), style="dim")
        shown.add(rank, hit.score, hit.similarity, content)
    return shown


def _for_pipes(hits: Sequence[Hit]) -> output.Listing:
    shown = output.Listing("rank", "score", "similarity", "type", "session", "date", "content")
    for rank, hit in enumerate(hits, start=1):
        shown.add(rank, hit.score, hit.similarity, *_origin(hit), hit.chunk.content)
    return shown


def _origin(hit: Hit) -> tuple[str, str, str]:
    chunk = hit.chunk
    return chunk.memory_type, output.one_line(chunk.session_id), chunk.created_at.date().isoformat()
