"""Does the demo show what it says, leave nothing behind, and fail where SQL and the index disagree?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from memvault import StorageLayer, VectorIndexError
from memvault.cli import output
from memvault.cli.demo import QUESTIONS, require_agreement

FACTS = {
    QUESTIONS[0]: ("lactose intolerant", "nut allergy"),
    QUESTIONS[1]: ("Japan", "camper van along the Danish coast"),
    QUESTIONS[2]: ("one-page checklist", "billing service out of an old monolith"),
    QUESTIONS[3]: ("hot bath with a crime audiobook", "bouldering at the climbing hall"),
}
"""What the sample says to each question of maya, and of jonas."""


def run_demo(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMVAULT_")}
    return subprocess.run(
        [sys.executable, "-m", "memvault", "demo", *arguments],
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=100,
        cwd=tmp_path,
        env={
            **environment,
            "TMPDIR": str(tmp_path),
            "COLUMNS": "100",
            "MEMVAULT_DATABASE_URL": "sqlite:///not-this.db",
        },
    )


def answers(shown: str) -> dict[str, tuple[str, str]]:
    """Each question of the table with its two cells, put together from the lines that they were broken into."""
    lines = shown.splitlines()
    start = next(place for place, line in enumerate(lines) if line.split() == ["question", "maya", "jonas"])
    columns = (1, lines[start].index("maya"), lines[start].index("jonas"), None)
    found: dict[str, tuple[str, str]] = {}
    rows: list[list[str]] = [[]]
    for line in lines[start + 2 :]:
        if line.startswith("The two best"):
            break
        if line.strip():
            rows[-1].append(line)
        else:
            rows.append([])
    for row in filter(None, rows):
        question, *cells = (
            " ".join(" ".join(line[left:right] for line in row).split())
            for left, right in zip(columns, columns[1:], strict=False)
        )
        found[question] = (cells[0], cells[1])
    return found


def counted(shown: str, name: str) -> int:
    match = re.search(rf"^ *{re.escape(name)}.* (\d+) *$", shown, re.MULTILINE)
    assert match is not None, name
    return int(match[1])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("demo")
    done = run_demo(folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, folder


def test_it_imports_the_sample_once(demo: tuple[str, Path]) -> None:
    shown, _ = demo
    assert "251 memories of 3 users" in shown
    assert "0 added, 251 skipped" in shown


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_user_is_answered_from_their_own_memories(demo: tuple[str, Path], question: str) -> None:
    maya, jonas = answers(demo[0])[question]
    hers, his = FACTS[question]
    assert hers in maya
    assert his in jonas
    assert hers not in jonas
    assert his not in maya


def test_a_preference_is_set_changed_and_read_by_its_user_only(demo: tuple[str, Path]) -> None:
    shown = demo[0][demo[0].index("A preference") :]
    assert '"prose"' in shown
    assert '"bullet points"' in shown
    assert re.search(r"read for jonas +– +–", shown)


def test_sql_and_the_index_agree(demo: tuple[str, Path]) -> None:
    shown, _ = demo
    assert counted(shown, "memories in SQL") == 251
    assert (
        counted(shown, "of these with a meaning")
        == counted(shown, "vectors in SQL")
        == counted(shown, "records in the index (chroma)")
        == 239
    )
    assert counted(shown, "debts") == 0


def test_it_fits_a_terminal_and_leaves_nothing_behind(demo: tuple[str, Path]) -> None:
    shown, folder = demo
    assert max(map(len, shown.splitlines())) <= 100
    assert list(folder.iterdir()) == []


def test_it_can_be_kept_and_runs_again_beside_itself(tmp_path: Path) -> None:
    for name in ("one", "two"):
        done = run_demo(tmp_path, "--keep", name)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"--database-url sqlite:///{tmp_path / name / 'memvault.db'}" in done.stdout
    with StorageLayer.open(f"sqlite:///{tmp_path / 'two' / 'memvault.db'}") as storage:
        assert storage.stats()["index_records"] == 239
    again = run_demo(tmp_path, "--keep", "one")
    assert again.returncode == 2
    assert "one" in again.stderr


def test_it_fails_where_sql_and_the_index_disagree(tmp_path: Path) -> None:
    with StorageLayer.open(f"sqlite:///{tmp_path}/owing.db", vectors="chroma", indexing="manual") as storage:
        sample = resources.files("memvault.cli").joinpath("sample.jsonl").read_text(encoding="utf-8")
        storage.import_user(sample.splitlines())
        with pytest.raises(VectorIndexError, match="239 debts"):
            require_agreement(output.stdout(), storage)
        storage.sync()
        require_agreement(output.stdout(), storage)
