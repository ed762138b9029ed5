"""What runs in the process in which embedded Chroma lives? One request of its parent's after the other.

It is run as a script and knows nothing of memvault, whose import would take as long as Chroma's. A request is a pickled
tuple, its answer ``("done", value)`` or ``("failed", kind, message)``. When the parent is gone, however it ended, the
socket is at its end: the child finishes what it is doing, closes the directory in good order, and goes, too.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import sys
from typing import IO, Any

IDLE_S = 20.0
"""How long a child without a directory waits for another one before it ends."""

LONGEST_REQUEST_S = 300
"""A request that takes longer ends the child. Its parent loses patience much sooner; this is for one without a parent,
which would keep the directory from its next owner for ever."""

_HEADER = struct.Struct("!Q")


def send(connection: socket.socket, message: tuple[Any, ...]) -> None:
    """Send one message; TimeoutError after the socket's timeout."""
    payload = pickle.dumps(message, protocol=5)
    connection.sendall(_HEADER.pack(len(payload)))
    connection.sendall(payload)


def receive(connection: socket.socket) -> tuple[Any, ...]:
    """One message; EOFError where the other side is gone, TimeoutError where it is silent."""
    (size,) = _HEADER.unpack(_read(connection, _HEADER.size))
    message: tuple[Any, ...] = pickle.loads(_read(connection, size))
    return message


def _read(connection: socket.socket, size: int) -> bytearray:
    read = bytearray(size)
    view = memoryview(read)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError("the other side is gone")
        view = view[count:]
    return read


class InUseError(Exception):
    """Another child has the directory open."""


class Directory:
    """A directory under a lock of the child's own, and open after `open`.

    The lock file holds the child's pid for as long as the directory is open: whoever finds one in it knows that it was
    not closed in good order.
    """

    def __init__(self, lock_path: str, wait_s: int) -> None:
        self._lock = _locked(lock_path, wait_s)
        self._was_left_open = bool(self._lock.read().strip())
        self._client: Any = None
        self._collections: dict[str, Any] = {}

    def open(self, path: str) -> bool:
        """Whether its last user left it open."""
        self._note(f"{os.getpid()}\n")
        try:
            self._client = _client(path)
        except BaseException:
            self.close(in_order=not self._was_left_open)
            raise
        return self._was_left_open

    def get(self, name: str) -> tuple[Any, Any]:
        """A collection's metadata and configuration."""
        return self._keep(name, self._client.get_collection(name, embedding_function=None))

    def create(self, name: str, configuration: Any, metadata: Any) -> tuple[Any, Any]:
        made = self._client.create_collection(
            name, configuration=configuration, metadata=metadata, embedding_function=None
        )
        return self._keep(name, made)

    def drop(self, name: str) -> None:
        self._collections.pop(name, None)
        self._client.delete_collection(name)

    def max_batch_size(self) -> int:
        return int(self._client.get_max_batch_size())

    def call(self, name: str, method: str, arguments: dict[str, Any]) -> Any:
        """What a method of a collection that was got or made answers."""
        return getattr(self._collections[name], method)(**arguments)

    def close(self, *, in_order: bool = True) -> None:
        """``in_order`` False: leave the pid in the lock file, for the next one to find."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if in_order and (client is not None or not self._was_left_open):
            self._note("")
        self._lock.close()

    def _keep(self, name: str, collection: Any) -> tuple[Any, Any]:
        self._collections[name] = collection
        return collection.metadata, collection.configuration_json

    def _note(self, text: str) -> None:
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(text)
        self._lock.flush()


def _locked(path: str, wait_s: int) -> IO[str]:
    import fcntl

    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="ascii", errors="replace")
    # By a signal rather than by polling: the child has nothing else to do, and no other thread.
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(wait_s)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except BaseException:
        file.close()
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return file


def _too_long(*_: object) -> None:
    raise InUseError("the child of its last owner has not let go of it yet")


def _client(path: str) -> Any:
    from chromadb.api.client import Client
    from chromadb.api.shared_system_client import SharedSystemClient
    from chromadb.config import Settings

    settings = Settings(
        _env_file=None,  # type: ignore[call-arg]  # a .env file in the working directory is the service's
        chroma_api_impl="chromadb.api.rust.RustBindingsAPI",
        anonymized_telemetry=False,
        is_persistent=True,
        persist_directory=path,
    )
    try:
        return Client(settings=settings)
    except BaseException:
        # What failed to start stays in chromadb's cache, and every later client of the path would get it.
        if path not in SharedSystemClient._identifier_to_refcount:
            SharedSystemClient._identifier_to_system.pop(path, None)
        raise


class Service:
    """What is asked of the child, by name."""

    def __init__(self) -> None:
        self.directory: Directory | None = None

    def ping(self) -> None:
        """Nothing but to answer."""

    def lock(self, path: str, wait_s: int) -> None:
        """Have the lock of a directory, for it to be opened."""
        self.close()
        self.directory = Directory(path, wait_s)

    def close(self) -> None:
        directory, self.directory = self.directory, None
        if directory is not None:
            directory.close()

    def answer(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        name, *arguments = request
        try:
            if name in ("ping", "lock", "close"):
                return "done", getattr(self, name)(*arguments)
            return "done", getattr(self.directory, name)(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            return "failed", _kind(error), f"{type(error).__name__}: {error}"


def _kind(error: BaseException) -> str:
    if isinstance(error, InUseError):
        return "busy"
    errors = sys.modules.get("chromadb.errors")
    return "absent" if errors is not None and isinstance(error, errors.NotFoundError) else "error"


def serve(connection: socket.socket) -> None:
    """Answer until the parent is gone, or there is nothing to do."""
    service = Service()
    connection.setblocking(True)
    try:
        while True:
            if service.directory is None and not select.select([connection], [], [], IDLE_S)[0]:
                return
            request = receive(connection)
            signal.alarm(LONGEST_REQUEST_S)
            answer = service.answer(request)
            signal.alarm(0)
            send(connection, answer)
    except (EOFError, OSError):  # of the socket: the parent is gone
        pass
    finally:
        signal.alarm(LONGEST_REQUEST_S)
        service.close()


def main() -> None:
    # What ends the parent from the terminal or a service manager is the parent's to hear: it closes the directory.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    _, sys.path[:] = receive(connection)
    serve(connection)


if __name__ == "__main__":
    main()
