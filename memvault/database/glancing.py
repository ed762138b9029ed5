"""On which connection does a single statement read SQLite? One that is kept past the pool, which takes longer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, event
from sqlalchemy.pool import PoolProxiedConnection

KEPT = 4
"""How many idle connections are kept: as many searches at once find one open."""

CACHE_KIB = 16_384
"""SQLite's page cache of such a connection. With its default of 2 MiB, of 100,000 chunks nearly every page would be
asked of the system anew."""


class GlanceConnections:
    """Connections to a SQLite file that are never in a transaction between two uses. Any number of threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._idle: list[PoolProxiedConnection] = []
        self._closed = False
        kept = weakref.ref(self)

        def disposed(_: Engine) -> None:
            if (connections := kept()) is not None:
                connections.drop()

        self._disposed = disposed
        if engine.dialect.name == "sqlite":
            event.listen(engine, "engine_disposed", disposed)

    @contextmanager
    def lend(self) -> Iterator[PoolProxiedConnection]:
        """A connection on which to read without beginning a transaction. After an error it is not used again."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._engine.raw_connection()
            connection.detach()  # the pool may open another in its place
            connection.cursor().execute(f"PRAGMA cache_size = {-CACHE_KIB}")
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if self._closed or len(self._idle) >= KEPT:
            connection.close()
        else:
            self._idle.append(connection)

    def drop(self) -> None:
        """Close those that are idle: the file is to be let go of, for now."""
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        self._closed = True
        if event.contains(self._engine, "engine_disposed", self._disposed):
            event.remove(self._engine, "engine_disposed", self._disposed)
        self.drop()
