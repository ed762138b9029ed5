"""Where do processes come from that are killed by the dozen? Forked off one that has imported everything already.

A new interpreter takes a second and a half until it can open a vault, a fork of one that has nothing open a few
milliseconds, and the two die alike.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

import psutil

import memvault
from tests.support import eventually

ROOT = Path(memvault.__file__).parents[1]

PATIENCE_S = 90.0
"""How long a process may say nothing at all before its test fails."""

_MARK = "MEMVAULT_TESTS_NURSERY"
"""In the environment of all that descends from a nursery, Chroma's processes among them."""


class Task(Protocol):
    """What a process is for; its modules are imported by the nursery, and its fields are pickled."""

    def __call__(self, line: Line) -> None: ...


@dataclass(frozen=True)
class Failed:
    """The last message of a process whose task raised."""

    text: str


class Line:
    """One end of the line between the test and a process; any number of threads may send, one receives."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        with self._sending:
            self.connection.send(message)

    def send_last(self, message: object) -> None:
        """Send, and let nobody in this process send anything afterwards."""
        self._sending.acquire()
        self.connection.send(message)

    def receive(self) -> Any:
        """The next message; EOFError where the other side is gone."""
        try:
            return self.connection.recv()
        except (OSError, pickle.UnpicklingError) as exc:  # it was killed in the middle of a message
            raise EOFError("the other side is gone") from exc


class Process:
    """One process, as its test sees it; a context manager, after which it is gone."""

    def __init__(self, line: Line, pid: int) -> None:
        self.line = line
        self.pid = pid
        self._process = psutil.Process(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(with_children=True)
        self.wait()

    def messages(self) -> Iterator[Any]:
        """What it says until it is gone."""
        while True:
            if not self.line.connection.poll(PATIENCE_S):
                raise AssertionError(f"the process {self.pid} has said nothing for {PATIENCE_S:g} s")
            try:
                yield self.heard()
            except EOFError:
                return

    def heard(self) -> Any:
        """The next message; EOFError where it is gone."""
        message = self.line.receive()
        if isinstance(message, Failed):
            raise AssertionError(f"in the process {self.pid}:\n{message.text}")
        return message

    def kill(self, *, with_children: bool = False) -> None:
        """SIGKILL, and to those that it has started itself, too."""
        try:
            doomed = [self._process, *(self._process.children(recursive=True) if with_children else [])]
        except psutil.NoSuchProcess:
            return
        kill_all(doomed)

    def children(self) -> list[psutil.Process]:
        try:
            return [one for one in self._process.children() if one.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []

    def wait(self) -> None:
        """Until nothing is left of it, its locks on files included."""
        self._process.wait(PATIENCE_S)
        self.line.connection.close()


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


class Nursery:
    """Starts processes, and knows all that comes from them, however far."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                # A library's own threads do not survive a fork.
                env={**os.environ, _MARK: self._mark, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )

    def start(self, task: Task) -> Process:
        """A process that does this, and then ends."""
        ours, theirs = socket.socketpair()
        self._control.settimeout(PATIENCE_S)
        with theirs:
            socket.send_fds(self._control, [b"!"], [theirs.fileno()])
        answer = self._control.recv(64)
        assert answer, "the nursery has ended"
        line = Line(Connection(ours.detach()))
        process = Process(line, int(answer))
        line.send(task)
        return process

    def orphans(self) -> list[psutil.Process]:
        """What is still running of all that was ever started."""
        return [
            process for process in psutil.process_iter() if process.pid != self._process.pid and self._is_ours(process)
        ]

    def assert_childless(self) -> None:
        """Nothing is left that a test has started; what is, is killed."""
        try:
            eventually(lambda: not self.orphans())
        finally:
            kill_all(self.orphans())

    def close(self) -> None:
        self._control.close()
        self._process.wait(PATIENCE_S)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark
        except psutil.Error:  # gone, about to be, or somebody else's
            return False


def main() -> None:
    # What the tasks are made of, and the one large part of memvault that is imported when it is used.
    import memvault.vectors.chroma_client  # noqa: F401
    from tests.crash import crowd, writer  # noqa: F401

    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here: the kernel buries them
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _live(Line(Connection(descriptors[0])))
        os.close(descriptors[0])
        control.sendall(f"{pid}".encode())


def _live(line: Line) -> None:
    try:
        task: Task = line.receive()
        task(line)
    except EOFError:
        pass  # the test is over
    except BaseException:  # noqa: BLE001 - raised in the test
        line.send(Failed(traceback.format_exc()))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
