"""How is a directory of embedded Chroma a vault's index? A child of the one process that owns it has it open."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
import uuid
from contextlib import closing
from pathlib import Path

from memvault import forking
from memvault.errors import IndexMismatchError, VectorIndexError
from memvault.vectors.base import Doubt, IndexSpec
from memvault.vectors.chroma_backed import ChromaBacked
from memvault.vectors.chroma_collection import ChromaCollection, chroma_errors, name_of, require_chromadb
from memvault.vectors.chroma_process import BusyError, ChromaDirectory, ChromaProcess, opened
from memvault.vectors.ownership import DirectoryOwnership

log = logging.getLogger("memvault.index")

_DATABASE = "chroma.sqlite3"


class ChromaIndex(ChromaBacked):
    """The collection ``memvault_<vault_id>`` in a directory that this process owns from `open` until `close`.

    `open` keeps the ownership, too, where it finds nothing or raises because of what it finds: `purge` may follow.
    The directory is made by `create` and may hold other collections, which are left alone.

    Chroma itself runs in a child process. Where that crashes or hangs, or is killed with its service, calls raise
    VectorIndexError until `open` is called again, which probes what was left behind: what does not answer is removed,
    as if nothing had been there, and of what does, `doubt` says what it holds.
    """

    exclusive = True

    def __init__(self, directory: Path, *, location: str = "chroma") -> None:
        self.location = location
        self._directory = directory.resolve()  # links to one directory share its lock
        super().__init__(str(self._directory))
        self._ownership = DirectoryOwnership(self._directory)
        self._in_use = Path(f"{self._directory}.child")
        self._guard = threading.RLock()  # for opening and closing; the child takes any number of threads
        self._process: ChromaProcess | None = None
        self.doubt: Doubt | None = None
        forking.follow(self)

    @property
    def child_pid(self) -> int | None:
        """The process that Chroma runs in, while it runs."""
        return None if self._process is None or self._process.ended else self._process.pid

    def open(self, spec: IndexSpec) -> bool:
        require_chromadb()
        with self._guard:
            self._ownership.acquire()
            if spec != self._spec or (self._process is not None and not self._process.answers()):
                self._disconnect()
            self._spec = spec
            self._collection = None
            if self._process is None and not (self._directory / _DATABASE).exists():
                self._in_use.unlink(missing_ok=True)  # whatever happened to it: nothing is left
                return False
            try:
                self._find(spec)
            except IndexMismatchError:
                raise
            except VectorIndexError as exc:
                self._collection = None
                if isinstance(exc.__cause__, BusyError) or not self._was_left_open():
                    raise
                self._drop(spec, exc)
            return self._collection is not None

    def create(self) -> None:
        with self._guard:
            spec = self._bound()
            if self._collection is None:
                self._ownership.acquire()
                directory = ChromaDirectory(self._process or self._connect())
                self._collection = ChromaCollection.make(directory, spec, self._place)

    def purge(self) -> None:
        """Remove the vault's collection and, where it was the only one, all that Chroma made in the directory.

        Only the latter leaves nothing of the texts on the disk. It works on a directory that Chroma cannot open.
        """
        with self._guard:
            spec = self._bound()
            self._ownership.acquire()
            self._disconnect()
            names = self._names()
            if names <= {name_of(spec)}:
                self._remove()
            elif name_of(spec) in names:
                with chroma_errors(self._place, "be removed"):
                    ChromaDirectory(self._connect()).delete_collection(name_of(spec))

    def size(self) -> int:
        """Of all files in the directory, in bytes."""
        return sum(path.stat().st_size for path in self._directory.rglob("*") if path.is_file())

    def close(self) -> None:
        with self._guard:
            self._disconnect()
            if self._ownership.is_held and not self._was_left_open():
                self._in_use.unlink(missing_ok=True)
            self._ownership.release()
            self._spec = None

    def after_fork_in_child(self) -> None:
        """Another process owns the directory now, as any other."""
        self._guard = threading.RLock()
        self._process = self._collection = None
        self._ownership = DirectoryOwnership(self._directory)

    def _find(self, spec: IndexSpec) -> None:
        """The collection, if it is there; probed, where its last user did not close the directory in good order."""
        left_open = self._process is None and self._was_left_open()
        process = self._process or self._connect()
        try:
            self._collection = ChromaCollection.find(ChromaDirectory(process), spec, self._place)
            if left_open and self._collection is not None:
                log.info("the vector index in %s was not closed in good order; it is probed", self._place)
                listed = self._collection.ids()
                self.doubt = Doubt(listed, self._collection.unfindable(listed))
        except IndexMismatchError:
            raise
        except VectorIndexError:
            if left_open:  # and not to be closed as if it were in good order
                process.kill()
                self._process = None
            raise

    def _connect(self) -> ChromaProcess:
        with chroma_errors(self._place, "be opened"):
            self._process = opened(self._place, str(self._in_use))
        return self._process

    def _disconnect(self) -> None:
        self._collection = None
        process, self._process = self._process, None
        if process is not None:
            process.release()

    def _was_left_open(self) -> bool:
        """Whether whoever had the directory open last has not closed it. It may be about to."""
        try:
            return bool(self._in_use.read_text(encoding="ascii", errors="replace").strip())
        except FileNotFoundError:
            return False

    def _drop(self, spec: IndexSpec, reason: VectorIndexError) -> None:
        others = self._names() - {name_of(spec)}
        if others:
            raise VectorIndexError(
                f"{reason}. It was not closed in good order, and is not removed since it holds other collections, too: "
                f"{', '.join(sorted(others))}. Move these elsewhere, or point the vault at a folder of its own"
            ) from reason
        self._remove()
        self.doubt = None
        log.warning("%s; it was not closed in good order, and is made anew from SQL", reason)

    def _names(self) -> set[str]:
        """The collections in the directory, read without Chroma; none where SQLite finds no database of Chroma's."""
        file = self._directory / _DATABASE
        if not file.exists():
            return set()
        with chroma_errors(self._place, "be read", sqlite3.Error):
            try:
                with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True)) as connection:
                    return {name for (name,) in connection.execute("SELECT name FROM collections")}
            except sqlite3.DatabaseError as exc:
                if exc.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                    return set()
                raise

    def _remove(self) -> None:
        """Only what Chroma makes: somebody may have named a folder that holds more."""
        with chroma_errors(self._place, "be removed"):
            if self._directory.is_dir():
                (self._directory / _DATABASE).unlink(missing_ok=True)  # first: what is left by a crash is no index
                for path in self._directory.iterdir():
                    if path.name.startswith(f"{_DATABASE}-"):
                        path.unlink()
                    elif path.is_dir() and _is_uuid(path.name):  # a collection's graph
                        shutil.rmtree(path)
                if not any(self._directory.iterdir()):
                    self._directory.rmdir()
            self._in_use.unlink(missing_ok=True)


def _is_uuid(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False
