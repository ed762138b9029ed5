"""What does memvault do, seen once from beginning to end?"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from memvault import F, StorageLayer, UserMemory
from memvault.cli import output
from memvault.database import migrate
from memvault.errors import ConfigurationError, VectorIndexError
from memvault.values import MEMORY_TYPES, Hit

SAMPLE = "sample.jsonl"
WIDTH = 100

USERS = ("maya", "jonas")
QUESTIONS = (
    "What food should I avoid cooking for them?",
    "Where do they want to travel next?",
    "What is their current project on the job?",
    "How do they relax when the day was stressful?",
)
"""Asked of both users' memories, in words that name neither."""

STYLE_KEY = "answer_style"
STYLE_WORDS = "prefers short answers"
"""What the sample says of how maya wants to be answered; the preference is learnt from it."""


def demo(
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="DIR",
            help="Keep the vault in this folder, which must be new or empty. Without it the demo works in a temporary "
            "folder that it removes at its end.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Watch memvault work: migrate, import a sample, ask, remember a preference, and check the index against SQL."""
    console = output.stdout(pipe_width=WIDTH)
    console.width = min(console.width, WIDTH)
    began = time.perf_counter()
    with _folder(keep) as folder:
        database = folder / "memvault.db"
        url = f"sqlite:///{database}"
        _heading(console, 1, "A fresh vault: SQLite, with Chroma beside it")
        migrate.upgrade(url)
        console.print(f"Migrated {database.name} to revision {migrate.current(url)}.")
        with StorageLayer.open(url, vectors="chroma", embedder="static", schema="check") as storage:
            _import(console, storage)
            _show_users(console, storage)
            _ask(console, storage)
            _show_preference(console, storage)
            require_agreement(console, storage)
    console.print(f"Done in {time.perf_counter() - began:.1f} s.", style="bold green")
    if keep is not None:
        console.print(
            Text(f'Ask it more: memvault search maya "Who is in her family?" --database-url {url}', style="dim"),
            soft_wrap=True,
        )


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="memvault-demo-") as made:
            yield Path(made)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigurationError(f"--keep needs a new or an empty folder, and {keep} is neither")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.absolute()


def _heading(console: Console, number: int, title: str) -> None:
    console.print()
    console.rule(Text(f"{number}  {title}", style="bold cyan"), align="left", style="cyan")


def _import(console: Console, storage: StorageLayer) -> None:
    _heading(console, 2, "Import")
    sample = resources.files("memvault.cli").joinpath(SAMPLE).read_text(encoding="utf-8").splitlines()
    began = time.perf_counter()
    with output.progress_bar() as progress:
        task = progress.add_task("embedding, storing, indexing", total=len(sample))
        report = storage.import_user(sample, progress=lambda done: progress.update(task, completed=done))
    seconds = time.perf_counter() - began
    console.print(f"{report.added} memories of {report.users} users, embedded, stored and indexed in {seconds:.1f} s.")
    again = storage.import_user(sample)
    console.print(f"The same file again: {again.added} added, {again.skipped} skipped.")


def _show_users(console: Console, storage: StorageLayer) -> None:
    _heading(console, 3, "What is stored")
    numbers = (*MEMORY_TYPES, "chunks", "sessions", "tokens")
    shown = output.Listing("user", *numbers, right=numbers)
    totals: Counter[str] = Counter()
    for user_id in storage.user_ids():
        counts = _counted(storage.for_user(user_id))
        totals.update(counts)
        shown.add(user_id, *(counts[name] for name in numbers))
    shown.add("together", *(totals[name] for name in numbers))
    console.print(shown.table(last="bold"))


def _counted(user: UserMemory) -> Counter[str]:
    counts = Counter({kind: user.chunks.count(F.memory_type == kind) for kind in MEMORY_TYPES})
    counts["chunks"] = user.chunks.count()
    after: str | None = None
    while True:
        page = user.sessions.list(after=after)
        counts["sessions"] += len(page.items)
        counts["tokens"] += sum(session.total_tokens for session in page.items)
        if (after := page.next) is None:
            return counts


def _ask(console: Console, storage: StorageLayer) -> None:
    _heading(console, 4, "The same questions, two users")
    shown = output.Listing("question", *USERS, folding=("question", *USERS))
    began = time.perf_counter()
    for question in QUESTIONS:
        answers = [_answers(storage.for_user(user).search(question, k=2)) for user in USERS]
        shown.add(Text(question, style="bold"), *answers)
    milliseconds = (time.perf_counter() - began) * 1000
    table = shown.table(expand=True, show_lines=True)
    for column, ratio in zip(table.columns, (2, 4, 4), strict=True):
        column.ratio = ratio
    console.print(table)
    console.print(
        f"The two best of each, with their cosine similarity. {len(QUESTIONS) * len(USERS)} searches took "
        f"{milliseconds:.0f} ms; each reads its own user's memories, and no other's."
    )


def _answers(hits: list[Hit]) -> Text:
    lines = []
    for place, hit in enumerate(hits):
        line = Text(f"{hit.similarity:.2f} ", style="green")
        lines.append(line.append(output.one_line(hit.chunk.content), style="default" if place == 0 else "dim"))
    return Text("\n").join(lines)


def _show_preference(console: Console, storage: StorageLayer) -> None:
    _heading(console, 5, "A preference: set, changed, read")
    maya, jonas = (storage.for_user(user) for user in USERS)
    learnt_from = next(
        chunk for chunk in maya.chunks.list(memory_type="procedural").items if STYLE_WORDS in chunk.content
    )
    shown = output.Listing("", "value", "confidence", "learnt from", folding=("value", "learnt from"))
    maya.procedural.set(STYLE_KEY, {"length": "long", "form": "prose"}, confidence=0.4)
    first = maya.procedural.get(STYLE_KEY)
    maya.procedural.set(
        STYLE_KEY, {"length": "short", "form": "bullet points"}, confidence=0.9, source_chunk_id=learnt_from.id
    )
    second = maya.procedural.get(STYLE_KEY)
    for step, preference in (("set for maya", first), ("changed, and read", second)):
        assert preference is not None
        source = learnt_from.content if preference.source_chunk_id == learnt_from.id else None
        shown.add(step, output.compact_json(preference.value), f"{preference.confidence:.1f}", source)
    theirs = jonas.procedural.get(STYLE_KEY)
    shown.add("read for jonas", None if theirs is None else output.compact_json(theirs.value), None, None)
    console.print(shown.table())


def require_agreement(console: Console, storage: StorageLayer) -> None:
    """Count in SQL and in the index, and show it; VectorIndexError where they disagree or something is owed."""
    _heading(console, 6, "SQL and the index agree")
    indexable = sum(
        storage.for_user(user_id).chunks.count(F.memory_type != "procedural") for user_id in storage.user_ids()
    )
    held = storage.stats()
    shown = output.Listing("counted", "", right=("",))
    for name, count in (
        ("memories in SQL", held["rows"]["memory_chunks"]),
        ("of these with a meaning to search by: all but procedural", indexable),
        ("vectors in SQL", held["vectors"]),
        (f"records in the index ({held['index']})", held["index_records"]),
        ("debts: records that the index is still owed", held["debts"]),
    ):
        shown.add(name, count)
    console.print(shown.table())
    if not indexable == held["vectors"] == held["index_records"] or held["debts"]:
        raise VectorIndexError(
            f"SQL and the index disagree: {indexable} memories, {held['vectors']} vectors, "
            f"{held['index_records']} records in the index, {held['debts']} debts; "
            f"last error: {storage.health()['last_error']}"
        )
