"""What does each of several processes do that have one vault open? It writes, and searches for all that was written."""

from __future__ import annotations

import random
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

from memvault import StorageLayer
from tests.crash.deeds import Author, Deed, State
from tests.crash.ledger import USERS, Ledger
from tests.crash.nursery import Line
from tests.crash.writer import Begun, Done
from tests.support import HashingEmbedder

BATCHES = (2, 5, 20)
"""Sizes of what is added at once, and"""
PAUSE_S = 0.02
"""the mean pause between two writes: four processes fill the machine, and the vault stays small enough to compare."""

REMAINS = 0.7


@dataclass(frozen=True)
class Wrong:
    """What the process has written, and then did not find."""

    complaints: list[str]


@dataclass(frozen=True)
class Answer:
    """To the last request."""

    value: Any


# Requests, of which a process is asked one at a time. All but `Stop` are answered.


@dataclass(frozen=True)
class Look:
    """Is another process's deed found? Answered with complaints."""

    deed: Deed


@dataclass(frozen=True)
class LookForAll:
    """Is all found, a ``sample`` of it one by one?"""

    ledger: Ledger
    sample: int


@dataclass(frozen=True)
class Settle:
    """Compare with SQL; answered with the ledger, settled."""

    ledger: Ledger


@dataclass(frozen=True)
class CountDebts:
    """Answered with what is owed."""


@dataclass(frozen=True)
class FindOwner:
    """Answered with the pid of the index's owner, as this process knows it."""


@dataclass(frozen=True)
class Go:
    """Write on."""


@dataclass(frozen=True)
class Halt:
    """Write no more; answered when nothing is under way."""


@dataclass(frozen=True)
class Stop:
    """Close the vault, and end."""


@dataclass(frozen=True)
class Taking:
    """The task of one process."""

    url: str
    name: str
    seed: str
    exact_limit: int

    def __call__(self, line: Line) -> None:
        Participant(self, line).run()


class Participant:
    """A process at work: one thread writes, another answers."""

    def __init__(self, task: Taking, line: Line) -> None:
        self._line = line
        self._going = threading.Event()
        self._writing = threading.Lock()
        self._stopped = False
        self._chance = random.Random(f"{task.seed} {task.name}")
        self._layer = StorageLayer.open(
            task.url, embedder=HashingEmbedder(), schema="ignore", exact_limit=task.exact_limit
        )
        self._deeds = [
            Author(user, f"{task.name}-{place}", State(), seed=task.seed, remains=REMAINS, batches=BATCHES).deeds()
            for place, user in enumerate(USERS)
        ]

    def run(self) -> None:
        writing = threading.Thread(target=self._write, daemon=True)
        writing.start()
        while not isinstance(request := self._line.receive(), Stop):
            self._line.send(Answer(self._answer(request)))
        self._stopped = True
        self._going.set()
        writing.join()
        self._layer.close()

    def _write(self) -> None:
        while True:
            self._going.wait()
            with self._writing:
                if self._stopped:
                    return
                if not self._going.is_set():
                    continue
                deed = next(self._chance.choice(self._deeds))
                self._line.send(Begun(deed))
                try:
                    deed.do(self._layer)
                    self._line.send(Done(deed.name))
                    complaints = list(deed.complaints(self._layer))
                except Exception:  # noqa: BLE001 - raised in the test
                    complaints = [traceback.format_exc()]
                if complaints:
                    self._line.send(Wrong(complaints))
            time.sleep(self._chance.expovariate(1 / PAUSE_S))

    def _answer(self, request: object) -> Any:
        match request:
            case Look(deed):
                return list(deed.complaints(self._layer))
            case LookForAll(ledger, sample):
                ledger.assert_found(self._layer, sample)
            case Settle(ledger):
                ledger.settle(self._layer)
                return ledger
            case CountDebts():
                return self._layer.health()["debts"]
            case FindOwner():
                return self._layer.health()["index_owner_pid"]
            case Go():
                self._going.set()
            case Halt():
                self._going.clear()
                with self._writing:
                    pass
            case _:
                raise AssertionError(request)
        return None
