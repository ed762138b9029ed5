"""Do Chroma's functions that need more packages serve a vault? sentence-transformers' and LangChain's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chromadb.utils import embedding_functions
from langchain_core.embeddings import Embeddings as LangchainEmbeddings

from memvault import ConfigurationError
from memvault.embedding.base import Matrix, embed_checked
from memvault.embedding.chroma_function import ChromaFunctionEmbedder
from memvault.embedding.sentence_transformers import SentenceTransformerEmbedder
from tests.conftest import OpenVault
from tests.models.conftest import NAME
from tests.models.support import assert_same

TEXTS = ["The cat sat on the mat", "Interest rates went up again", "word " * 1000]


@pytest.mark.usefixtures("in_the_cache")
class TestSentenceTransformers:
    def test_gives_the_same_vectors(self, mini: SentenceTransformerEmbedder) -> None:
        embedder = ChromaFunctionEmbedder(embedding_functions.SentenceTransformerEmbeddingFunction(NAME))
        assert embedder.model == f"chroma/sentence_transformer/{NAME}"
        assert embedder.dimension == 384
        for embed in (embedder.embed_documents, embedder.embed_queries):
            assert_same(embed_checked(embed, TEXTS, embedder), mini.embed_documents(TEXTS))

    def test_truncated_is_another_model(self, folder: Path) -> None:
        truncated = embedding_functions.SentenceTransformerEmbeddingFunction(str(folder), truncate_dim=128)
        embedder = ChromaFunctionEmbedder(truncated)
        assert embedder.model.startswith(f"chroma/sentence_transformer/{folder}#")
        assert embedder.dimension == 128

    def test_from_many_threads_and_instances(self, mini: SentenceTransformerEmbedder) -> None:
        # Chroma keeps one model for all functions of this name.
        embedders = [
            ChromaFunctionEmbedder(embedding_functions.SentenceTransformerEmbeddingFunction(NAME)) for _ in range(4)
        ]
        texts = [[f"text {number} {'of words ' * (number % 5)}" for number in range(many + 1)] for many in range(8)]
        together = threading.Barrier(8)

        def embed(place: int) -> Matrix:
            together.wait(timeout=60)
            embedder = embedders[place % 4]
            return embed_checked(embedder.embed_documents, texts[place], embedder)

        with ThreadPoolExecutor(8) as pool:
            for some, vectors in zip(texts, pool.map(embed, range(8)), strict=True):
                assert_same(vectors, mini.embed_documents(some))

    def test_serves_a_vault(self, open_exact: OpenVault) -> None:
        function = embedding_functions.SentenceTransformerEmbeddingFunction(NAME)
        storage = open_exact(embedder=function)
        storage.for_user("alice").chunks.add("The cat sat on the mat", memory_type="semantic")
        storage.close()
        with pytest.raises(ConfigurationError, match="chroma/sentence_transformer/"):
            open_exact(embedder=None)
        hits = open_exact(embedder=function).for_user("alice").search("a feline on a rug", mode="vector")
        assert [hit.chunk.content for hit in hits] == ["The cat sat on the mat"]


class Wrapped(LangchainEmbeddings):  # type: ignore[misc]  # not installed where types are checked
    """An embedder of ours as one of LangChain's, with a way of its own with queries."""

    def __init__(self, embedder: SentenceTransformerEmbedder) -> None:
        self._embedder = embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._embedder.embed_documents(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        vector: list[float] = self._embedder.embed_documents([f"query: {text}"])[0].tolist()
        return vector


class TestLangchain:
    def test_has_to_be_named(self, mini: SentenceTransformerEmbedder) -> None:
        function = embedding_functions.ChromaLangchainEmbeddingFunction(Wrapped(mini))
        with pytest.raises(ConfigurationError, match="does not say which model it is"):
            ChromaFunctionEmbedder(function)

    def test_embeds_queries_one_by_one(self, mini: SentenceTransformerEmbedder) -> None:
        function = embedding_functions.ChromaLangchainEmbeddingFunction(Wrapped(mini))
        embedder = ChromaFunctionEmbedder(function, model="langchain/mini")
        documents = embed_checked(embedder.embed_documents, TEXTS, embedder)
        queries = embed_checked(embedder.embed_queries, TEXTS, embedder)
        assert_same(documents, mini.embed_documents(TEXTS))
        assert_same(queries, mini.embed_documents([f"query: {text}" for text in TEXTS]))
