"""How is the process asked in which embedded Chroma lives? In bounded time, one request after the other.

Within the service itself Chroma would hold the interpreter's lock for as long as it writes, and could take the service
down with it. See `chroma_child` for the other side.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memvault import forking
from memvault.vectors import chroma_child
from memvault.vectors.chroma_child import IDLE_S, receive, send

QUICK_S = 10.0
"""Seconds for a search, or to be let in by whoever is asking."""

SLOW_S = 60.0
"""Seconds for a batch to be written, or for a listing of everything."""

OPENING_S = 120.0
"""Seconds to import Chroma, and to replay what it has queued."""

LOCK_WAIT_S = 30
"""Seconds that a directory may still be in use by the child of an owner who is gone."""

SPARE = 1
"""How many children without a directory are kept for a while, for the next one to be opened: Chroma takes a second to
be imported."""


class ChildError(Exception):
    """Chroma refused a request, or did not survive it."""

    absent = False


class AbsentError(ChildError):
    """What was asked for is not there."""

    absent = True


class BusyError(ChildError):
    """The directory, or the child, is in somebody else's use for longer than was waited."""


class EndedError(ChildError):
    """The child has ended, or was ended because it did not answer."""


_FORGETTING = {"MALLOC_PERTURB_": "165"}
"""Has glibc overwrite whatever memory is freed. Chroma writes its graph to files with room that was never filled, and
in that lay texts of other users, and of other vaults that the process had open before."""

_KINDS = {"absent": AbsentError, "busy": BusyError}


class ChromaProcess:
    """A child, from `start` to `release` or `kill`; any number of threads may ask it, and wait for each other."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._connection = ours
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the child lives
        self._lock = threading.Lock()
        self._forked = False
        with theirs:
            # A session of its own: what the terminal sends to the service's group is the service's.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(chroma_child.__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
                env={**os.environ, **_FORGETTING},
            )
        self.idle_since = time.monotonic()
        forking.follow(self)
        try:
            self._connection.settimeout(QUICK_S)
            send(self._connection, ("path", list(sys.path)))
        except OSError:
            pass  # it has ended already: the first request says so

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._forked or self._process.poll() is not None

    def answers(self) -> bool:
        """Whether it lives: one that is about to end is not ended for the system yet."""
        try:
            self.request("ping")
        except BusyError:
            return True
        except ChildError:
            return False
        return True

    def request(self, *message: Any, within: float = QUICK_S) -> Any:
        """What the child answers. Raises ChildError; a child that does not answer in time is ended for it."""
        deadline = time.monotonic() + within
        if not self._lock.acquire(timeout=within):
            raise BusyError(f"the process of Chroma was busy for {within:g} s")
        try:
            if self._forked:
                raise EndedError("the process of Chroma belongs to the process that this one was forked from")
            try:
                self._connection.settimeout(max(0.1, deadline - time.monotonic()))
                send(self._connection, message)
                self._connection.settimeout(max(0.1, deadline - time.monotonic()))
                answer = receive(self._connection)
            except TimeoutError as exc:
                self._end()
                raise EndedError(f"the process of Chroma did not answer within {within:g} s, and was ended") from exc
            except (OSError, EOFError) as exc:
                raise EndedError(self._epitaph()) from exc
            except BaseException:  # an interrupt: what comes next over this connection answers another question
                self._end()
                raise
        finally:
            self._lock.release()
        if answer[0] == "done":
            return answer[1]
        _, kind, text = answer
        raise _KINDS.get(kind, ChildError)(text)

    def kill(self) -> None:
        """End it at once, whatever it does. The directory that it has open is left as it is."""
        if self._forked:
            return
        self._process.kill()
        if self._lock.acquire(timeout=QUICK_S):  # whoever waits for an answer is told now that there is none
            try:
                self._close()
            finally:
                self._lock.release()

    def release(self) -> None:
        """Close its directory, and keep it for the next one, or let it end; one that does not answer is ended."""
        try:
            self.request("close", within=QUICK_S)
        except ChildError:
            self.kill()
            return
        self.idle_since = time.monotonic()
        with _spare_lock:
            if len(_spare) < SPARE:
                _spare.append(self)
                return
        self._close()

    def after_fork_in_child(self) -> None:
        self._forked = True
        self._lock = threading.Lock()
        self._connection.close()  # or the child would not notice the end of its parent
        self._process.returncode = 0  # so that nobody waits for another process's child
        _spare.clear()

    def _end(self) -> None:
        self._process.kill()
        self._close()

    def _close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(QUICK_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def _epitaph(self) -> str:
        """How it ended, in its own last words."""
        try:
            code: int | None = self._process.wait(QUICK_S)
        except subprocess.TimeoutExpired:
            code = None
        words = b""
        if not self._stderr.closed:
            size = os.fstat(self._stderr.fileno()).st_size
            self._stderr.seek(max(0, size - 2000))
            words = self._stderr.read()
        last = next((line for line in reversed(words.decode(errors="replace").splitlines()) if line.strip()), "")
        how = "has closed its connection" if code is None else f"ended with code {code}" if code >= 0 else ""
        how = how or f"was ended by signal {-(code or 0)}"
        return f"the process of Chroma {how}{f': {last[:300]}' if last else ''}"


def opened(directory: str, lock_path: str) -> ChromaProcess:
    """A child that has a directory open. Raises BusyError where another one still has it; ChildError."""
    process = start()
    try:
        try:
            process.request("lock", lock_path, LOCK_WAIT_S, within=2 * LOCK_WAIT_S)
        except BusyError:
            raise
        except ChildError as exc:
            raise BusyError(f"its lock {lock_path} could not be had: {exc}") from exc
        process.request("open", directory, within=OPENING_S)
    except BaseException:
        process.kill()
        raise
    return process


def start() -> ChromaProcess:
    """A child without a directory: one that was kept, or a new one."""
    with _spare_lock:
        while _spare:
            process = _spare.pop()
            # Not one that may be about to end for having waited too long.
            if not process.ended and time.monotonic() - process.idle_since < IDLE_S / 2:
                return process
            process.kill()
    return ChromaProcess()


_spare: list[ChromaProcess] = []
_spare_lock = threading.Lock()


class ChromaDirectory:
    """A directory that a child has open: the part of chromadb's client that a collection needs."""

    def __init__(self, process: ChromaProcess) -> None:
        self._process = process

    def get_collection(self, name: str, *, embedding_function: None = None) -> RemoteCollection:
        return RemoteCollection(self._process, name, *self._process.request("get", name, within=SLOW_S))

    def create_collection(
        self, name: str, *, configuration: Any, metadata: dict[str, Any], embedding_function: None = None
    ) -> RemoteCollection:
        made = self._process.request("create", name, configuration, metadata, within=SLOW_S)
        return RemoteCollection(self._process, name, *made)

    def delete_collection(self, name: str) -> None:
        self._process.request("drop", name, within=SLOW_S)

    def get_max_batch_size(self) -> int:
        return int(self._process.request("max_batch_size"))


class RemoteCollection:
    """A collection in a child's directory: those of chromadb's methods that are used of it."""

    def __init__(self, process: ChromaProcess, name: str, metadata: Any, configuration: Any) -> None:
        self.name = name
        self.metadata: dict[str, Any] | None = metadata
        self.configuration_json: dict[str, Any] = configuration
        self._process = process

    def upsert(
        self, *, ids: list[str], embeddings: NDArray[np.float32], documents: list[str], metadatas: list[Any]
    ) -> None:
        self._call("upsert", SLOW_S, ids=ids, embeddings=embeddings, documents=documents, metadatas=metadatas)

    def delete(self, *, ids: list[str]) -> None:
        self._call("delete", SLOW_S, ids=ids)

    def query(self, **arguments: Any) -> Any:
        return self._call("query", QUICK_S, **arguments)

    def get(self, *, include: Sequence[str], ids: list[str] | None = None, where: Any = None) -> Any:
        return self._call("get", SLOW_S, ids=ids, where=where, include=list(include))

    def count(self) -> int:
        return int(self._call("count", QUICK_S))

    def _call(self, method: str, within: float, **arguments: Any) -> Any:
        return self._process.request("call", self.name, method, arguments, within=within)
