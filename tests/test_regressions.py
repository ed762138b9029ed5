"""Do mistakes that were made once stay mended? What has no better place beside the tests of a module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memvault import (
    ConfigurationError,
    EmbeddingError,
    IndexOwnershipError,
    NewChunk,
    StorageLayer,
    ValidationError,
    VectorIndexError,
)  # fmt: skip
from memvault.embedding.base import Matrix, Vector
from memvault.filters import EVERYTHING, Filter
from memvault.memory.chunks import TRANSACTION_SIZE
from memvault.vectors.base import VectorMatch, VectorRecord
from memvault.vectors.chroma import ChromaIndex
from tests.support import HashingEmbedder


class FailsLate(HashingEmbedder):
    """An embedder that fails where it meets a certain text."""

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        if "unembeddable" in texts:
            raise RuntimeError("no such luck")
        return super().embed_documents(texts)


class Flaky(ChromaIndex):
    """Chroma, with an outage that the test switches."""

    down = False

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        if self.down:
            raise VectorIndexError("down for once")
        super().upsert(records)

    def query(self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING) -> list[VectorMatch]:
        if self.down:
            raise VectorIndexError("down for once")
        return super().query(user_id, vector, k, where)


def test_a_long_call_that_fails_in_a_transaction_undoes_itself_whole(vault_path: Path) -> None:
    with StorageLayer.open(f"sqlite:///{vault_path}", vectors="exact", embedder=FailsLate()) as storage:
        ann = storage.for_user("ann")
        texts = [f"text {place}" for place in range(TRANSACTION_SIZE)] + ["unembeddable"]
        with ann.transaction() as tx:
            tx.chunks.add("before")
            with pytest.raises(EmbeddingError):
                tx.chunks.add_many(map(NewChunk, texts))
        assert [chunk.content for chunk in ann.chunks.list().items] == ["before"]


def test_another_process_fixes_the_dimension(vault_path: Path) -> None:
    url = f"sqlite:///{vault_path}"
    with StorageLayer.open(url, embedder="none") as here, StorageLayer.open(url, embedder="none") as there:
        there.for_user("ann").chunks.add("text", embedding=[1, 0, 0])
        here.stats()
        with pytest.raises(ValidationError, match="dimension 3, got 4"):
            here.for_user("ann").search(embedding=[1, 0, 0, 0])


@pytest.mark.parametrize(
    "options",
    [
        {"vectors": "chroma:///no/such/parent/index"},
        {"vectors": "chroma://relative/index"},
        {"vectors": ""},
        {"embedder": ""},
        {"embedder": HashingEmbedder},
        {"token_counter": 5},
        {"engine_options": 5},
    ],
    ids=repr,
)
def test_what_cannot_be_opened_founds_no_vault(vault_path: Path, options: dict[str, Any]) -> None:
    url = f"sqlite:///{vault_path}"
    with pytest.raises(ConfigurationError):
        StorageLayer.open(url, **options)
    with StorageLayer.open(url, vectors="exact", embedder="none") as storage:
        assert storage.stats()["index"] == "exact"


@pytest.mark.parametrize(("name", "value"), [("dimension", 0), ("model", "m" * 256), ("model", "")])
def test_an_embedder_without_a_proper_name_or_dimension(vault_path: Path, name: str, value: object) -> None:
    embedder = HashingEmbedder()
    setattr(embedder, name, value)
    with pytest.raises(ConfigurationError, match=name):
        StorageLayer.open(f"sqlite:///{vault_path}", embedder=embedder)


def test_what_is_closed_stays_closed(vault_path: Path) -> None:
    url = f"sqlite:///{vault_path}"
    storage = StorageLayer.open(url, embedder=HashingEmbedder())
    storage.close()
    with pytest.raises(Exception, match="closed"):
        storage.sync()
    with StorageLayer.open(url, embedder=HashingEmbedder()) as again:
        assert not again.health()["index_owned_elsewhere"]
        again.for_user("ann").chunks.add("text")
        assert again.health()["debts"] == 0


def test_an_outage_that_is_over_is_no_longer_reported(vault_path: Path) -> None:
    index = Flaky(vault_path.with_name("flaky"), location="flaky")
    with StorageLayer.open(
        f"sqlite:///{vault_path}", vectors=index, embedder=HashingEmbedder(), exact_limit=0
    ) as storage:
        ann = storage.for_user("ann")
        ann.chunks.add("first")
        index.down = True
        ann.chunks.add("second")
        assert {hit.chunk.content for hit in ann.search("first")} == {"first", "second"}
        assert storage.health()["last_error"] == "down for once"
        assert storage.health()["debts"] == 1
        index.down = False
        assert storage.sync().paid == 1
        assert storage.health()["last_error"] is None


def test_the_owner_reports_itself(vault_path: Path) -> None:
    import os

    with StorageLayer.open(f"sqlite:///{vault_path}", embedder=HashingEmbedder()) as storage:
        assert storage.health()["index_owner_pid"] == os.getpid()


def test_a_file_uri_is_a_file(tmp_path: Path) -> None:
    with StorageLayer.open(f"sqlite:///file:{tmp_path}/vault.db?uri=true", embedder=HashingEmbedder()) as storage:
        storage.for_user("ann").chunks.add("text")
        assert storage.stats()["index_records"] == 1
    assert (tmp_path / "vault.db.chroma").is_dir()


def test_a_folder_may_contain_what_a_url_gives_a_meaning(vault_path: Path) -> None:
    folder = vault_path.with_name("a#b?c")
    with StorageLayer.open(
        f"sqlite:///{vault_path}", vectors=f"chroma://{folder}", embedder=HashingEmbedder()
    ) as storage:
        storage.for_user("ann").chunks.add("text")
    assert folder.is_dir()


@pytest.mark.parametrize("chunks", [None, NewChunk("text"), "text", 5])
def test_chunks_that_are_no_list(vault_path: Path, chunks: Any) -> None:
    with StorageLayer.open(f"sqlite:///{vault_path}", vectors="exact", embedder="none") as storage:
        with pytest.raises(ValidationError, match="chunks must be a list"):
            storage.for_user("ann").chunks.add_many(chunks)
        with pytest.raises(ValidationError, match="stream must be"):
            storage.import_user("text")


def test_an_import_names_its_lines(vault_path: Path) -> None:
    with StorageLayer.open(f"sqlite:///{vault_path}", vectors="exact", embedder="none") as storage:
        lines = [
            '{"user_id": "ann", "content": "a", "embedding": [1, 0]}',
            '{"user_id": "ann", "content": "b", "embedding": [1, 0, 0]}',
        ]
        with pytest.raises(ValidationError, match="^lines 1 to 2.*dimension 2, got 3"):
            storage.import_user(lines)
        with pytest.raises(ValidationError, match="^line 1: not JSON"):
            storage.import_user(["[" * 100_000])


def test_a_tensor_that_cannot_become_an_array(vault_path: Path) -> None:
    class Tensor:
        def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
            raise RuntimeError("call detach() first")

    with (
        StorageLayer.open(f"sqlite:///{vault_path}", vectors="exact", embedder="none") as storage,
        pytest.raises(ValidationError, match="embedding"),
    ):
        storage.for_user("ann").chunks.add("text", embedding=Tensor())


def test_ownership_is_a_kind_of_index_error() -> None:
    assert issubclass(IndexOwnershipError, VectorIndexError)
