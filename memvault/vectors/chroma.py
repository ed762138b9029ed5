"""How is a directory of embedded Chroma a vault's index?"""

from __future__ import annotations

import shutil
import sqlite3
import threading
import uuid
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from memvault.vectors.base import IndexSpec
from memvault.vectors.chroma_backed import ChromaBacked
from memvault.vectors.chroma_collection import ChromaCollection, chroma_errors, name_of, require_chromadb
from memvault.vectors.ownership import DirectoryOwnership

if TYPE_CHECKING:
    from chromadb.api.client import Client

_DATABASE = "chroma.sqlite3"


class ChromaIndex(ChromaBacked):
    """The collection ``memvault_<vault_id>`` in a directory that this process owns from `open` until `close`.

    `open` keeps the ownership, too, where it finds nothing or raises because of what it finds: `purge` may follow.
    The directory is made by `create` and may hold other collections, which are left alone.
    """

    exclusive = True

    def __init__(self, directory: Path, *, location: str = "chroma") -> None:
        self.location = location
        self._directory = directory.resolve()  # links to one directory share its lock
        super().__init__(str(self._directory))
        self._ownership = DirectoryOwnership(self._directory)
        self._guard = threading.RLock()  # for opening and closing; Chroma itself takes any number of threads
        self._client: Client | None = None

    def open(self, spec: IndexSpec) -> bool:
        require_chromadb()
        with self._guard:
            self._ownership.acquire()
            self._disconnect()
            self._spec = spec
            if (self._directory / _DATABASE).exists():
                self._collection = ChromaCollection.find(self._connect(), spec, self._place)
            return self._collection is not None

    def create(self) -> None:
        with self._guard:
            spec = self._bound()
            if self._collection is None:
                self._collection = ChromaCollection.make(self._client or self._connect(), spec, self._place)

    def purge(self) -> None:
        """Remove the vault's collection and, where it was the only one, all that Chroma made in the directory.

        Only the latter leaves nothing of the texts on the disk. It works on a directory that Chroma cannot open.
        """
        with self._guard:
            spec = self._bound()
            self._ownership.acquire()
            self._disconnect()
            with chroma_errors(self._place, "be removed", sqlite3.Error):
                names = self._names()
                if names <= {name_of(spec)}:
                    self._remove()
                elif name_of(spec) in names:
                    self._connect().delete_collection(name_of(spec))

    def close(self) -> None:
        with self._guard:
            self._disconnect()
            self._ownership.release()
            self._spec = None

    def _connect(self) -> Client:
        from chromadb.api.client import Client
        from chromadb.api.shared_system_client import SharedSystemClient
        from chromadb.config import Settings

        settings = Settings(
            _env_file=None,  # type: ignore[call-arg]  # a .env file in the working directory is the service's
            chroma_api_impl="chromadb.api.rust.RustBindingsAPI",
            anonymized_telemetry=False,
            is_persistent=True,
            persist_directory=self._place,
        )
        # ValueError: a client with other settings has it open in this process, or its tenant is gone.
        with chroma_errors(self._place, "be opened", ValueError):
            try:
                self._client = Client(settings=settings)
            except BaseException:
                # What failed to start stays in chromadb's cache, and every later client of the path would get it.
                if self._place not in SharedSystemClient._identifier_to_refcount:
                    SharedSystemClient._identifier_to_system.pop(self._place, None)
                raise
        return self._client

    def _disconnect(self) -> None:
        self._collection = None
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _names(self) -> set[str]:
        """The collections in the directory, read without Chroma; none where SQLite finds no database of Chroma's."""
        file = self._directory / _DATABASE
        if not file.exists():
            return set()
        try:
            with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True)) as connection:
                return {name for (name,) in connection.execute("SELECT name FROM collections")}
        except sqlite3.DatabaseError as exc:
            if exc.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                return set()
            raise

    def _remove(self) -> None:
        """Only what Chroma makes: somebody may have named a folder that holds more."""
        if not self._directory.is_dir():
            return
        (self._directory / _DATABASE).unlink(missing_ok=True)  # first: what is left by a crash is no index
        for path in self._directory.iterdir():
            if path.name.startswith(f"{_DATABASE}-"):
                path.unlink()
            elif path.is_dir() and _is_uuid(path.name):  # a collection's graph
                shutil.rmtree(path)
        if not any(self._directory.iterdir()):
            self._directory.rmdir()


def _is_uuid(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False
