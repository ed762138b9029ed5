"""What is a model of sentence-transformers called, and what is said where it cannot be had? tests/models loads one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memvault import ConfigurationError
from memvault.embedding.base import is_embedder
from memvault.embedding.sentence_transformers import SentenceTransformerEmbedder
from tests.conftest import OpenVault

PROMPTS = ["", "passage: ", "?document_prompt=", "a/b?c&d=é 🙂%20", "\n"]


class TestModel:
    @pytest.mark.parametrize(
        ("name", "model"),
        [
            ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
            ("sentence-transformers/all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
            ("BAAI/bge-m3", "sentence-transformers/BAAI/bge-m3"),
            ("sentence-transformers/BAAI/bge-m3", "sentence-transformers/BAAI/bge-m3"),
            ("/models/mini", "/models/mini"),
            ("/models/../models//mini/", "/models/mini"),
        ],
    )
    def test_of_a_name(self, name: str, model: str) -> None:
        assert SentenceTransformerEmbedder(name).model == model

    def test_of_a_folder_is_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", "/home/someone")
        models: dict[str | Path, str] = {
            "./mini": f"{tmp_path}/mini",
            "../mini": f"{tmp_path.parent}/mini",
            Path("mini"): f"{tmp_path}/mini",
            Path("org/mini"): f"{tmp_path}/org/mini",
            ".": str(tmp_path),
            "~/mini": "/home/someone/mini",
            Path("~/mini"): "/home/someone/mini",
        }
        assert {name: SentenceTransformerEmbedder(name).model for name in models} == models

    def test_a_link_keeps_its_name(self, tmp_path: Path) -> None:
        (tmp_path / "version-1").mkdir()
        (tmp_path / "current").symlink_to("version-1")
        assert SentenceTransformerEmbedder(tmp_path / "current").model == f"{tmp_path}/current"

    @pytest.mark.parametrize("prompt", PROMPTS, ids=ascii)
    @pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "BAAI/bge-m3", "/models/mini"])
    def test_says_the_document_prompt_and_can_be_given_again(self, name: str, prompt: str) -> None:
        model = SentenceTransformerEmbedder(name, document_prompt=prompt).model
        assert model != SentenceTransformerEmbedder(name).model
        again = SentenceTransformerEmbedder(model)
        assert again.model == model
        assert again._document_prompt == prompt
        assert SentenceTransformerEmbedder(model, document_prompt=prompt).model == model

    def test_differs_between_document_prompts(self) -> None:
        models = {SentenceTransformerEmbedder("mini", document_prompt=prompt).model for prompt in PROMPTS}
        assert len(models) == len(PROMPTS)

    def test_does_not_say_what_changes_no_stored_vector(self) -> None:
        embedder = SentenceTransformerEmbedder("mini", query_prompt="query: ", device="cpu", batch_size=8)
        assert embedder.model == "sentence-transformers/mini"
        assert embedder.batch_size == 8

    def test_can_be_given(self) -> None:
        assert SentenceTransformerEmbedder("/models/mini", model="mini/7").model == "mini/7"

    def test_is_an_embedders(self) -> None:
        assert is_embedder(SentenceTransformerEmbedder("mini"))


class TestRefused:
    @pytest.mark.parametrize("name", ["", " ", None, 7, b"mini", ["mini"]], ids=repr)
    def test_no_name(self, name: Any) -> None:
        with pytest.raises(ConfigurationError, match="name_or_path must be"):
            SentenceTransformerEmbedder(name)

    @pytest.mark.parametrize("name", ["a/b/c", "org/", "/".join("abcd"), "sentence-transformers/a/b/c", "org//mini"])
    def test_no_name_on_the_hub(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="is no model's name on the hub") as caught:
            SentenceTransformerEmbedder(name)
        assert f"./{name}" in str(caught.value)

    @pytest.mark.parametrize("batch_size", [0, -1, True, 1.5, "32", None])
    def test_batch_size(self, batch_size: Any) -> None:
        with pytest.raises(ConfigurationError, match="batch_size"):
            SentenceTransformerEmbedder("mini", batch_size=batch_size)

    @pytest.mark.parametrize("argument", ["query_prompt", "document_prompt"])
    def test_a_prompt_that_is_no_text(self, argument: str) -> None:
        options: dict[str, Any] = {argument: 7}
        with pytest.raises(ConfigurationError, match=argument):
            SentenceTransformerEmbedder("mini", **options)

    def test_two_document_prompts(self) -> None:
        model = SentenceTransformerEmbedder("mini", document_prompt="passage: ").model
        with pytest.raises(ConfigurationError, match="leave one out"):
            SentenceTransformerEmbedder(model, document_prompt="")

    def test_more_than_a_vault_remembers(self) -> None:
        with pytest.raises(ConfigurationError, match="model="):
            SentenceTransformerEmbedder("mini", document_prompt="x" * 250)
        assert SentenceTransformerEmbedder("mini", document_prompt="x" * 250, model="mini/x").model == "mini/x"


def without_the_package(code: str) -> str:
    """What an interpreter prints that has no sentence-transformers, whatever is installed here."""
    blocked = "import sys\nsys.modules['sentence_transformers'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False, timeout=60, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestWithoutThePackage:
    def test_the_extra_is_named(self, open_exact: OpenVault, database_url: str) -> None:
        code = (
            "from memvault import MissingDependencyError, StorageLayer\n"
            "try:\n"
            f"    StorageLayer.open({database_url!r}, vectors='exact', embedder='sentence-transformers/mini')\n"
            "except MissingDependencyError as exc:\n"
            "    print(exc)\n"
        )
        assert "pip install 'memvault[sentence-transformers]'" in without_the_package(code)
        # And nothing unopenable is remembered.
        assert open_exact().for_user("alice").search("anything") == []

    def test_nothing_is_loaded_for_a_name(self) -> None:
        code = (
            "from memvault.embedding.sentence_transformers import SentenceTransformerEmbedder\n"
            "print(SentenceTransformerEmbedder('mini').model, 'torch' in sys.modules)\n"
        )
        assert without_the_package(code).split() == ["sentence-transformers/mini", "False"]
