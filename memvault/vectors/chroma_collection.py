"""What does a vault look like as a Chroma collection, and how is it written, searched and read?"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import numpy as np

from memvault.database.batches import batches
from memvault.embedding.base import Vector
from memvault.errors import IndexMismatchError, MissingDependencyError, VectorIndexError
from memvault.filters import EVERYTHING, NOTHING, Comparison, Filter
from memvault.vectors.base import DECIMALS, IndexSpec, ScannedRecord, VectorMatch, VectorRecord
from memvault.vectors.chroma_process import ChildError
from memvault.vectors.chroma_records import compile_where, restored_metadata, stored_metadata

SPACE: Literal["cosine"] = "cosine"

EF_SEARCH = 1000
"""Candidates that a search keeps. Among 27,000 random vectors of dimension 64 Chroma's default of 100 finds 64 % of
the 50 nearest, 1,000 finds all of them, for some 20 ms more."""

SYNC_THRESHOLD = 5000
"""Records between two rewrites of the graph's files. A kill during one is what corrupts a directory, so Chroma's 1,000
is too often; opening replays at most so many, at .2 to .4 ms each."""

WRITE_SIZE = 2000
"""Records to one call. Chroma holds the GIL for all of it, about a second; twice as many save hardly any time."""

WRITE_BYTES = 6 << 20
"""Bytes of vectors and texts to one call, unless one record is more. A server takes requests of 40 MiB, and JSON makes
up to six of one: of a control character, or of a vector's byte where the server takes no base64."""

READ_SIZE = 1000
"""Ids to one read: Chroma binds each to its SQL statement, and of 5,000 it misses some."""

PROBE_SIZE = 100
"""Searches in one call."""

NO_DISTANCE = 1e-4
"""Of a vector from itself, after Chroma's rounding; the cosine distance."""

MAX_K = 2**31 - 1


Failures = tuple[type[Exception], ...]


class Collections(Protocol):
    """What is needed of a client of Chroma's."""

    def get_collection(self, name: str, *, embedding_function: None) -> Any: ...

    def create_collection(
        self, name: str, *, configuration: Any, metadata: dict[str, Any], embedding_function: None
    ) -> Any: ...

    def get_max_batch_size(self) -> int: ...


def require_chromadb() -> None:
    """Raise MissingDependencyError where the package is absent. It is not imported, which takes a second."""
    try:
        missing = find_spec("chromadb") is None
    except (ImportError, ValueError):  # there is something of that name, but no package
        missing = True
    if missing:
        raise MissingDependencyError("the Chroma index needs chromadb: pip install chromadb")


@contextmanager
def chroma_errors(place: str, doing: str, *also: type[Exception]) -> Iterator[None]:
    """The one place where Chroma's failures become VectorIndexErrors. ``also``: types that mean one here."""
    told_by_chroma = _told_by_chroma()
    failures: tuple[type[Exception], ...] = (*told_by_chroma, *also)
    try:
        yield
    except failures as exc:
        if is_absent(exc):
            raise VectorIndexError(
                f"the Chroma index in {place} could not {doing}, its collection is gone: {exc}. It is made anew, from "
                "SQL, when the vault next tries to reach it"
            ) from exc
        told = f"{exc}" if isinstance(exc, told_by_chroma) and str(exc) else f"{type(exc).__name__}: {exc}"
        raise VectorIndexError(f"the Chroma index in {place} could not {doing}: {told}") from exc
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":  # of its Rust layer: no Exception, and of no importable type
            raise
        raise VectorIndexError(f"the Chroma index in {place} could not {doing}, it panicked: {exc}") from exc


def is_absent(error: Exception) -> bool:
    """Whether this is Chroma's way to say that there is no such collection."""
    if isinstance(error, ChildError):
        return error.absent
    return type(error).__name__ == "NotFoundError" and isinstance(error, _told_by_chroma())


def _told_by_chroma() -> Failures:
    """Errors whose text says enough. What was never imported cannot have been raised."""
    errors = sys.modules.get("chromadb.errors")
    return (ChildError, OSError) if errors is None else (ChildError, OSError, errors.ChromaError)


def name_of(spec: IndexSpec) -> str:
    """The collection's name."""
    return f"memvault_{spec.vault_id}"


class ChromaCollection:
    """The collection of one vault, by whatever client.

    ``place`` names the directory or server in errors, ``failures`` are what its client raises beside Chroma's own.
    """

    def __init__(self, collection: Any, max_batch: int, place: str, failures: Failures) -> None:
        self._collection = collection
        self._write_size = min(WRITE_SIZE, max_batch)
        self._place = place
        self._failures = failures

    @classmethod
    def find(cls, client: Collections, spec: IndexSpec, place: str, failures: Failures = ()) -> ChromaCollection | None:
        """The vault's collection, if it is there. Raises IndexMismatchError where it is not what ``spec`` says."""
        with chroma_errors(place, "be read", *failures):
            try:
                collection = client.get_collection(name_of(spec), embedding_function=None)
            except Exception as exc:
                if not is_absent(exc):
                    raise
                return None
            found = cls(collection, client.get_max_batch_size(), place, failures)
        found._verify(spec)
        return found

    @classmethod
    def make(cls, client: Collections, spec: IndexSpec, place: str, failures: Failures = ()) -> ChromaCollection:
        """A new collection, empty; that of another process, where it has made it meanwhile."""
        configuration = {"hnsw": {"space": SPACE, "ef_search": EF_SEARCH, "sync_threshold": SYNC_THRESHOLD}}
        with chroma_errors(place, "be created", *failures):
            try:
                collection = client.create_collection(
                    name_of(spec),
                    configuration=configuration,
                    metadata=dict(vars(spec)),
                    embedding_function=None,
                )
            except _told_by_chroma():  # a server says no more precisely that it is there
                if (found := cls.find(client, spec, place, failures)) is None:
                    raise
                return found
            return cls(collection, client.get_max_batch_size(), place, failures)

    def upsert(self, records: Sequence[VectorRecord]) -> None:
        """Write in batches; of an id that comes twice, which Chroma would refuse, the last record counts."""
        for some in _written_together({record.id: record for record in records}.values(), self._write_size):
            with self._errors("be written"):
                self._collection.upsert(
                    ids=[record.id for record in some],
                    embeddings=np.stack([record.vector for record in some]),
                    documents=[record.document for record in some],
                    metadatas=[stored_metadata(record.metadata) for record in some],
                )

    def delete(self, ids: Sequence[str]) -> None:
        """Remove in batches; Chroma refuses an empty list, and an id that comes twice."""
        for some in batches(dict.fromkeys(ids), self._write_size):
            with self._errors("be deleted from"):
                self._collection.delete(ids=some)

    def query(self, user_id: str, vector: Vector, k: int, where: Filter = EVERYTHING) -> list[VectorMatch]:
        """As `VectorIndex.query`. Approximate where more than ``k`` records match, complete where they are fewer."""
        if where is NOTHING:
            return []
        condition = compile_where(Comparison("user_id", "==", user_id) & where)
        with self._errors("be searched"):
            answer = self._collection.query(
                query_embeddings=vector[np.newaxis], n_results=min(k, MAX_K), where=condition, include=["distances"]
            )
        distances = answer["distances"] or [[]]
        found = {chunk_id: 1.0 - distance for chunk_id, distance in zip(answer["ids"][0], distances[0], strict=True)}
        if len(found) < k:
            # The graph does not lead to every record: of 3,000 that had the same vector it found 1,971.
            lost = [chunk_id for chunk_id in self._listed(condition) if chunk_id not in found]
            for records in self._read(lost, READ_SIZE):
                found.update((record.id, float(record.vector @ vector)) for record in records)
        ranked = sorted((-round(similarity, DECIMALS), chunk_id) for chunk_id, similarity in found.items())
        return [VectorMatch(chunk_id, min(1.0, max(-1.0, -negated))) for negated, chunk_id in ranked[:k]]

    def ids(self) -> list[str]:
        """Of every record."""
        return self._listed(None)

    def scan(self, batch: int) -> Iterator[list[ScannedRecord]]:
        """Every record that was there when the scan began and still is."""
        return self._read(self._listed(None), min(batch, READ_SIZE))

    def fetch(self, ids: Sequence[str]) -> list[ScannedRecord]:
        """The records with these ids; those that are listed and cannot be read are left out, too."""
        return [record for records in self._read(list(dict.fromkeys(ids)), READ_SIZE) for record in records]

    def unfindable(self, ids: Sequence[str]) -> list[str]:
        """Those of the records that can be listed, but not read, or not found by a search that asks for just them.

        To be read and searched for is also the probe of a graph that may be damaged: it fails, or takes its process
        with it. A record that is merely not found is found again once it is written again.

        Of many that have the same vector the graph leads to some alone. As long as it leads to one of them among the
        user's, that is no damage, and nothing would be gained by writing the others again.
        """
        suspects = [chunk_id for some in batches(ids, READ_SIZE) for chunk_id in self._unfound(some)]
        return [chunk_id for some in batches(suspects, PROBE_SIZE) for chunk_id in self._without_twin(some)]

    def _unfound(self, ids: Sequence[str]) -> list[str]:
        try:
            with self._errors("be probed"):
                answer = self._collection.get(ids=list(ids), include=["embeddings"])
                if not (readable := answer["ids"]):
                    return []
                found = self._collection.query(
                    query_embeddings=answer["embeddings"][:1],
                    ids=readable,
                    n_results=len(readable),
                    include=["distances"],
                )["ids"][0]
        except VectorIndexError as exc:
            if not _is_forgotten(exc):
                raise
            if len(ids) == 1:
                return list(ids)
            middle = len(ids) // 2
            return [*self._unfound(ids[:middle]), *self._unfound(ids[middle:])]
        return sorted(set(readable) - set(found))

    def _without_twin(self, ids: Sequence[str]) -> list[str]:
        """Those that cannot be read, and those for whose own vector nothing as near is found among their user's."""
        of_user: dict[str, list[ScannedRecord]] = defaultdict(list)
        with self._errors("be probed"):
            lost = set(self._collection.get(ids=list(ids), include=[])["ids"])
        for record in self._readable(ids):
            of_user[record.user_id].append(record)
        for user_id, records in of_user.items():
            try:
                with self._errors("be probed"):
                    distances = self._collection.query(
                        query_embeddings=np.stack([record.vector for record in records]),
                        n_results=1,
                        where=compile_where(Comparison("user_id", "==", user_id)),
                        include=["distances"],
                    )["distances"]
            except VectorIndexError as exc:
                if not _is_forgotten(exc):
                    raise
                continue  # one that cannot be read is in the way of all
            near = zip(records, distances or [], strict=True)
            lost.difference_update(record.id for record, found in near if found and found[0] <= NO_DISTANCE)
        return sorted(lost)

    def count(self, user_id: str | None) -> int:
        """All records, or a user's."""
        if user_id is not None:
            return len(self._listed(compile_where(Comparison("user_id", "==", user_id))))
        with self._errors("be counted"):
            return int(self._collection.count())

    def _errors(self, doing: str) -> AbstractContextManager[None]:
        return chroma_errors(self._place, doing, *self._failures)

    def _verify(self, spec: IndexSpec) -> None:
        metadata = self._collection.metadata or {}
        space = (self._collection.configuration_json.get("hnsw") or {}).get("space")
        there = {"space": space, **{name: metadata.get(name) for name in vars(spec)}}
        expected = {"space": SPACE, **vars(spec)}
        differing = [name for name, value in expected.items() if there[name] != value]
        if differing:
            raise IndexMismatchError(
                f"the Chroma collection {self._collection.name!r} in {self._place} has "
                f"{', '.join(f'{name} {there[name]!r}' for name in differing)}; expected "
                f"{', '.join(f'{name} {expected[name]!r}' for name in differing)}: `memvault reindex` builds another"
            )

    def _listed(self, condition: dict[str, Any] | None) -> list[str]:
        """Ids alone, all at once: pages by offset would skip records when others are deleted meanwhile."""
        with self._errors("be listed"):
            ids: list[str] = self._collection.get(where=condition, include=[])["ids"]
        return ids

    def _read(self, ids: Sequence[str], batch: int) -> Iterator[list[ScannedRecord]]:
        for some in batches(ids, batch):
            if records := self._readable(some):
                yield records

    def _readable(self, ids: Sequence[str]) -> list[ScannedRecord]:
        try:
            with self._errors("be read"):
                answer = self._collection.get(ids=list(ids), include=["metadatas", "embeddings", "documents"])
        except VectorIndexError as exc:
            if not _is_forgotten(exc):
                raise
            middle = len(ids) // 2
            return [] if middle == 0 else [*self._readable(ids[:middle]), *self._readable(ids[middle:])]
        columns: Any = [answer[name] for name in ("ids", "metadatas", "embeddings", "documents")]
        return [_scanned(*row) for row in zip(*columns, strict=True)]


def _is_forgotten(error: VectorIndexError) -> bool:
    """Whether Chroma lists a record whose vector it has not got: one such, and it answers nothing at all.

    Seen after processes that did not know of each other had written to one directory.
    """
    return any(told in str(error) for told in ("Error finding id", "Error getting embedding"))


def _written_together(records: Iterable[VectorRecord], size: int) -> Iterator[list[VectorRecord]]:
    """Batches of at most ``size`` records, and of so many bytes; a larger record goes alone."""
    some: list[VectorRecord] = []
    total = 0
    for record in records:
        bytes_of_it = len(record.document.encode()) + record.vector.nbytes
        if some and (len(some) == size or total + bytes_of_it > WRITE_BYTES):
            yield some
            some, total = [], 0
        some.append(record)
        total += bytes_of_it
    if some:
        yield some


def _scanned(chunk_id: str, stored: dict[str, Any] | None, vector: Any, document: str | None) -> ScannedRecord:
    stored = stored or {}
    user_id = stored.get("user_id")
    return ScannedRecord(
        chunk_id,
        user_id if isinstance(user_id, str) else "",
        restored_metadata(stored),
        np.asarray(vector, dtype=np.float32),
        document,
    )
