"""Does the static embedder keep the protocol, and is every other answer held against it?"""

from __future__ import annotations

import array
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memvault.embedding.base import Embedder, Matrix, check_vector, embed_checked
from memvault.embedding.static import StaticEmbedder
from memvault.errors import EmbeddingError, MemvaultError, ValidationError

ODD_TEXTS = [
    "a",
    " a\n",
    "🙂",
    "👩\u200d👩\u200d👧",
    "!",
    "...?!",
    "—",
    "\u200b",
    "\ufeff",
    "\u202e",
    "\u0301",
    "\x01",
    "\U0010ffff",
    "Zoë",
    "Zoe\u0308",
    "שלום",
    "東京都",
    "<s></s><unk>",
    "[PAD]",
    "0",
    "a" * 1_000,
]


@pytest.fixture(scope="module")
def static() -> StaticEmbedder:
    return StaticEmbedder()


def in_fresh_python(code: str, home: Path) -> str:
    """What a fresh interpreter prints, with an empty home and every look-up and connection refused."""
    blocked = (
        "import sys\n"
        "def refuse(event, args):\n"
        "    if event.startswith('socket.') and event not in ('socket.__new__', 'socket.gethostname'):\n"
        "        raise RuntimeError(f'the network was asked for: {event} {args}')\n"
        "sys.addaudithook(refuse)\n"
    )
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_", "XDG_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", blocked + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**environment, "HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class TestStaticEmbedder:
    def test_it_is_an_embedder(self, static: StaticEmbedder) -> None:
        assert isinstance(static, Embedder)
        assert (static.model, static.dimension) == ("wordllama/l2_supercat-256", 256)

    @pytest.mark.parametrize("method", ["embed_documents", "embed_queries"])
    def test_shape_type_and_norm(self, static: StaticEmbedder, method: str) -> None:
        embed: Callable[[Sequence[str]], Matrix] = getattr(static, method)
        for texts in (["one"], ["one", "two", "three"], ("a", "tuple"), ODD_TEXTS):
            answer = embed(texts)
            assert answer.shape == (len(texts), 256)
            assert answer.dtype == np.float32
            np.testing.assert_allclose(np.linalg.norm(answer, axis=1), 1, atol=1e-5)

    @pytest.mark.parametrize("text", ODD_TEXTS, ids=lambda text: ascii(text)[:20])
    def test_odd_texts_have_a_direction(self, static: StaticEmbedder, text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer = embed_checked(static.embed_documents, [text], static)
        assert np.isfinite(answer).all()

    @given(st.lists(st.text(min_size=1, max_size=20).filter(lambda text: bool(text.strip())), max_size=5))
    @settings(deadline=None, max_examples=30)
    def test_any_storable_text_has_a_direction(self, static: StaticEmbedder, texts: list[str]) -> None:
        storable = [text for text in texts if not any("\ud800" <= sign <= "\udfff" for sign in text)]
        assert embed_checked(static.embed_documents, storable, static).shape == (len(storable), 256)

    def test_no_texts(self, static: StaticEmbedder) -> None:
        answer = static.embed_documents([])
        assert answer.shape == (0, 256)
        assert answer.dtype == np.float32

    def test_the_same_text_gives_the_same_vector_in_any_company(self, static: StaticEmbedder) -> None:
        texts = [f"{text} {number}" for number in range(3) for text in ODD_TEXTS]
        together = static.embed_documents(texts)
        np.testing.assert_array_equal(static.embed_documents(texts), together)
        np.testing.assert_allclose(static.embed_documents(texts[::-1])[::-1], together, atol=1e-6)
        alone = np.vstack([static.embed_documents([text]) for text in texts])
        np.testing.assert_allclose(alone, together, atol=1e-6)

    def test_nearer_in_meaning_is_nearer(self, static: StaticEmbedder) -> None:
        kitten, cat, database = static.embed_documents(["a small kitten", "the cat", "a database index"])
        assert kitten @ cat > kitten @ database

    def test_one_mebibyte_among_short_ones_fits_into_memory(self, tmp_path: Path) -> None:
        # Padding the short ones to the length of the long one would take 17 GB.
        code = (
            "import resource, numpy\n"
            "from memvault.embedding.static import StaticEmbedder\n"
            "embedder = StaticEmbedder()\n"
            "alone = embedder.embed_documents(['short'])\n"
            "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
            "answer = embedder.embed_documents(['short'] * 31 + ['word ' * 209_715] + ['short'] * 31)\n"
            "assert numpy.isfinite(answer).all()\n"
            "print(answer.shape, numpy.abs(answer[[0, 30, 32, 62]] - alone).max() < 1e-6)\n"
        )
        assert in_fresh_python(code, tmp_path) == "(63, 256) True"

    def test_it_loads_with_the_first_text_from_its_wheel_alone(self, static: StaticEmbedder, tmp_path: Path) -> None:
        code = (
            "import sys\n"
            "from memvault.embedding.static import StaticEmbedder\n"
            "embedder = StaticEmbedder()\n"
            "embedder.embed_documents([])\n"
            "before = 'wordllama' in sys.modules\n"
            "vectors = embedder.embed_queries(['Prefers concise answers'])\n"
            "print(before, 'wordllama' in sys.modules, 'torch' in sys.modules, vectors.tobytes().hex())\n"
        )
        *loaded, vector = in_fresh_python(code, tmp_path).split()
        assert loaded == ["False", "True", "False"]
        there = np.frombuffer(bytes.fromhex(vector), dtype=np.float32)
        np.testing.assert_allclose(there, static.embed_documents(["Prefers concise answers"])[0], atol=1e-6)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    def test_many_threads_at_once(self, static: StaticEmbedder) -> None:
        fresh = StaticEmbedder()  # so that they race to load it, too
        texts = [f"text {number} {'🙂' * (number % 7)}" for number in range(64)]
        expected = static.embed_documents(texts)
        together = threading.Barrier(8)

        def embed(_: int) -> Matrix:
            together.wait(timeout=30)
            return np.vstack([fresh.embed_documents(texts[start : start + 8]) for start in range(0, 64, 8)])

        with ThreadPoolExecutor(8) as pool:
            for answer in pool.map(embed, range(8)):
                np.testing.assert_allclose(answer, expected, atol=1e-6)


def vector_refusal(value: object, dimension: int | None = None) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValidationError) as caught:
            check_vector(value, "embedding", dimension)
    message = str(caught.value)
    assert message.startswith("embedding ")
    assert len(message) < 300
    return message


class TestCheckVector:
    @pytest.mark.parametrize(
        "value",
        [
            [3, 4],
            (3.0, 4.0),
            [3e300, 4e300],
            [3e-300, 4e-300],
            [3e307, 4e307],
            np.array([3, 4], np.float32),
            np.array([3, 4], np.float16),
            np.array([3, 4], np.int64),
            np.array([3, 4], np.uint8),
            np.array([3, 4], ">f8"),
            np.array([3, 0, 4, 0], np.float64)[::2],
            np.array([3e38, 4e38], np.float64),
            array.array("f", [3, 4]),
            [np.float32(3), np.float64(4)],
            range(3, 5),
        ],
        ids=lambda value: ascii(value)[:30],
    )
    def test_the_direction_is_kept_as_float32(self, value: Any) -> None:
        checked = check_vector(value, "embedding", 2)
        assert checked.dtype == np.float32
        assert checked.dtype.isnative
        assert checked.shape == (2,)
        np.testing.assert_allclose(checked, [0.6, 0.8], atol=1e-6)

    def test_the_smallest_numbers_have_a_direction(self) -> None:
        np.testing.assert_allclose(check_vector([5e-324, 0], "x", None), [1, 0])
        np.testing.assert_allclose(check_vector([-1.7e308, 0, 1e-308], "x", None), [-1, 0, 0])

    @pytest.mark.parametrize(
        ("value", "rule"),
        [
            ([1.0, float("nan")], "finite"),
            ([1.0, float("inf")], "finite"),
            ([1.0, float("-inf")], "finite"),
            ([1.0, None], "finite|numbers"),
            ([0.0, 0.0], "zero"),
            ([0, -0.0], "zero"),
            ([], "empty"),
            (np.empty(0), "empty"),
            ([[1.0, 2.0]], "flat"),
            (np.ones((2, 2)), "flat"),
            (np.ones((0, 2)), "flat"),
            (1.0, "flat|sequence"),
            (np.float32(1), "flat|sequence"),
            (None, "flat|sequence"),
            ([[1.0], [2.0, 3.0]], "sequence of numbers"),
            ("1.0", "numbers|flat"),
            ("vector", "sequence of numbers"),
            (b"1.0", "numbers|flat"),
            (["a", "b"], "sequence of numbers"),
            (["1.0", "2.0"], "sequence of numbers"),
            ([1.0, "2.0"], "sequence of numbers"),
            ([b"1", b"2"], "sequence of numbers"),
            (np.array(["1", "2"]), "sequence of numbers"),
            ({"a": 1.0}, "sequence of numbers"),
            ({1.0, 2.0}, "sequence of numbers"),
            ((number for number in [1.0]), "sequence of numbers"),
            ([object()], "sequence of numbers"),
            ([1 + 2j], "sequence of numbers"),
            (np.array([1 + 2j]), "sequence of numbers"),
            (np.array(["2024-01-01"], "datetime64[D]"), "sequence of numbers"),
            ([10**400, 1], "numbers|finite"),
            ([10**5_000, 1], "numbers|finite"),
        ],
        ids=lambda value: "huge" if isinstance(value, list) and value[1:] == [1] else None,
    )
    def test_everything_else_is_refused(self, value: object, rule: str) -> None:
        message = vector_refusal(value)
        assert any(part in message for part in rule.split("|")), message

    @pytest.mark.parametrize("size", [1, 2, 4, 1_000_000])
    def test_another_dimension_is_refused(self, size: int) -> None:
        message = vector_refusal(np.ones(size), dimension=3)
        assert "dimension 3" in message
        assert str(size) in message

    def test_any_dimension_where_none_is_fixed(self) -> None:
        assert check_vector(np.ones(10_000), "x", None).shape == (10_000,)

    @pytest.mark.parametrize(
        "value",
        [np.full(200_000, np.nan), ["x" * 5_000_000], "x" * 5_000_000, [[0.0]] * 100_000, {"x" * 5_000_000: 1}],
        ids=["nan", "texts", "text", "nested", "dict"],
    )
    def test_no_message_repeats_a_megabyte(self, value: object) -> None:
        vector_refusal(value)

    def test_the_caller_keeps_its_array(self) -> None:
        mine = np.array([1, 0], np.float32)
        checked = check_vector(mine, "x", 2)
        mine[:] = 7
        assert checked.tolist() == [1, 0]
        checked[:] = 5
        assert mine.tolist() == [7, 7]

    @given(arrays(np.float64, st.integers(1, 20), elements=st.floats(allow_nan=False, allow_infinity=False)))
    @settings(deadline=None)
    def test_every_finite_vector_but_zero_comes_back_at_unit_norm(self, vector: np.ndarray[Any, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if not vector.any():
                vector_refusal(vector)
                return
            checked = check_vector(vector, "x", vector.size)
        assert abs(float(np.linalg.norm(checked.astype(np.float64))) - 1) < 1e-5
        again = check_vector(checked, "x", vector.size)
        np.testing.assert_allclose(again, checked, atol=1e-6)


class Answering:
    """An embedder that answers as it was told to."""

    model = "answering/3"
    dimension = 3

    def __init__(self, answer: Callable[[Sequence[str]], Any]) -> None:
        self._answer = answer

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        answer: Matrix = self._answer(texts)
        return answer

    embed_queries = embed_documents


def checked(answer: Callable[[Sequence[str]], Any], texts: Sequence[str] = ("one", "two")) -> Matrix:
    embedder = Answering(answer)
    return embed_checked(embedder.embed_documents, texts, embedder)


def embedding_refusal(answer: Callable[[Sequence[str]], Any]) -> EmbeddingError:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(EmbeddingError) as caught:
            checked(answer)
    assert "answering/3" in str(caught.value)
    assert len(str(caught.value)) < 500
    return caught.value


class Odd(Exception):
    """What a foreign model raises."""


class TestEmbedChecked:
    @pytest.mark.parametrize(
        "answer",
        [
            [[3.0, 0.0, 4.0], [0.0, 2.0, 0.0]],
            [[3, 0, 4], [0, 2, 0]],
            ((3.0, 0.0, 4.0), (0.0, 2.0, 0.0)),
            [np.array([3.0, 0.0, 4.0]), [0.0, 2.0, 0.0]],
            np.array([[3, 0, 4], [0, 2, 0]], np.float64),
            np.array([[3, 0, 4], [0, 2, 0]], np.float16),
            np.array([[3, 0], [0, 2], [4, 0]], np.float32).T,
            np.array([[3e300, 0, 4e300], [0, 2e-300, 0]]),
        ],
        ids=["lists", "ints", "tuples", "rows", "float64", "float16", "transposed", "magnitudes"],
    )
    def test_rows_come_back_at_unit_norm(self, answer: Any) -> None:
        expected = np.array([[0.6, 0, 0.8], [0, 1, 0]])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            matrix = checked(lambda texts: answer)
        assert matrix.dtype == np.float32
        np.testing.assert_allclose(matrix, expected, atol=1e-6)

    def test_no_texts(self) -> None:
        assert checked(lambda texts: np.empty((0, 3)), texts=[]).shape == (0, 3)

    def test_the_embedder_may_reuse_its_buffer(self) -> None:
        buffer = np.ones((2, 3), np.float32)
        matrix = checked(lambda texts: buffer)
        buffer[:] = 0
        np.testing.assert_allclose(matrix, np.full((2, 3), 3**-0.5), atol=1e-6)

    @pytest.mark.parametrize(
        "raised",
        [
            ValueError("bad"),
            RuntimeError("no GPU"),
            MemoryError(),
            Odd("own"),
            StopIteration(),
            ImportError("no torch"),
        ],
        ids=lambda raised: type(raised).__name__,
    )
    def test_whatever_it_raises_is_chained(self, raised: Exception) -> None:
        def answer(texts: Sequence[str]) -> Any:
            raise raised

        error = embedding_refusal(answer)
        assert error.__cause__ is raised
        assert type(raised).__name__ in str(error)
        assert str(raised) in str(error)

    def test_a_long_complaint_is_cut(self) -> None:
        def answer(texts: Sequence[str]) -> Any:
            raise ValueError("x" * 5_000_000)

        embedding_refusal(answer)

    @pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
    def test_an_interrupt_passes(self, raised: type[BaseException]) -> None:
        def answer(texts: Sequence[str]) -> Any:
            raise raised

        with pytest.raises(raised):
            checked(answer)

    @pytest.mark.parametrize(
        ("answer", "says"),
        [
            ([[1.0, 0.0, 0.0]], "shape (1, 3), expected (2, 3)"),
            ([[1.0, 0.0], [0.0, 1.0]], "shape (2, 2), expected (2, 3)"),
            ([1.0, 0.0, 0.0], "shape (3,)"),
            (np.ones((2, 3, 1)), "shape (2, 3, 1)"),
            ([], "shape (0,)"),
            (None, "answering/3"),
            (1.0, "answering/3"),
            ([[1.0, 0.0, 0.0], [1.0]], "no array of numbers"),
            ([[1.0, 0.0, 0.0], None], "no array of numbers"),
            ("vector", "no array of numbers"),
            ([["a", "b", "c"]] * 2, "no array of numbers"),
            ({"a": 1}, "no array of numbers"),
            ([[10**400, 0, 0]] * 2, "answering/3"),
            (np.ones((2, 3), np.complex64), "no array of numbers"),
            ([[1.0, float("nan"), 0.0], [1.0, 0.0, 0.0]], "not finite"),
            ([[1.0, 0.0, 0.0], [float("inf"), 0.0, 0.0]], "not finite"),
            ([[1.0, 0.0, 0.0], [float("-inf"), float("inf"), 0.0]], "not finite"),
            ([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], "all zero"),
            ([[1.0, None, 0.0], [1.0, 0.0, 0.0]], "answering/3"),
        ],
        ids=[
            "too few", "another dimension", "flat", "cube", "empty", "None", "number", "ragged", "row missing", "text",
            "texts", "dict", "huge", "complex", "nan", "infinite", "minus infinite", "zero", "hole",
        ],
    )  # fmt: skip
    def test_nonsense_is_refused(self, answer: Any, says: str) -> None:
        assert says in str(embedding_refusal(lambda texts: answer))

    def test_the_error_is_ours(self) -> None:
        assert issubclass(EmbeddingError, MemvaultError)
        assert not issubclass(EmbeddingError, ValueError)


def test_the_hosts_logging_is_left_alone(tmp_path: Path) -> None:
    # wordllama configures the root logger as it is imported, for a service that had not done so itself.
    code = (
        "import logging\n"
        "from memvault.embedding.static import StaticEmbedder\n"
        "StaticEmbedder().embed_documents(['text'])\n"
        "print(logging.getLogger().handlers, logging.getLogger().level == logging.WARNING)\n"
    )
    assert in_fresh_python(code, tmp_path) == "[] True"
