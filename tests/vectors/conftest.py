"""Every index in one suite: a kind that is added here is tested like the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vectors.worlds import ChromaWorld, ExactWorld, IndexWorld


@pytest.fixture(params=["exact", "chroma"])
def index_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IndexWorld]:
    """An index that was opened and created, and is empty."""
    world: IndexWorld
    if request.param == "exact":
        world = ExactWorld(request.getfixturevalue("vault_path"))
    else:
        world = ChromaWorld(tmp_path / "chroma")
    yield world
    world.close()
