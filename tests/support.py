"""What do several tests need? An embedder and an index of the tests' own, dumps, statement logs, and brute force."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, event, select

from memvault import Hit, MemvaultError, StorageLayer
from memvault.database.engine import READ_ONLY
from memvault.embedding.base import Matrix, Vector
from memvault.filters import EVERYTHING, And, Comparison, Constant, Filter, Or
from memvault.models import metadata
from memvault.vectors.base import IndexSpec, ScannedRecord, VectorMatch, VectorRecord

Floats = Sequence[float] | NDArray[np.floating[Any]]

TOLERANCE = 1e-5
"""Cosines of float32 vectors, summed in another order, agree to this."""


PATIENT_S = 60.0
"""`index_wait` of the tests' vaults: a write returns when its debts are paid, however busy the machine is."""


def unavailable(reason: str) -> NoReturn:
    """A backend cannot be had here: a skipped test on a developer's machine, a failure in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"not available in CI: {reason}")
    pytest.skip(reason)


def eventually(reached: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for what another thread or process is about to do; it fails where it is not done in a long time."""
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, f"not reached within {within_s:g} s"
        time.sleep(0.01)


def assert_returned(layer: StorageLayer) -> None:
    """No connection was left checked out; but for the payer's, which takes one at times, and gives it back."""
    eventually(lambda: layer.engine.pool.checkedout() == 0)  # type: ignore[attr-defined]  # a QueuePool


class HashingEmbedder:
    """Feature hashing: each word adds ±1 at a place that its SHA-256 names. Equal words, equal vectors."""

    def __init__(self, model: str = "tests/hashing-64", dimension: int = 64) -> None:
        self.model = model
        self.dimension = dimension

    def embed_documents(self, texts: Sequence[str]) -> Matrix:
        matrix = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(matrix, texts, strict=True):
            row[0] = 0.1  # texts without a word have a direction, too
            for word in re.findall(r"\w+", text.lower()):
                digest = hashlib.sha256(word.encode()).digest()
                row[1 + int.from_bytes(digest[:4], "big") % (self.dimension - 1)] += 1 if digest[4] % 2 else -1
        normed: Matrix = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
        return normed

    def embed_queries(self, texts: Sequence[str]) -> Matrix:
        return self.embed_documents(texts)


def _scanned(record: VectorRecord) -> ScannedRecord:
    return ScannedRecord(record.id, record.metadata.user_id, record.metadata, record.vector, record.document)


class ListIndex:
    """An index that is no part of SQL, in a dict: what any VectorIndex must do, with nothing in between."""

    location = "tests-list"
    transactional = False

    def __init__(self) -> None:
        self.records: dict[str, VectorRecord] = {}
        self.created = False
        self._spec: IndexSpec | None = None

    @property
    def spec(self) -> IndexSpec | None:
        return self._spec

    def open(self, spec: IndexSpec) -> bool:
        self._spec = spec
        return self.created

    def create(self) -> None:
        self.created = True

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        self.records.update((record.id, record) for record in records)

    def delete(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.records.pop(id, None)

    def query(self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING) -> list[VectorMatch]:
        theirs = [
            VectorMatch(record.id, float(record.vector @ vector))
            for record in self.records.values()
            if record.metadata.user_id == user_id and passes(where, vars(record.metadata))
        ]
        return sorted(theirs, key=lambda match: (-match.similarity, match.id))[:k]

    def scan(self, batch: int = 1000) -> Iterator[list[ScannedRecord]]:
        records = list(self.records.values())
        for start in range(0, len(records), batch):
            yield [_scanned(record) for record in records[start : start + batch]]

    def fetch(self, ids: Sequence[str]) -> list[ScannedRecord]:
        return [_scanned(self.records[id]) for id in dict.fromkeys(ids) if id in self.records]

    def count(self, user_id: str | None = None) -> int:
        return sum(user_id in (None, record.metadata.user_id) for record in self.records.values())

    def purge(self) -> None:
        self.records.clear()
        self.created = False

    def close(self) -> None:
        pass


def passes(where: Filter, fields: Mapping[str, Any]) -> bool:
    """Whether a chunk with these fields passes a filter: the filter's meaning, written down a second time."""
    match where:
        case Constant(value):
            return value
        case And(parts):
            return all(passes(part, fields) for part in parts)
        case Or(parts):
            return any(passes(part, fields) for part in parts)
        case Comparison(field, operator, value):
            have: Any = fields[field]
            wanted: Any = value
            match operator:
                case "==":
                    return bool(have == wanted)
                case "!=":
                    return bool(have != wanted)
                case "in":
                    return have in wanted
                case "not in":
                    return have not in wanted
                case "<":
                    return have is not None and bool(have < wanted)
                case "<=":
                    return have is not None and bool(have <= wanted)
                case ">":
                    return have is not None and bool(have > wanted)
                case ">=":
                    return have is not None and bool(have >= wanted)
    raise AssertionError(f"an unknown filter: {where!r}")


def _reading(storage: StorageLayer) -> Connection:
    return storage.engine.connect().execution_options(**{READ_ONLY: True})


def dump(storage: StorageLayer) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    with _reading(storage) as connection:
        return {
            table.name: sorted((tuple(row) for row in connection.execute(select(table))), key=repr)
            for table in metadata.sorted_tables
        }


@contextmanager
def refused(layer: StorageLayer, error: type[MemvaultError], *words: str) -> Iterator[None]:
    """The block raises this error, its message says these words, and no row of any table changed."""
    before = dump(layer)
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert dump(layer) == before


def rows_of(storage: StorageLayer, *user_ids: str) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of these users, by table."""
    with _reading(storage) as connection:
        return {
            table.name: sorted(
                (tuple(row) for row in connection.execute(select(table).where(table.c.user_id.in_(user_ids)))), key=repr
            )
            for table in metadata.sorted_tables
            if "user_id" in table.c
        }


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """The SQL that an engine sends while the block runs."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


def unit_vectors(count: int, dimension: int, seed: int) -> Matrix:
    """Random directions."""
    matrix = np.random.default_rng(seed).normal(size=(count, dimension))
    normed: Matrix = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)
    return normed


def cosine(one: Floats, other: Floats) -> float:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def assert_nearest(hits: Sequence[Hit], vectors: Mapping[str, Floats], query: Floats, k: int) -> None:
    """The hits are the ``k`` nearest of these vectors, best first, by NumPy's own product."""
    true = {id: cosine(vector, query) for id, vector in vectors.items()}
    ids = [hit.chunk.id for hit in hits]
    assert len(ids) == len(set(ids)) == min(k, len(true))
    assert set(ids) <= set(true)
    for hit in hits:
        assert hit.similarity is not None
        assert abs(hit.similarity - true[hit.chunk.id]) < TOLERANCE
        assert hit.score == (1 + hit.similarity) / 2
    similarities = [true[id] for id in ids]
    assert all(later < earlier + TOLERANCE for earlier, later in zip(similarities, similarities[1:], strict=False))
    missed = [similarity for id, similarity in true.items() if id not in ids]
    if missed and similarities:
        assert max(missed) < similarities[-1] + TOLERANCE


TEXTS = {
    "emoji": "🙂👩‍👩‍👧 🇧🇪",
    "composed": "caf\u00e9",
    "decomposed": "cafe\u0301",
    "right-to-left": "\u202eabc\u202c שלום \u200f",
    "zero-width": "a\u200bb\ufeff",
    "spaces": "  leading, trailing\t\r\n ",
    "control": "bell\x07 escape\x1b",
    "quotes": 'it\'s "quoted" `so` %s ? :name {x}',
    "SQL": "'); DROP TABLE memory_chunks; --",
    "wildcards": "%_*?[a-z]\\",
    "noncharacter": "\uffff\U0010ffff",
}
"""Texts that are stored exactly as given."""

BAD_TEXTS = {
    "NUL": "a\x00b",
    "surrogate": "a\ud800b",
    "empty": "",
    "blank": " \t\u00a0\n",
    "bytes": b"text",
    "number": 7,
}
"""What is no text, or none that may be stored."""
