"""Does a real model of sentence-transformers serve a vault: by name and folder, with its prompts, from many threads?"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from memvault import ConfigurationError, IndexMismatchError
from memvault.embedding.base import Matrix, embed_checked
from memvault.embedding.sentence_transformers import SentenceTransformerEmbedder
from tests.conftest import OpenVault
from tests.models.conftest import NAME
from tests.models.support import assert_same
from tests.support import refused

TEXTS = ["The cat sat on the mat", "Interest rates went up again", "She plays the violin", "x", "🙂", "word " * 1000]


@pytest.fixture(scope="module")
def library(folder: Path) -> SentenceTransformer:
    """The library itself, for what is expected."""
    return SentenceTransformer(str(folder), device="cpu")


def by_library(library: SentenceTransformer, texts: Sequence[str]) -> Matrix:
    vectors: Matrix = library.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
    return vectors


class TestVectors:
    def test_are_the_models(self, mini: SentenceTransformerEmbedder, library: SentenceTransformer) -> None:
        expected = by_library(library, TEXTS)
        assert mini.dimension == 384
        for embed in (mini.embed_documents, mini.embed_queries):
            vectors = embed(TEXTS)
            assert_same(vectors, expected)
            assert_same(embed_checked(embed, TEXTS, mini), expected)

    def test_of_no_texts(self, mini: SentenceTransformerEmbedder) -> None:
        assert mini.embed_documents([]).shape == (0, 384)
        assert mini.embed_queries(()).shape == (0, 384)

    def test_do_not_depend_on_the_batch_size(
        self, folder: Path, library: SentenceTransformer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        embedder = SentenceTransformerEmbedder(folder, device="cpu", batch_size=2)
        assert embedder.dimension == 384
        sizes: list[int] = []
        forward = SentenceTransformer.forward

        def noting(model: SentenceTransformer, features: dict[str, Any], **options: Any) -> Any:
            sizes.append(len(features["input_ids"]))
            return forward(model, features, **options)

        monkeypatch.setattr(SentenceTransformer, "forward", noting)
        vectors = embedder.embed_documents(TEXTS)
        assert sizes == [2, 2, 2]
        assert_same(vectors, by_library(library, TEXTS))

    def test_from_many_threads(self, folder: Path, library: SentenceTransformer) -> None:
        fresh = SentenceTransformerEmbedder(folder, device="cpu")  # so that they race to load it, too
        texts = [[f"text {number} {'of words ' * (number % 5)}" for number in range(many + 1)] for many in range(8)]
        together = threading.Barrier(8)

        def embed(some: list[str]) -> Matrix:
            together.wait(timeout=60)
            return np.vstack([fresh.embed_documents(some), fresh.embed_queries(some)])

        with ThreadPoolExecutor(8) as pool:
            for some, vectors in zip(texts, pool.map(embed, texts), strict=True):
                assert_same(vectors, by_library(library, [*some, *some]))


@pytest.fixture(scope="module")
def prompting(library: SentenceTransformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the same model, saved with prompts of its own."""
    path = tmp_path_factory.mktemp("prompting")
    before = library.prompts, library.default_prompt_name
    library.prompts = {"query": "own query: ", "document": "own passage: ", "other": "other: "}
    library.default_prompt_name = "other"
    library.save(str(path))
    library.prompts, library.default_prompt_name = before
    return path


class TestPrompts:
    def test_are_put_before_the_texts(self, folder: Path, library: SentenceTransformer) -> None:
        embedder = SentenceTransformerEmbedder(
            folder, query_prompt="query: ", document_prompt="passage: ", device="cpu"
        )
        for embed, prompt in ((embedder.embed_queries, "query: "), (embedder.embed_documents, "passage: ")):
            vectors = embed(["a violin"])
            assert_same(vectors, by_library(library, [f"{prompt}a violin"]))
            assert not np.allclose(vectors, by_library(library, ["a violin"]), atol=1e-3)

    def test_of_the_model_are_used(self, prompting: Path, library: SentenceTransformer) -> None:
        embedder = SentenceTransformerEmbedder(prompting, device="cpu")
        queries, documents = embedder.embed_queries(["a violin"]), embedder.embed_documents(["a violin"])
        assert_same(queries, by_library(library, ["own query: a violin"]))
        assert_same(documents, by_library(library, ["own passage: a violin"]))

    def test_of_the_model_give_way(self, prompting: Path, library: SentenceTransformer) -> None:
        embedder = SentenceTransformerEmbedder(prompting, query_prompt="", document_prompt="mine: ", device="cpu")
        queries, documents = embedder.embed_queries(["a violin"]), embedder.embed_documents(["a violin"])
        assert_same(queries, by_library(library, ["a violin"]))
        assert_same(documents, by_library(library, ["mine: a violin"]))


@pytest.mark.usefixtures("in_the_cache")
class TestByName:
    @pytest.mark.parametrize("name", [NAME, "all-MiniLM-L6-v2"])
    def test_is_found_in_the_cache(self, name: str, mini: SentenceTransformerEmbedder) -> None:
        embedder = SentenceTransformerEmbedder(name, device="cpu")
        assert embedder.model == NAME
        assert_same(embedder.embed_documents(TEXTS), mini.embed_documents(TEXTS))

    def test_a_vault_remembers_it(self, open_exact: OpenVault) -> None:
        storage = open_exact(embedder=NAME)
        storage.for_user("alice").chunks.add("The cat sat on the mat", memory_type="semantic")
        storage.close()
        again = open_exact(embedder=None)
        assert again.health()["ok"]
        assert [hit.chunk.content for hit in again.for_user("alice").search("a feline on a rug", mode="vector")] == [
            "The cat sat on the mat"
        ]

    def test_a_folder_can_stand_for_it(self, open_exact: OpenVault, folder: Path) -> None:
        open_exact(embedder=SentenceTransformerEmbedder(folder, model=NAME, device="cpu")).close()
        assert open_exact(embedder=None).for_user("alice").embed(["text"]).shape == (1, 384)

    def test_a_folder_of_this_name_is_not_taken_for_it(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "sentence-transformers").mkdir()
        (tmp_path / NAME).symlink_to(folder)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigurationError, match=f"write ./{NAME}"):
            SentenceTransformerEmbedder(NAME, device="cpu").embed_documents(["text"])
        assert SentenceTransformerEmbedder(f"./{NAME}", device="cpu").dimension == 384

    def test_one_that_is_not_there(self, open_exact: OpenVault) -> None:
        with pytest.raises(
            ConfigurationError, match="sentence-transformers/no-such-model.* cannot be loaded"
        ) as caught:
            open_exact(embedder="sentence-transformers/no-such-model")
        assert isinstance(caught.value.__cause__, OSError)
        # And nothing unopenable is remembered.
        assert open_exact(embedder="static").for_user("alice").search("anything") == []


class TestByFolder:
    def test_one_that_is_not_there(self, tmp_path: Path, open_exact: OpenVault) -> None:
        with pytest.raises(ConfigurationError, match="no such folder"):
            open_exact(embedder=str(tmp_path / "mini"))

    def test_one_that_holds_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="cannot be loaded"):
            SentenceTransformerEmbedder(tmp_path, device="cpu").embed_documents(["text"])

    def test_a_device_that_is_none(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="cannot be loaded on device 'nope'"):
            SentenceTransformerEmbedder(folder, device="nope").embed_documents(["text"])

    def test_a_failure_to_load_is_not_kept(self, folder: Path, tmp_path: Path) -> None:
        embedder = SentenceTransformerEmbedder(tmp_path / "later", device="cpu")
        with pytest.raises(ConfigurationError, match="no such folder"):
            embedder.embed_documents(["text"])
        (tmp_path / "later").symlink_to(folder)
        assert embedder.embed_documents(["text"]).shape == (1, 384)

    @pytest.mark.parametrize("kind", [str, Path])
    def test_a_vault_remembers_it(self, open_exact: OpenVault, folder: Path, kind: type[str | Path]) -> None:
        storage = open_exact(embedder=kind(folder))
        chunk = storage.for_user("alice").chunks.add("The cat sat on the mat", memory_type="semantic")
        storage.close()
        hits = open_exact(embedder=None).for_user("alice").search("a feline on a rug", mode="vector")
        assert [hit.chunk.id for hit in hits] == [chunk.id]

    def test_a_vault_remembers_its_document_prompt(self, open_exact: OpenVault, folder: Path) -> None:
        prompting = SentenceTransformerEmbedder(folder, document_prompt="passage: ", device="cpu")
        open_exact(embedder=prompting).close()
        again = open_exact(embedder=None)
        assert_same(again.for_user("alice").embed(["a violin"]), prompting.embed_documents(["a violin"]))
        again.close()
        with pytest.raises(IndexMismatchError, match="reindex --embedder"):
            open_exact(embedder=folder)


class TestSearch:
    def test_by_meaning(self, open_exact: OpenVault, folder: Path) -> None:
        alice = open_exact(embedder=folder).for_user("alice")
        memories = {
            "pet": "The kitten has to be fed twice a day",
            "money": "The mortgage is due on the first of the month",
            "music": "She practises the violin every evening",
            "food": "He cannot eat anything with peanuts in it",
            "travel": "The flight to Lisbon leaves at seven in the morning",
        }
        ids = {alice.chunks.add(text, memory_type="semantic").id: topic for topic, text in memories.items()}
        questions = {  # of which none has a word of its answer
            "How often does our cat get a meal?": "pet",
            "When must I pay for my house?": "money",
            "Who plays an instrument?": "music",
            "What is his allergy?": "food",
            "Which plane do we take?": "travel",
        }
        found = {question: ids[alice.search(question, mode="vector")[0].chunk.id] for question in questions}
        assert found == questions

    def test_another_users_is_not_found(self, open_exact: OpenVault, folder: Path) -> None:
        storage = open_exact(embedder=folder)
        storage.for_user("alice").chunks.add("The kitten has to be fed", memory_type="semantic")
        assert storage.for_user("bob").search("a cat's meal", mode="vector") == []

    def test_a_static_vault_takes_no_other(self, open_exact: OpenVault, folder: Path) -> None:
        storage = open_exact(embedder="static")
        with refused(storage, IndexMismatchError, "wordllama", "memvault reindex --embedder"):
            open_exact(embedder=folder)


def test_as_a_user_would(hub_home: Path, tmp_path: Path) -> None:
    """In a process of its own, with nothing but the hub's own variables, and every look-up refused."""
    code = (
        "import sys\n"
        "def refuse(event, args):\n"
        "    if event in ('socket.getaddrinfo', 'socket.connect', 'socket.gethostbyname'):\n"
        "        raise RuntimeError(f'the network was asked for: {event} {args}')\n"
        "sys.addaudithook(refuse)\n"
        "from memvault import StorageLayer\n"
        f"url = 'sqlite:///{tmp_path}/vault.db'\n"
        f"with StorageLayer.open(url, vectors='exact', embedder={NAME!r}) as storage:\n"
        "    storage.for_user('alice').chunks.add('The cat sat on the mat', memory_type='semantic')\n"
        "with StorageLayer.open(url) as storage:\n"
        "    print(storage.for_user('alice').search('a feline on a rug', mode='vector')[0].chunk.content)\n"
    )
    environment = {**os.environ, "HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1"}
    for name in ("SENTENCE_TRANSFORMERS_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The cat sat on the mat"
