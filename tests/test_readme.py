"""Does the README tell the truth? Its Python blocks are run, its links and commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fastapi.testclient import TestClient

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
LINKS = sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README)))


def test_the_quickstart_runs(tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text(PYTHON_BLOCKS[0], encoding="utf-8")
    for _ in range(2):  # a reader runs it again
        ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        lines = ran.stdout.splitlines()
        assert lines[0].startswith("Is allergic to hazelnuts 0."), ran.stdout
        assert lines[1] == "['Booked the night train to Vienna for 3 May']"
        assert lines[2] == "{'tone': 'direct'}"
        assert lines[3] == "[]"
        assert "'memory_chunks': 4" in lines[4]
        assert ran.stderr == ""


def test_the_service_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMVAULT_DATABASE_URL", f"sqlite:///{tmp_path}/service.db")
    service = ModuleType("service")
    monkeypatch.setitem(sys.modules, "service", service)
    exec(compile(PYTHON_BLOCKS[1], "README.md", "exec"), service.__dict__)
    with TestClient(service.app) as client:
        storage = service.app.state.storage
        storage.for_user("ada").chunks.add("Plays the viola in a quartet")
        found = client.get("/search", params={"query": "which instrument?"}, headers={"x-user": "ada"})
        assert [hit["chunk"]["content"] for hit in found.json()] == ["Plays the viola in a quartet"]
        foreign = client.get("/search", params={"query": "which instrument?"}, headers={"x-user": "eve"})
        assert foreign.json() == []
        assert client.get("/health").json()["ok"] is True


def test_memvault_joins_a_transaction(tmp_path: Path) -> None:
    script = tmp_path / "joined.py"
    script.write_text(PYTHON_BLOCKS[2], encoding="utf-8")
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "Ordered tea\n", "")


def test_every_python_block_is_run() -> None:
    assert len(PYTHON_BLOCKS) == 3


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`|\$ )make ([a-z-]+)", README))))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
