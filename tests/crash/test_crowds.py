"""Do several processes on one embedded Chroma vault find what each has written, at once, whoever of them is killed?"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import pytest

from memvault import StorageLayer
from tests.crash.crowd import (
    Answer,
    CountDebts,
    FindOwner,
    Go,
    Halt,
    Look,
    LookForAll,
    Settle,
    Stop,
    Taking,
    Wrong,
)
from tests.crash.ledger import Ledger
from tests.crash.nursery import PATIENCE_S, Nursery, Process, kill_all
from tests.crash.test_kills import SOAK
from tests.crash.writer import Begun, Done
from tests.support import HashingEmbedder

pytestmark = pytest.mark.timeout(3600 if SOAK else 300)

PROCESSES = 4
DEEDS = 5
"""How much each process gets done, at the least, before a kill and after it."""

Victim = Literal["nobody", "owner", "owner and child", "child"]
"""Who is killed: the process that owns the index, the one in which its Chroma runs, or both."""

SHORT: dict[int, tuple[tuple[Victim, float], ...]] = {
    20_000: (("nobody", 1.0), ("owner", 0.7)),
    50: (("nobody", 1.0), ("child", 0.7)),
}
KILLED: tuple[Victim, ...] = ("owner", "child", "owner and child", "child")
LONG: tuple[tuple[Victim, float], ...] = (("nobody", 20.0), *((victim, 1.0) for victim in KILLED * 10))
"""Who is killed, and for how many seconds they write before, and again after it; the short form by `exact_limit`."""


class Crowd:
    """Some processes, the ledger of what they do, and what they are asked."""

    def __init__(self, nursery: Nursery, url: str, exact_limit: int, seed: str) -> None:
        self.ledger = Ledger(seed)
        self.processes: list[Process] = []
        self.done: Counter[int] = Counter()
        """Deeds by pid."""
        self.seen: Counter[tuple[int, int]] = Counter()
        """How often one process was found to have written, by another one; pids."""
        self._nursery = nursery
        self._options = (url, exact_limit)
        self._names = count()
        self._chance = random.Random(seed)
        self._asked: dict[int, object] = {}
        self._answers: dict[int, Any] = {}
        self._looking_for: dict[int, int] = {}
        for _ in range(PROCESSES):
            self.add()

    def add(self) -> Process:
        url, exact_limit = self._options
        process = self._nursery.start(Taking(url, f"{next(self._names)}", self.ledger.seed, exact_limit))
        self.processes.append(process)
        return process

    def ask(self, request: object, *processes: Process) -> list[Any]:
        """What processes answer that are asked at once, by default all there are. What they say meanwhile is heard."""
        asked = processes or tuple(self.processes)
        for process in asked:
            while process.pid in self._asked:
                self.hear()
            self._send(process, request)
        while any(process.pid in self._asked for process in asked):
            self.hear()
        return [self._answers.pop(process.pid) for process in asked]

    def hear(self) -> None:
        """Wait for the next message, and note it. What a process has written for good, another one has to find."""
        lines = {process.line.connection: process for process in self.processes}
        ready = wait(list(lines), PATIENCE_S)
        assert ready, f"nothing was heard for {PATIENCE_S:g} s, seed {self.ledger.seed}"
        for connection in ready:
            process = lines[connection]  # type: ignore[index]  # one of those that were waited for
            self._note(process, process.heard())

    def _note(self, process: Process, message: object) -> None:
        match message:
            case Begun(deed):
                self.ledger.begin(deed)
            case Done(name):
                deed = self.ledger.done(name)
                self.done[process.pid] += 1
                idle = [one for one in self.processes if one is not process and one.pid not in self._asked]
                if deed.final and idle:
                    other = self._chance.choice(idle)
                    self._looking_for[other.pid] = process.pid
                    self._send(other, Look(deed))
            case Wrong(complaints):
                raise AssertionError(f"seed {self.ledger.seed}, {process.pid} on its own: {complaints}")
            case Answer(value):
                request = self._asked.pop(process.pid)
                if isinstance(request, Look):
                    writer = self._looking_for.pop(process.pid)
                    assert value == [], f"seed {self.ledger.seed}, {process.pid} of what {writer} has written"
                    self.seen[writer, process.pid] += 1
                else:
                    self._answers[process.pid] = value
            case _:
                raise AssertionError(message)

    def write(self, seconds: float) -> None:
        """Let them write for so long, and until each has got something done."""
        before = self.done.copy()
        until = time.monotonic() + seconds
        while time.monotonic() < until or any(
            self.done[process.pid] < before[process.pid] + DEEDS for process in self.processes
        ):
            self.hear()

    def owner(self) -> Process:
        """The process that owns the index."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            pids = Counter(self.ask(FindOwner()))
            for process in self.processes:
                if pids[process.pid]:
                    return process
            self.write(0)
        raise AssertionError(f"none of {[one.pid for one in self.processes]} owns the index, but {pids}")

    def kill(self, victim: Victim) -> None:
        """Amid its writes. Another process takes the place of one that is killed."""
        owner = self.owner()
        if victim == "child":
            while not (children := owner.children()):  # it is about to start one
                self.write(0)
            kill_all(children)
            return
        owner.kill(with_children=victim == "owner and child")
        self.processes.remove(owner)
        for message in owner.messages():  # its last words
            self._note(owner, message)
        self._asked.pop(owner.pid, None)
        owner.wait()
        self.ask(Go(), self.add())

    def compare(self, sample: int) -> None:
        """While nobody writes: all is there, each finds all of it; the owner pays all, and each finds it again."""
        self.ask(Halt())
        [self.ledger] = self.ask(Settle(self.ledger), self.processes[0])
        self.ask(LookForAll(self.ledger, sample))
        deadline = time.monotonic() + PATIENCE_S
        while any(owed := self.ask(CountDebts())):
            assert time.monotonic() < deadline, f"{owed} debts are not paid, seed {self.ledger.seed}"
            time.sleep(0.05)
        self.ask(LookForAll(self.ledger, sample))
        self.ledger.recent.clear()

    def stop(self) -> None:
        """They close the vault, and end."""
        while self._asked:
            self.hear()
        for process in self.processes:
            process.line.send(Stop())
        for process in self.processes:
            for message in process.messages():
                raise AssertionError(message)
            process.wait()

    def _send(self, process: Process, request: object) -> None:
        self._asked[process.pid] = request
        process.line.send(request)


@contextmanager
def crowd(nursery: Nursery, url: str, exact_limit: int, seed: str) -> Iterator[Crowd]:
    several = Crowd(nursery, url, exact_limit, seed)
    try:
        yield several
        several.stop()
    finally:
        for process in several.processes:
            process.kill(with_children=True)


@pytest.mark.parametrize("exact_limit", SHORT)
def test_each_finds_what_any_has_written(nursery: Nursery, vault_path: Path, exact_limit: int) -> None:
    url = f"sqlite:///{vault_path}"
    with crowd(nursery, url, exact_limit, f"{SOAK or 0}-{exact_limit}") as several:
        for victim, seconds in LONG if SOAK else SHORT[exact_limit]:
            several.ask(Go())
            several.write(seconds)
            if victim != "nobody":
                several.kill(victim)
                several.write(seconds)
            several.compare(sample=50 if SOAK else 3)
        several.ask(Halt())
        pids = {process.pid for process in several.processes}
        assert {writer for writer, _ in several.seen} >= pids
        assert {reader for _, reader in several.seen} >= pids
    with StorageLayer.open(url, embedder=HashingEmbedder(), schema="ignore", indexing="manual", exact_limit=0) as layer:
        several.ledger.settle(layer)
        assert layer.sync().owed == 0
        several.ledger.assert_index_is_sql(layer, sample=10_000 if SOAK else 50)
        several.ledger.assert_found(layer, sample=10_000 if SOAK else 10, limit=0)
