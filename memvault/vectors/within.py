"""What have indexes inside the vault's database in common? Transactions, names, and what they ask SQL for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, Select, Table, select
from sqlalchemy.exc import SQLAlchemyError

from memvault.database.batches import batches
from memvault.database.transactions import Database
from memvault.database.translate import database_errors
from memvault.database.unit import Unit
from memvault.database.where import compile_where
from memvault.errors import StorageError, VectorIndexError
from memvault.filters import Filter
from memvault.vectors.base import IndexSpec, RecordMetadata


def table_name(prefix: str, model: str) -> str:
    """The name of the table with a model's vectors, so that two models' indexes can stand side by side."""
    return f"{prefix}_{hashlib.sha256(model.encode()).hexdigest()[:12]}"


@contextmanager
def index_errors(index: str, doing: str) -> Iterator[None]:
    """Raise what the database refuses as VectorIndexError."""
    try:
        with database_errors():
            yield
    except (StorageError, SQLAlchemyError) as exc:
        raise VectorIndexError(f"the {index} index could not {doing}: {exc}") from exc


class InDatabase:
    """The connections of an index inside the database: the caller's, or one of its own for each call."""

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
    def _writing(self, connection: Connection | None, doing: str) -> Iterator[Connection]:
        if connection is not None:
            self._prepare(connection)
            yield connection  # its errors are those of the write, which fails whole
            return
        with index_errors(self.location, doing), self._database.writing() as own:
            self._prepare(own)
            yield own

    def _prepare(self, connection: Connection) -> None:
        """Give a connection, whoever opened it, what this index needs of it."""

    def _opened(self) -> IndexSpec:
        if self._spec is None:
            raise VectorIndexError(f"the {self.location} index is not open")
        return self._spec

    def _matching(self, connection: Connection, user_id: str, where: Filter) -> Select[tuple[str]]:
        """The ids of the user's chunks under a filter, to be selected from within the k-NN query."""
        unit = Unit(connection, user_id)
        return unit.select(self._chunks.c.id, frm=self._chunks).where(compile_where(where, self._chunks))

    def _metadata(self, connection: Connection, ids: Sequence[str]) -> dict[str, RecordMetadata]:
        """What SQL says of chunks, whoever's; those that are gone are left out."""
        names = list(RecordMetadata.__dataclass_fields__)
        columns = [self._chunks.c.id, *(self._chunks.c[name] for name in names)]
        found: dict[str, RecordMetadata] = {}
        for some in batches(ids):
            for id, *values in connection.execute(select(*columns).where(self._chunks.c.id.in_(some))):
                found[id] = RecordMetadata(*values)
        return found
