"""Is an embedding function of Chroma's an embedder like any other, and is its model's name what tells vectors apart?"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from chromadb.api.types import Documents, EmbeddingFunction, Embeddings, SparseEmbeddingFunction, SparseVectors
from chromadb.base_types import SparseVector
from chromadb.utils import embedding_functions
from chromadb.utils.embedding_functions.chroma_cloud_qwen_embedding_function import ChromaCloudQwenEmbeddingModel

from memvault import ConfigurationError, EmbeddingError, IndexMismatchError
from memvault.embedding.base import Embedder, embed_checked
from memvault.embedding.chroma_function import BATCH_SIZE, ChromaFunctionEmbedder, is_chroma_function, model_of
from tests.conftest import OpenVault
from tests.support import HashingEmbedder, refused

HASHING = HashingEmbedder()


class Configured(EmbeddingFunction[Documents]):
    """A function of somebody's own on Chroma's base class, whose config is what a test says."""

    def __init__(self, **config: Any) -> None:
        self.config = config
        self.calls: list[list[str]] = []

    def __call__(self, input: Documents) -> Embeddings:
        self.calls.append(input)
        return list(HASHING.embed_documents(input))

    @staticmethod
    def name() -> str:
        return "tests_configured"

    def get_config(self) -> dict[str, Any]:
        return self.config

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> EmbeddingFunction[Documents]:
        return Configured(**config)


embedding_functions.register_embedding_function(Configured)  # type: ignore[no-untyped-call]


class Asymmetric(Configured):
    """Has a way of its own with queries."""

    def embed_query(self, input: Documents) -> Embeddings:
        return list(HASHING.embed_documents([f"query {text}" for text in input]))


class Nameless(EmbeddingFunction[Documents]):
    """As functions were before Chroma asked for names."""

    def __init__(self) -> None:
        pass

    def __call__(self, input: Documents) -> Embeddings:
        return list(HASHING.embed_documents(input))


class Sparse(SparseEmbeddingFunction[Documents]):
    """What Chroma has for keyword search."""

    def __init__(self) -> None:
        pass

    def __call__(self, input: Documents) -> SparseVectors:
        return [SparseVector(indices=[len(text)], values=[1.0]) for text in input]

    @staticmethod
    def name() -> str:
        return "tests_sparse"

    def get_config(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> SparseEmbeddingFunction[Documents]:
        return Sparse()


class LikeOne:
    """Without Chroma's base class, and without embed_query."""

    def __call__(self, input: list[str]) -> list[list[float]]:
        return [[3.0, 4.0] for _ in input]

    def name(self) -> str:
        return "like_one"

    def get_config(self) -> dict[str, Any]:
        return {}


@contextmanager
def embedding_server() -> Iterator[tuple[str, list[list[str]]]]:
    """A server that speaks as text-embeddings-inference does; its URL, and the texts of each request."""
    requests: list[list[str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
            requests.append(texts)
            body = json.dumps(HASHING.embed_documents(texts).tolist()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/embed", requests
        finally:
            server.shutdown()
            thread.join()


class TestWhatIsOne:
    @pytest.mark.parametrize("function", [Configured(), Nameless(), LikeOne()], ids=lambda each: type(each).__name__)
    def test_by_its_methods(self, function: object) -> None:
        assert is_chroma_function(function)

    @pytest.mark.parametrize(
        "other", [Configured, LikeOne, HASHING, "default", None, len, lambda texts: texts, object()]
    )
    def test_nothing_else(self, other: object) -> None:
        assert not is_chroma_function(other)
        with pytest.raises(ConfigurationError, match="name and get_config"):
            ChromaFunctionEmbedder(other)

    def test_chromadb_is_not_needed_to_tell(self) -> None:
        code = (
            "import sys\n"
            "from memvault.embedding.chroma_function import is_chroma_function\n"
            "print(is_chroma_function(len), 'chromadb' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.split() == ["False", "False"]


class TestVectors:
    def test_are_the_functions(self) -> None:
        embedder = ChromaFunctionEmbedder(Configured())
        assert isinstance(embedder, Embedder)
        assert embedder.dimension == HASHING.dimension
        texts = ["one text", "another"]
        for embed in (embedder.embed_documents, embedder.embed_queries):
            np.testing.assert_allclose(embed_checked(embed, texts, embedder), HASHING.embed_documents(texts), atol=1e-6)

    def test_of_queries_are_asked_for_as_such(self) -> None:
        embedder = ChromaFunctionEmbedder(Asymmetric())
        documents, queries = embedder.embed_documents(["text"]), embedder.embed_queries(["text"])
        np.testing.assert_allclose(documents, HASHING.embed_documents(["text"]), atol=1e-6)
        np.testing.assert_allclose(queries, HASHING.embed_documents(["query text"]), atol=1e-6)
        assert not np.allclose(documents, queries)

    def test_of_queries_without_embed_query(self) -> None:
        embedder = ChromaFunctionEmbedder(LikeOne())
        assert embedder.dimension == 2
        np.testing.assert_allclose(embed_checked(embedder.embed_queries, ["text"], embedder), [[0.6, 0.8]], atol=1e-6)

    def test_a_given_dimension_costs_no_call(self) -> None:
        function = Configured()
        assert ChromaFunctionEmbedder(function, dimension=64).dimension == 64
        assert function.calls == []

    def test_a_dimension_is_learnt_once(self) -> None:
        function = Configured()
        embedder = ChromaFunctionEmbedder(function)
        assert function.calls == []
        assert [embedder.dimension, embedder.dimension] == [64, 64]
        assert len(function.calls) == 1

    def test_sparse_ones_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="one vector for each text"):
            ChromaFunctionEmbedder(Sparse())

    @pytest.mark.parametrize("batch_size", [0, -1, True, "32", 1.5])
    def test_batch_size_is_checked(self, batch_size: Any) -> None:
        with pytest.raises(ConfigurationError, match="batch_size"):
            ChromaFunctionEmbedder(Configured(), batch_size=batch_size)


class TestModel:
    @pytest.mark.parametrize(
        ("config", "model"),
        [
            ({}, "chroma/tests_configured"),
            ({"model_name": "BAAI/bge-m3"}, "chroma/tests_configured/BAAI/bge-m3"),
            ({"model": "large"}, "chroma/tests_configured/large"),
            ({"url": "http://user:pw@host:8080/embed?key=pw"}, "chroma/tests_configured/http://host:8080/embed"),
            ({"model": "large", "url": "http://host", "api_base": "http://other"}, "chroma/tests_configured/large"),
            ({"model": "large", "dimensions": None, "kwargs": {}}, "chroma/tests_configured/large"),
        ],
        ids=str,
    )
    def test_is_called_after_the_functions_own(self, config: dict[str, Any], model: str) -> None:
        assert ChromaFunctionEmbedder(Configured(**config)).model == model

    @pytest.mark.parametrize(
        "config",
        [
            {"api_key": "sk-secret"},
            {"api_key_env_var": "SECRET"},
            {"apiKey": "sk-secret"},
            {"default_headers": {"Authorization": "Bearer sk-secret"}},
            {"kwargs": {"token": "hf_secret"}},
            {"session_args": {"aws_secret_access_key": "secret", "profile_name": "secret"}},
            {"device": "cuda"},
            {"kwargs": {"cache_folder": "/models"}},
            {"timeout": 60},
            {"preferred_providers": ["CPUExecutionProvider"]},
            {"normalize_embeddings": True},
            {"query_config": {"task": "retrieval.query"}},
        ],
        ids=str,
    )
    def test_says_nothing_of_secrets_and_places(self, config: dict[str, Any]) -> None:
        assert model_of(Configured(model_name="small", **config)) == model_of(Configured(model_name="small"))

    def test_differs_with_whatever_changes_vectors(self) -> None:
        configs: list[dict[str, Any]] = [
            {},
            {"dimensions": 256},
            {"dimensions": 512},
            {"task": "retrieval.passage"},
            {"task_type": "RETRIEVAL_DOCUMENT"},
            {"instruction": "Represent the document: "},
            {"kwargs": {"truncate_dim": 128}},
            {"kwargs": {"revision": "main"}},
            {"max_token": 128},
            {"pooling": "cls"},
            {"own": [{"layers": 3}]},
        ]
        models = [model_of(Configured(model_name="small", **config)) for config in configs]
        assert len(set(models)) == len(configs)
        assert all(model.startswith("chroma/tests_configured/small") for model in models)

    def test_does_not_differ_between_processes(self) -> None:
        # A digest of repr() or hash() would: the vault would refuse its own embedder.
        config = {"model_name": "small", "task": "passage", "dimensions": 256}
        assert model_of(Configured(**config)) == "chroma/tests_configured/small#f35c1a21"
        assert model_of(Configured(**dict(reversed(config.items())))) == model_of(Configured(**config))

    def test_a_secret_under_an_innocent_name_does_not_come_out(self) -> None:
        model = model_of(Configured(model_name="small", own={"phrase": "open sesame"}))
        assert "sesame" not in model

    def test_can_be_given(self) -> None:
        assert ChromaFunctionEmbedder(Configured(model_name="small"), model="mine/7").model == "mine/7"

    @pytest.mark.filterwarnings("ignore:The class Nameless does not implement:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:The EmbeddingFunction class does not implement:DeprecationWarning")
    def test_has_to_be_given_where_there_is_no_name(self) -> None:
        with pytest.raises(ConfigurationError, match=r"Nameless does not say which model it is.*model="):
            ChromaFunctionEmbedder(Nameless())
        assert ChromaFunctionEmbedder(Nameless(), model="mine").dimension == 64

    @pytest.mark.parametrize(
        "config", [{"own": object()}, {"own": {1, 2}}, {"own": b"bytes"}], ids=["object", "set", "bytes"]
    )
    def test_has_to_be_given_where_the_config_is_no_json(self, config: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="does not say which model it is"):
            ChromaFunctionEmbedder(Configured(**config))

    def test_has_to_be_given_where_it_is_too_long(self) -> None:
        with pytest.raises(ConfigurationError, match="at most 255"):
            ChromaFunctionEmbedder(Configured(model_name="x" * 300))
        assert ChromaFunctionEmbedder(Configured(model_name="x" * 300), model="x").model == "x"

    def test_of_chromas_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HUGGINGFACE_API_KEY", raising=False)
        monkeypatch.setenv("TESTS_KEY", "sk-secret")
        qwen = ChromaCloudQwenEmbeddingModel.QWEN3_EMBEDDING_0p6B
        functions = {
            "chroma/default": embedding_functions.DefaultEmbeddingFunction(),
            "chroma/onnx_mini_lm_l6_v2": embedding_functions.ONNXMiniLM_L6_V2(["CPUExecutionProvider"]),
            "chroma/huggingface/org/name": embedding_functions.HuggingFaceEmbeddingFunction(
                model_name="org/name", api_key_env_var="TESTS_KEY"
            ),
            "chroma/huggingface_server/https://host/embed": embedding_functions.HuggingFaceEmbeddingServer(
                "https://user:sk-secret@host/embed", api_key_env_var="TESTS_KEY"
            ),
            "chroma/cloudflare_workers_ai/@cf/baai/bge-m3": embedding_functions.CloudflareWorkersAIEmbeddingFunction(
                model_name="@cf/baai/bge-m3", account_id="sk-secret", api_key_env_var="TESTS_KEY"
            ),
            "chroma/together_ai/m2-bert": embedding_functions.TogetherAIEmbeddingFunction(
                "m2-bert", api_key_env_var="TESTS_KEY"
            ),
        }
        assert {model_of(function): function for function in functions.values()} == functions
        tasks = {
            model_of(embedding_functions.ChromaCloudQwenEmbeddingFunction(qwen, task, api_key_env_var="TESTS_KEY"))
            for task in (None, "nl_to_code")
        }
        assert len(tasks) == 2
        assert all(model.startswith("chroma/chroma-cloud-qwen/Qwen/Qwen3-Embedding-0.6B#") for model in tasks)


class TestInAVault:
    def test_is_wrapped_and_found_by(self, open_exact: OpenVault) -> None:
        storage = open_exact(embedder=Configured(model_name="small"))
        alice = storage.for_user("alice")
        chunk = alice.chunks.add("blue is the favourite colour", memory_type="semantic")
        alice.chunks.add("meets on tuesdays", memory_type="semantic")
        best = alice.search("which colour is the favourite", mode="vector")[0]
        assert best.chunk.id == chunk.id
        expected = (
            HASHING.embed_documents(["which colour is the favourite"])[0] @ HASHING.embed_documents([chunk.content])[0]
        )
        assert best.similarity == pytest.approx(expected, abs=1e-5)

    def test_a_server_gets_no_more_than_it_takes(self, open_exact: OpenVault, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HUGGINGFACE_API_KEY", raising=False)
        with embedding_server() as (url, requests):
            storage = open_exact(embedder=embedding_functions.HuggingFaceEmbeddingServer(url))
            vectors = storage.for_user("alice").embed([f"text {number}" for number in range(BATCH_SIZE * 2 + 1)])
            assert vectors.shape == (BATCH_SIZE * 2 + 1, 64)
            assert [len(texts) for texts in requests] == [1, BATCH_SIZE, BATCH_SIZE, 1]  # the first for the dimension

    def test_a_server_that_is_gone_stores_nothing(self, open_exact: OpenVault, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HUGGINGFACE_API_KEY", raising=False)
        with embedding_server() as (url, _):
            storage = open_exact(embedder=embedding_functions.HuggingFaceEmbeddingServer(url))
        with refused(storage, EmbeddingError, "chroma/huggingface_server/", "ConnectError"):
            storage.for_user("alice").chunks.add("lost", memory_type="semantic")

    def test_a_remembered_one_has_to_be_given_again(self, open_exact: OpenVault) -> None:
        open_exact(embedder=Configured(model_name="small")).close()
        with pytest.raises(ConfigurationError, match="chroma/tests_configured/small"):
            open_exact(embedder=None)
        storage = open_exact(embedder=Configured(model_name="small"))
        assert storage.for_user("alice").search("anything") == []

    def test_another_model_is_refused(self, open_exact: OpenVault) -> None:
        open_exact(embedder=Configured(model_name="small")).close()
        with pytest.raises(IndexMismatchError, match="memvault reindex --embedder"):
            open_exact(embedder=Configured(model_name="large"))

    def test_a_class_is_refused(self, open_exact: OpenVault) -> None:
        with pytest.raises(ConfigurationError, match="embedder must be"):
            open_exact(embedder=Configured)
