"""What does `import memvault` load?"""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "chromadb",
    "onnxruntime",
    "pgvector",
    "rich",
    "safetensors",
    "sentence_transformers",
    "sqlite_vec",
    "tokenizers",
    "torch",
    "transformers",
    "typer",
    "wordllama",
}
"""What costs a service its start-up time, and is needed for some vaults only: loaded at use."""


def imported_by(statement: str) -> set[str]:
    """Every module that a fresh interpreter loads for a statement, by `-X importtime`."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    rows = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {row.rpartition("|")[2].strip() for row in rows}


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    return imported_by("import memvault")


def test_the_measurement_sees_modules(loaded: set[str]) -> None:
    assert "memvault" in loaded
    assert "memvault.errors" in loaded
    assert "json" in loaded


def test_nothing_heavy_is_loaded(loaded: set[str]) -> None:
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()


def test_public_names_load_nothing_heavy() -> None:
    statement = "import memvault; [getattr(memvault, name) for name in memvault.__all__]"
    assert {name.partition(".")[0] for name in imported_by(statement)} & HEAVY == set()


def test_importing_configures_no_logging_and_says_nothing() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error:::memvault",
            "-c",
            "import logging; before = list(logging.root.handlers), logging.root.level\n"
            "import memvault\n"
            "assert (list(logging.root.handlers), logging.root.level) == before\n",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
