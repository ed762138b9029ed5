"""What have indexes inside the vault's database in common? Transactions, names, and what they ask SQL for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnClause, Connection, FromClause, Select, Table, func, select
from sqlalchemy.exc import SQLAlchemyError

from memvault.database.batches import batches
from memvault.database.transactions import Database
from memvault.database.translate import database_errors
from memvault.database.unit import Unit
from memvault.database.where import compile_where
from memvault.errors import IndexMismatchError, StorageError, VectorIndexError
from memvault.filters import Filter
from memvault.vectors.base import DECIMALS, IndexSpec, RecordMetadata, VectorMatch
from memvault.vectors.canonical import CONTENT, VECTORS


def table_name(spec: IndexSpec) -> str:
    """The name of the table with a vault's vectors by a model: two models' can stand side by side, and one that a
    vault of before has left is never taken for this one's."""
    digest = hashlib.sha256(f"{spec.vault_id}\n{spec.model}".encode()).hexdigest()
    return f"memvault_vec_{digest[:12]}"


def ranked(rows: Iterable[Any]) -> list[VectorMatch]:
    """Rows with ``chunk_id`` and ``distance``, which is 1 minus the cosine, as every index answers them."""
    pairs = sorted((round(row.distance - 1.0, DECIMALS), row.chunk_id) for row in rows)
    return [VectorMatch(chunk_id, min(1.0, max(-1.0, -negated))) for negated, chunk_id in pairs]


@contextmanager
def index_errors(index: str, doing: str) -> Iterator[None]:
    """Raise what the database refuses as VectorIndexError."""
    try:
        with database_errors():
            yield
    except (StorageError, SQLAlchemyError) as exc:
        raise VectorIndexError(f"the {index} index could not {doing}: {exc}") from exc


class InDatabase:
    """The connections of an index inside the database: the caller's, or one of its own for each call.

    What goes wrong in the caller's own transaction is an error of the caller's write, which fails whole.
    """

    location: str

    def __init__(self, database: Database, chunks: Table) -> None:
        """``chunks``: the table that filters are asked of."""
        self._database = database
        self._chunks = chunks
        self._spec: IndexSpec | None = None

    @property
    def spec(self) -> IndexSpec | None:
        return self._spec

    def close(self) -> None:
        """The engine is the storage layer's."""
        self._spec = None

    @contextmanager
    def _reading(self, connection: Connection | None, doing: str) -> Iterator[Connection]:
        with index_errors(self.location, doing):
            if connection is not None:
                self._prepare(connection)
                yield connection
            else:
                with self._database.reading() as own:
                    self._prepare(own)
                    yield own

    @contextmanager
    def _writing(self, doing: str) -> Iterator[Connection]:
        with index_errors(self.location, doing), self._database.writing() as own:
            self._prepare(own)
            yield own

    def _prepare(self, connection: Connection) -> None:
        """Give a connection, whoever opened it, what this index needs of it."""

    def _opened(self) -> IndexSpec:
        if self._spec is None:
            raise VectorIndexError(f"the {self.location} index is not open")
        return self._spec

    def _require(self, spec: IndexSpec, what: str, found: object, expected: object) -> None:
        """Raise IndexMismatchError where what is there is not what the vault's index has to be."""
        if found != expected:
            raise IndexMismatchError(
                f"the {self.location} index of {spec.model!r} has {what} {found}, expected {expected}: "
                "`memvault reindex` builds another"
            )

    def _require_own(self, name: str, own: bool) -> None:
        """Raise IndexMismatchError where what has the index's name is something else."""
        if not own:
            raise IndexMismatchError(
                f"the database has a table {name} that is no {self.location} index; rename or drop it, then run "
                "`memvault index create`"
            )

    def _counted(self, connection: Connection, vectors: FromClause, user_id: str | None) -> int:
        statement = select(func.count()).select_from(vectors)
        if user_id is not None:
            statement = statement.where(vectors.c.user_id == user_id)
        return connection.execute(statement).scalar_one()

    def _matching(
        self, connection: Connection, user_id: str, where: Filter, chunk_id: ColumnClause[str] | None = None
    ) -> Select[tuple[str]]:
        """The ids of the user's chunks under a filter, of those with a vector: to be selected within the k-NN query.

        ``chunk_id``: a column of that query, for a selection of this one id in each row. PostgreSQL looks it up by its
        key then; a join it would plan by statistics, which it has not got of a user who has just begun.
        """
        unit, spec = Unit(connection, user_id), self._opened()
        joined = self._chunks.join(VECTORS, VECTORS.c.chunk_id == self._chunks.c.id)
        frm, by_key = (joined, False) if chunk_id is None else (self._chunks, True)
        matching = unit.select(self._chunks.c.id, frm=frm, by_key=by_key)
        matching = matching.where(compile_where(where, self._chunks))
        if chunk_id is not None:
            return matching.where(self._chunks.c.id == chunk_id).correlate(chunk_id.table)
        return matching.where(VECTORS.c.model == spec.model, VECTORS.c.field == CONTENT)

    def _metadata(self, connection: Connection, ids: Sequence[str]) -> dict[str, RecordMetadata]:
        """What SQL says of chunks, whoever's; those that are gone are left out."""
        names = list(RecordMetadata.__dataclass_fields__)
        columns = [self._chunks.c.id, *(self._chunks.c[name] for name in names)]
        found: dict[str, RecordMetadata] = {}
        for some in batches(ids):
            for id, *values in connection.execute(select(*columns).where(self._chunks.c.id.in_(some))):
                found[id] = RecordMetadata(*values)
        return found
