"""How is a caller's own embedder called? Functions, batches, a deadline, and no text twice for one user."""

from __future__ import annotations

import contextvars
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from memvault import ConfigurationError, EmbeddingError, IndexMismatchError, NewChunk, StorageLayer
from memvault.config import build_embedder, settings_from_env
from memvault.database import migrate
from memvault.embedding.base import BATCH_SIZE, Matrix
from memvault.embedding.calling import MAX_HUNG, EmbedderCalls
from memvault.embedding.function import FunctionEmbedder
from memvault.vectors.canonical import VECTORS
from tests.conftest import OpenVault
from tests.support import HashingEmbedder, dump, refused, statements


class Counting(HashingEmbedder):
    """Notes every call."""

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        if batch_size is not None:
            self.batch_size = batch_size

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        self.calls.append(list(texts))
        return super().embed_documents(texts)

    def embed_queries(self, texts: Sequence[str]) -> Matrix:
        return super().embed_documents(texts)

    @property
    def texts(self) -> list[str]:
        return [text for call in self.calls for text in call]


class Stubborn(HashingEmbedder):
    """Hangs while ``hangs`` is set, until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False
        self._released = threading.Event()

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        if self.hangs:
            self._released.wait()
        return super().embed_documents(texts)

    def release(self) -> None:
        self.hangs = False
        self._released.set()


@pytest.fixture
def stubborn() -> Iterator[Stubborn]:
    embedder = Stubborn()
    yield embedder
    embedder.release()


def three(texts: list[str]) -> list[list[float]]:
    """An embedder as somebody would write it in a minute."""
    return [[float(len(text)), 1.0, float(text.count("a"))] for text in texts]


class TestFunctions:
    def test_a_function_is_an_embedder(self, open_exact: OpenVault) -> None:
        layer = open_exact(embedder=three)
        alice = layer.for_user("alice")
        alice.chunks.add_many([NewChunk("aaaa"), NewChunk("some longer text")])
        assert alice.search("aaaaa", k=1)[0].chunk.content == "aaaa"
        assert (layer.stats()["model"], layer.stats()["dimension"]) == ("tests.test_embedders.three", 3)
        assert np.linalg.norm(alice.embed(["x"]), axis=1) == pytest.approx(1)

    def test_the_vault_remembers_it_and_says_what_to_pass(self, open_exact: OpenVault) -> None:
        open_exact(embedder=three).close()
        with pytest.raises(ConfigurationError, match="tests.test_embedders.three.*function"):
            open_exact(embedder=None)
        open_exact(embedder=FunctionEmbedder(three, model="tests.test_embedders.three"))

    @pytest.mark.parametrize(
        "other",
        [
            HashingEmbedder(),
            FunctionEmbedder(three, model="another"),
            FunctionEmbedder(lambda texts: [[1.0] * 4] * len(texts), model="tests.test_embedders.three"),
            "static",
            "none",
        ],
        ids=["object", "model", "dimension", "static", "none"],
    )
    def test_another_one_is_refused(self, open_exact: OpenVault, other: Any) -> None:
        open_exact(embedder=three).close()
        with pytest.raises(IndexMismatchError, match="memvault reindex --embedder"):
            open_exact(embedder=other)

    @pytest.mark.parametrize("nameless", [lambda texts: texts, HashingEmbedder, int, 7])
    def test_what_has_no_name_is_refused(self, open_exact: OpenVault, nameless: Any) -> None:
        with pytest.raises(ConfigurationError, match="embedder"):
            open_exact(embedder=nameless)

    def test_a_lambda_with_a_name(self, open_exact: OpenVault) -> None:
        layer = open_exact(embedder=FunctionEmbedder(lambda texts: np.ones((len(texts), 5)), model="ones", dimension=5))
        assert layer.for_user("alice").embed(["x", "y"]).shape == (2, 5)

    @pytest.mark.parametrize("answer", [[1.0, 2.0], [[1.0], [2.0]], [], 3.0, [[[1.0]]]])
    def test_one_text_has_to_give_one_vector(self, open_exact: OpenVault, answer: Any) -> None:
        with pytest.raises(EmbeddingError, match="one vector for each text"):
            open_exact(embedder=FunctionEmbedder(lambda texts: answer, model="odd"))

    @pytest.mark.parametrize(
        "bound", [HashingEmbedder().embed_documents, functools.partial(three)], ids=["method", "partial"]
    )
    def test_what_depends_on_an_object_is_refused(self, open_exact: OpenVault, bound: Any) -> None:
        # Its name would not say which model it is: two of one class would pass for each other.
        with pytest.raises(ConfigurationError, match="FunctionEmbedder"):
            open_exact(embedder=bound)
        assert open_exact(embedder=FunctionEmbedder(bound, model="named")).stats()["model"] == "named"

    def test_an_asynchronous_one_is_refused(self, open_exact: OpenVault) -> None:
        async def later(texts: list[str]) -> Any:
            return three(texts)

        with pytest.raises(ConfigurationError, match="plain"):
            open_exact(embedder=FunctionEmbedder(later, model="later"))

    @pytest.mark.parametrize("size", [0, -1, True, 2.5, "8"])
    def test_a_batch_size_that_cannot_be(self, size: Any) -> None:
        with pytest.raises(ConfigurationError, match="batch_size"):
            FunctionEmbedder(three, model="three", batch_size=size)

    @pytest.mark.parametrize("dimension", [0, -3, True, 2.0, "3"])
    def test_a_dimension_that_cannot_be(self, open_exact: OpenVault, dimension: Any) -> None:
        with pytest.raises(ConfigurationError, match="dimension must be"):
            open_exact(embedder=FunctionEmbedder(three, model="three", dimension=dimension))

    def test_numpys_integers_are_dimensions(self, open_exact: OpenVault) -> None:
        layer = open_exact(embedder=FunctionEmbedder(three, model="three", dimension=np.int64(3)))  # type: ignore[arg-type]
        assert layer.stats()["dimension"] == 3

    def test_what_fails_at_opening(self, open_exact: OpenVault) -> None:
        def broken(texts: list[str]) -> Any:
            raise RuntimeError("no such model")

        with pytest.raises(EmbeddingError, match="no such model") as caught:
            open_exact(embedder=FunctionEmbedder(broken, model="broken"))
        assert isinstance(caught.value.__cause__, RuntimeError)


class Loading(HashingEmbedder):
    """Learns its dimension when it is asked for it; that may take long, or fail."""

    loading_s = 60.0

    def __init__(self, load: Callable[[], int]) -> None:
        self.model = "tests/loading"
        self._load = load
        self.asked = 0

    @property
    def dimension(self) -> int:  # type: ignore[override]
        self.asked += 1
        return self._load()


class TestLoading:
    def test_what_fails_to_load_is_an_embedding_error(self, open_exact: OpenVault) -> None:
        def fails() -> int:
            raise OSError("no such file: weights")

        with pytest.raises(EmbeddingError, match=r"tests/loading.*OSError: no such file: weights") as caught:
            open_exact(embedder=Loading(fails))
        assert isinstance(caught.value.__cause__, OSError)
        open_exact(embedder=three)  # nothing was founded

    def test_loading_has_a_time_of_its_own(self, open_exact: OpenVault) -> None:
        released = threading.Event()
        threading.Timer(0.3, released.set).start()
        layer = open_exact(embedder=Loading(lambda: 64 if released.wait(30) else 0), embed_timeout=0.05)
        assert layer.for_user("alice").embed(["x"]).shape == (1, 64)

    def test_an_embedder_is_recognised_without_asking_it_anything(self) -> None:
        loading = Loading(lambda: 1 // 0)
        assert build_embedder(loading) is loading
        assert loading.asked == 0


class TestBatches:
    def test_texts_come_in_batches(self, open_exact: OpenVault) -> None:
        embedder = Counting()
        seen: list[tuple[int, int]] = []
        texts = [f"text {number}" for number in range(2 * BATCH_SIZE + 10)]
        layer = open_exact(embedder=embedder)
        layer.for_user("alice").chunks.add_many(map(NewChunk, texts), progress=lambda *done: seen.append(done))
        assert [len(call) for call in embedder.calls] == [BATCH_SIZE, BATCH_SIZE, 10]
        assert embedder.texts == texts
        assert seen == [(BATCH_SIZE, len(texts)), (2 * BATCH_SIZE, len(texts)), (len(texts), len(texts))]

    def test_the_last_progress_comes_when_all_is_stored(self, open_exact: OpenVault) -> None:
        alice = open_exact(embedder=Counting(batch_size=2)).for_user("alice")
        stored: list[tuple[int, int]] = []
        alice.chunks.add_many(
            [NewChunk("1"), NewChunk("2"), NewChunk("3"), NewChunk("rule", memory_type="procedural")],
            progress=lambda done, total: stored.append((done, alice.chunks.count())),
        )
        assert stored == [(3, 0), (4, 4)]

    def test_progress_rises_over_several_transactions(
        self, open_exact: OpenVault, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("memvault.memory.chunks.TRANSACTION_SIZE", 10)
        alice = open_exact(embedder=Counting(batch_size=4)).for_user("alice")
        seen: list[tuple[int, int, int]] = []
        alice.chunks.add_many(
            # A third of them a text that stands there before.
            [NewChunk(f"text {number if number % 3 else 0}") for number in range(25)],
            progress=lambda done, total: seen.append((done, total, alice.chunks.count())),
        )
        done = [each[0] for each in seen]
        assert done == sorted(set(done))
        assert {total for _, total, _ in seen} == {25}
        assert [stored for done, _, stored in seen if done in (10, 20, 25)] == [10, 20, 25]
        assert any(stored < done for done, _, stored in seen)

    def test_an_embedder_may_name_its_size(self, open_exact: OpenVault) -> None:
        embedder = Counting(batch_size=3)
        alice = open_exact(embedder=embedder).for_user("alice")
        seen: list[tuple[int, int]] = []
        matrix = alice.embed([f"text {number}" for number in range(8)], progress=lambda *done: seen.append(done))
        assert matrix.shape == (8, 64)
        assert [len(call) for call in embedder.calls] == [3, 3, 2]
        assert seen == [(3, 8), (6, 8), (8, 8)]
        assert alice.embed([]).shape == (0, 64)

    def test_a_batch_that_fails_stores_nothing(self, open_exact: OpenVault) -> None:
        class FailsSecond(Counting):
            def embed_documents(self, texts: Sequence[str]) -> Matrix:
                if self.calls:
                    raise RuntimeError("quota exceeded")
                return super().embed_documents(texts)

        layer = open_exact(embedder=FailsSecond(batch_size=10))
        with refused(layer, EmbeddingError, "quota exceeded", "tests/hashing-64"):
            layer.for_user("alice").chunks.add_many(NewChunk(f"text {number}") for number in range(15))


class TestOnce:
    """The same text of the same user is embedded once, ever."""

    @pytest.fixture
    def embedder(self) -> Counting:
        return Counting()

    @pytest.fixture
    def layer(self, open_exact: OpenVault, embedder: Counting) -> StorageLayer:
        return open_exact(embedder=embedder)

    def test_within_a_call_and_between_calls(self, layer: StorageLayer, embedder: Counting) -> None:
        alice = layer.for_user("alice")
        alice.chunks.add_many([NewChunk("tea"), NewChunk("chess"), NewChunk("tea")])
        alice.chunks.add("tea")
        alice.chunks.add_many([NewChunk("chess"), NewChunk("new")])
        assert embedder.texts == ["tea", "chess", "new"]
        assert len(alice.search("tea", min_similarity=0.999)) == 3

    def test_never_across_users(self, layer: StorageLayer, embedder: Counting) -> None:
        layer.for_user("alice").chunks.add("tea")
        with statements(layer.engine) as sent:
            layer.for_user("bob").chunks.add("tea")
        assert embedder.texts == ["tea", "tea"]
        assert all("user_id" in one for one in sent if "content_hash IN" in one)

    def test_within_a_transaction(self, layer: StorageLayer, embedder: Counting) -> None:
        alice = layer.for_user("alice")
        with pytest.raises(ZeroDivisionError), alice.transaction() as tx:
            tx.chunks.add("tea")
            tx.chunks.add("tea")
            raise ZeroDivisionError
        assert embedder.texts == ["tea"]
        with alice.transaction() as tx:  # what was rolled back is not known
            tx.chunks.add("tea")
        with alice.transaction() as tx:
            tx.chunks.add("tea")
        assert embedder.texts == ["tea", "tea"]

    def test_in_the_callers_transaction(self, open_exact: OpenVault) -> None:
        begun: list[bool] = []

        class Noting(Counting):
            def embed_documents(self, texts: Sequence[str]) -> Matrix:
                begun.append(session.in_transaction())
                return super().embed_documents(texts)

        embedder = Noting()
        layer = open_exact(embedder=embedder)
        with Session(layer.engine) as session:
            alice = layer.for_user("alice", sql_session=session)
            alice.chunks.add("tea")
            alice.chunks.add("tea")
            session.commit()
            alice.chunks.add_many([NewChunk("tea"), NewChunk("chess")])
            session.commit()
        assert (embedder.texts, begun) == (["tea", "chess"], [False, False])  # the write lock did not wait for it
        assert layer.for_user("alice").chunks.count() == 4

    def test_a_failure_leaves_the_callers_transaction_usable(self, open_exact: OpenVault) -> None:
        class Picky(Counting):
            def embed_documents(self, texts: Sequence[str]) -> Matrix:
                if "bad" in texts:
                    raise RuntimeError("no")
                return super().embed_documents(texts)

        layer = open_exact(embedder=Picky())
        with Session(layer.engine) as session:
            alice = layer.for_user("alice", sql_session=session)
            alice.chunks.add("tea")
            with pytest.raises(EmbeddingError):
                alice.chunks.add_many([NewChunk("good"), NewChunk("bad")])
            alice.chunks.add("chess")
            session.commit()
        assert [chunk.content for chunk in layer.for_user("alice").chunks.list().items] == ["tea", "chess"]

    def test_an_update_to_the_same(self, layer: StorageLayer, embedder: Counting) -> None:
        alice = layer.for_user("alice")
        chunk = alice.chunks.add("tea")
        assert alice.chunks.update(chunk.id, content="tea", importance=0.9).version == 2
        assert embedder.texts == ["tea"]
        assert alice.search("tea", min_similarity=0.999)[0].chunk.importance == 0.9

    def test_of_another_model_nothing_is_taken(self, layer: StorageLayer, embedder: Counting) -> None:
        alice = layer.for_user("alice")
        alice.chunks.add("tea")
        with layer.engine.begin() as connection:
            connection.execute(update(VECTORS).values(model="another"))
        alice.chunks.add("tea")
        assert embedder.texts == ["tea", "tea"]

    def test_one_that_is_cheap_is_asked_instead_of_the_database(self, open_exact: OpenVault) -> None:
        class Cheap(Counting):
            cheap = True
            threads: ClassVar[set[str]] = set()

            def embed_documents(self, texts: Sequence[str]) -> Matrix:
                self.threads.add(threading.current_thread().name)
                return super().embed_documents(texts)

        embedder = Cheap()
        layer = open_exact(embedder=embedder)
        alice = layer.for_user("alice")
        with statements(layer.engine) as sent:
            alice.chunks.add("tea")
            alice.chunks.add_many([NewChunk("tea"), NewChunk("tea")])
        assert embedder.texts == ["tea", "tea"]  # in each call once
        assert not any("content_hash IN" in one for one in sent)
        assert embedder.threads == {threading.current_thread().name}

    def test_vectors_from_before_are_made_anew_once(self, open_exact: OpenVault, database_url: str) -> None:
        # Which of them the embedder made was not noted then.
        open_exact(embedder=Counting()).for_user("alice").chunks.add_many([NewChunk("tea"), NewChunk("chess")])
        try:
            migrate.downgrade(database_url, "0001")
        finally:
            migrate.upgrade(database_url)
        embedder = Counting()
        alice = open_exact(embedder=embedder).for_user("alice")
        assert len(alice.search("tea", min_similarity=0.999)) == 1
        alice.chunks.add("tea")
        alice.chunks.add("tea")
        assert embedder.texts == ["tea"]
        assert len(alice.search("tea", min_similarity=0.999)) == 3

    def test_an_update_to_what_is_known(self, layer: StorageLayer, embedder: Counting) -> None:
        alice = layer.for_user("alice")
        chunk = alice.chunks.add("tea")
        alice.chunks.add("chess")
        alice.chunks.update(chunk.id, content="tea")
        alice.chunks.update(chunk.id, content="chess")
        alice.chunks.update(chunk.id, content="mountains")
        assert embedder.texts == ["tea", "chess", "mountains"]
        assert [hit.chunk.id for hit in alice.search("mountains", k=1)] == [chunk.id]

    def test_a_vector_of_the_callers_is_not_taken_for_the_embedders(
        self, layer: StorageLayer, embedder: Counting
    ) -> None:
        alice = layer.for_user("alice")
        given = np.ones(64)
        alice.chunks.add("tea", embedding=given)
        chunk = alice.chunks.add("tea")
        assert embedder.texts == ["tea"]
        assert [hit.chunk.id for hit in alice.search("tea", min_similarity=0.999)] == [chunk.id]
        alice.chunks.update(chunk.id, content="tea", embedding=given)
        alice.chunks.add("tea")
        assert embedder.texts == ["tea", "tea"]

    def test_importing_again_embeds_nothing(self, layer: StorageLayer, embedder: Counting) -> None:
        lines = [f'{{"user_id": "alice", "content": "text {number % 5}"}}' for number in range(9)]
        assert layer.import_user(lines).added == 5
        assert layer.import_user(lines).added == 0
        assert sorted(embedder.texts) == [f"text {number}" for number in range(5)]
        layer.import_user(lines, "bob")
        assert len(embedder.texts) == 10

    def test_what_was_deleted_is_embedded_again(self, layer: StorageLayer, embedder: Counting) -> None:
        alice = layer.for_user("alice")
        alice.chunks.delete(alice.chunks.add("tea").id)
        alice.chunks.add("tea")
        assert embedder.texts == ["tea", "tea"]

    def test_a_transaction_begins_after_embedding(self, layer: StorageLayer) -> None:
        seen: list[str] = []

        class Noting(Counting):
            def embed_documents(self, texts: Sequence[str]) -> Matrix:
                seen.append("embed")
                return super().embed_documents(texts)

        with StorageLayer.open(layer.engine, embedder=Noting()) as again:
            alice = again.for_user("alice")
            alice.chunks.add("tea")
            seen.clear()
            with statements(layer.engine) as sent, alice.transaction() as tx:
                tx.chunks.add("chess")
                before = list(sent)
                tx.chunks.add("tea")
            assert seen == ["embed"]
            inserts = [place for place, one in enumerate(before) if "INSERT INTO" in one and "memory_chunks" in one]
            assert inserts

    def test_the_origin_is_noted(self, layer: StorageLayer) -> None:
        alice = layer.for_user("alice")
        alice.chunks.add("made")
        alice.chunks.add("given", embedding=np.ones(64))
        with layer.engine.connect() as connection:
            made = {row.chunk_id: row.embedded for row in connection.execute(select(VECTORS))}
        contents = {chunk.id: chunk.content for chunk in alice.chunks.list().items}
        assert {contents[id]: embedded for id, embedded in made.items()} == {"made": True, "given": False}


class TestDeadline:
    def test_one_that_hangs(self, open_exact: OpenVault, stubborn: Stubborn) -> None:
        layer = open_exact(embedder=stubborn, embed_timeout=0.2)
        alice = layer.for_user("alice")
        chunk = alice.chunks.add("tea")
        stubborn.hangs = True
        calls: list[Callable[[], object]] = [
            lambda: alice.chunks.add("chess"),
            lambda: alice.chunks.add_many([NewChunk("a"), NewChunk("b")]),
            lambda: alice.chunks.update(chunk.id, content="chess"),
            lambda: alice.search("chess"),
            lambda: alice.embed(["chess"]),
            lambda: layer.import_user(['{"user_id": "alice", "content": "chess"}']),
        ]
        for call in calls:
            with refused(layer, EmbeddingError, "0.2 s", "embed_timeout"):
                call()
        stubborn.release()
        alice.chunks.add("chess")
        assert alice.search("chess", k=1)[0].chunk.content == "chess"

    def test_the_database_is_not_held_up_meanwhile(self, open_exact: OpenVault, stubborn: Stubborn) -> None:
        layer = open_exact(embedder=stubborn, embed_timeout=60)
        stubborn.hangs = True
        writer = threading.Thread(target=lambda: layer.for_user("alice").chunks.add("slow"))
        writer.start()
        layer.for_user("bob").procedural.set("key", 1)
        layer.for_user("alice").procedural.set("key", 1)
        assert layer.for_user("alice").chunks.count() == 0
        stubborn.release()
        writer.join(30)
        assert layer.for_user("alice").chunks.count() == 1

    def test_after_several_it_is_asked_no_more(self, stubborn: Stubborn) -> None:
        calls = EmbedderCalls(stubborn, 0.01)
        stubborn.hangs = True
        for _ in range(MAX_HUNG):
            with pytest.raises(EmbeddingError, match="has not answered"):
                calls.documents(["x"])
        before = threading.active_count()
        for _ in range(5):
            with pytest.raises(EmbeddingError, match="asked no more"):
                calls.documents(["x"])
        assert threading.active_count() == before
        stubborn.release()
        for thread in threading.enumerate():
            if thread.name == "memvault-embedder":
                thread.join(30)
        assert calls.documents(["x"]).shape == (1, 64)

    def test_one_that_hangs_does_not_keep_the_process(self, tmp_path: Path) -> None:
        script = (
            "import time\n"
            "from memvault import EmbeddingError, StorageLayer\n"
            "from memvault.embedding.function import FunctionEmbedder\n"
            "slow = FunctionEmbedder(lambda texts: time.sleep(600), model='slow', dimension=3)\n"
            "with StorageLayer.open(':memory:', vectors='exact', embedder=slow, embed_timeout=0.1) as storage:\n"
            "    try:\n"
            "        storage.for_user('alice').chunks.add('x')\n"
            "    except EmbeddingError:\n"
            "        print('refused')\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr

    def test_one_that_hangs_at_opening(self, open_exact: OpenVault) -> None:
        released = threading.Event()
        hanging = FunctionEmbedder(lambda texts: released.wait(), model="slow")
        with pytest.raises(EmbeddingError, match="has not answered"):
            open_exact(embedder=hanging, embed_timeout=0.1)
        released.set()

    @pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
    def test_what_is_no_failure_passes(self, raised: type[BaseException]) -> None:
        def ends(texts: list[str]) -> Any:
            raise raised

        with pytest.raises(raised):
            EmbedderCalls(FunctionEmbedder(ends, model="ends", dimension=3)).documents(["x"])

    def test_waiting_can_be_interrupted(self) -> None:
        script = (
            "import os, signal, threading\n"
            "from memvault import StorageLayer\n"
            "from memvault.embedding.function import FunctionEmbedder\n"
            "def hangs(texts):\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "    threading.Event().wait()\n"
            "slow = FunctionEmbedder(hangs, model='slow', dimension=3)\n"
            "with StorageLayer.open(':memory:', vectors='exact', embedder=slow) as storage:\n"
            "    try:\n"
            "        storage.for_user('alice').chunks.add('x')\n"
            "    except KeyboardInterrupt:\n"
            "        print('interrupted', storage.for_user('alice').chunks.count())\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
        assert (done.returncode, done.stdout) == (0, "interrupted 0\n"), done.stderr

    def test_context_variables_are_seen(self, open_exact: OpenVault) -> None:
        request: contextvars.ContextVar[str] = contextvars.ContextVar("request")
        seen: list[str] = []

        def traced(texts: list[str]) -> Any:
            seen.append(request.get("none"))
            return np.ones((len(texts), 3))

        layer = open_exact(embedder=FunctionEmbedder(traced, model="traced", dimension=3))
        request.set("r-17")
        layer.for_user("alice").chunks.add("tea")
        assert seen == ["r-17"]

    @pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), True, "60", None])
    def test_a_deadline_that_cannot_be(self, open_exact: OpenVault, bad: Any) -> None:
        with pytest.raises(ConfigurationError, match="embed_timeout"):
            open_exact(embed_timeout=bad)

    def test_by_the_environment(self) -> None:
        settings = settings_from_env({"MEMVAULT_DATABASE_URL": "sqlite:///x.db", "MEMVAULT_EMBED_TIMEOUT": "2.5"})
        assert settings["embed_timeout"] == 2.5


@pytest.mark.parametrize(
    "answer",
    [
        lambda texts: np.full((len(texts), 64), np.nan),
        lambda texts: np.full((len(texts), 64), np.inf),
        lambda texts: np.zeros((len(texts), 64)),
        lambda texts: np.ones((len(texts), 63)),
        lambda texts: np.ones((len(texts) + 1, 64)),
        lambda texts: np.ones(64),
        lambda texts: [["x"] * 64 for _ in texts],
        lambda texts: None,
        lambda texts: 1 / 0,
    ],
    ids=["NaN", "infinite", "zero", "dimension", "count", "flat", "text", "nothing", "raises"],
)
def test_nonsense_stores_nothing(open_exact: OpenVault, answer: Callable[[list[str]], Any]) -> None:
    layer = open_exact(embedder=FunctionEmbedder(answer, model="nonsense", dimension=64))
    alice = layer.for_user("alice")
    chunk = alice.chunks.add("kept", embedding=np.ones(64))
    before = dump(layer)
    calls: list[Callable[[], object]] = [
        lambda: alice.chunks.add("text"),
        lambda: alice.chunks.add_many([NewChunk("one"), NewChunk("two")]),
        lambda: alice.chunks.update(chunk.id, content="text"),
        lambda: alice.search("text"),
    ]
    for call in calls:
        with refused(layer, EmbeddingError, "nonsense"):
            call()
    with pytest.raises(EmbeddingError), alice.transaction() as tx:
        tx.procedural.set("key", 1)
        tx.chunks.add("text")
    assert dump(layer) == before
