"""What is killed? A process that writes for three users at once, and tells of each write before and after it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import pytest
from sqlalchemy import Connection, event

from memvault import StorageLayer
from memvault.database.engine import READ_ONLY
from memvault.indexing.debts import Debts
from tests.crash.deeds import Author, Deed, State
from tests.crash.nursery import Line
from tests.support import HashingEmbedder

LEASE_S = 2.0
"""How long a claim of the writer's holds, so that a test need not wait for long until it ends."""

DEEDS = 300
"""How much each user gets done at most: by then every point was passed many times."""

Point = Literal["uncommitted", "committed", "claimed", "written", "unsettled", "settled"]
"""Where a writer kills itself: before a commit; after it, before anybody pays; after debts were claimed; after the
index was written; before the debts are settled; after it, before the write returns."""


@dataclass(frozen=True)
class Kill:
    """How a writer ends: at a point when that is passed for the ``after``-th time; without one, by the test.

    ``with_children``: Chroma's process is killed, too.
    """

    point: Point | None = None
    after: int = 1
    with_children: bool = False


@dataclass(frozen=True)
class Ready:
    """The vault is open."""


@dataclass(frozen=True)
class Begun:
    deed: Deed


@dataclass(frozen=True)
class Done:
    """The call has returned."""

    name: str


@dataclass(frozen=True)
class Reached:
    """The point was reached, and the process kills itself now. ``deed``: whose thread it was, if it was a deed's."""

    point: Point
    deed: str | None


@dataclass(frozen=True)
class Writing:
    """The task of a writer; ``states`` by user, as they are in the vault."""

    url: str
    name: str
    seed: str
    indexing: Literal["inline", "background", "manual"]
    exact_limit: int
    kill: Kill
    states: dict[str, State]

    def __call__(self, line: Line) -> None:
        Writer(self, line).run()


class Writer:
    """A writer at work."""

    def __init__(self, task: Writing, line: Line) -> None:
        self._task = task
        self._line = line
        self._doing: dict[int, Deed] = {}
        self._passing = threading.Lock()
        self._passed = 0
        self._failures: list[BaseException] = []

    def run(self) -> None:
        task = self._task
        patch = pytest.MonkeyPatch()  # of this process alone
        for module in ("debts", "payment"):
            patch.setattr(f"memvault.indexing.{module}.LEASE_S", LEASE_S)
        layer = StorageLayer.open(
            task.url,
            embedder=HashingEmbedder(),
            schema="ignore",
            indexing=task.indexing,
            exact_limit=task.exact_limit,
        )
        if task.kill.point is not None:
            self._arm(layer, task.kill.point, patch)
        self._line.send(Ready())
        threads = [
            threading.Thread(
                target=self._write, args=(layer, Author(user, f"{task.name}-{place}", state, seed=task.seed))
            )
            for place, (user, state) in enumerate(task.states.items())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failure in self._failures:
            raise failure
        layer.close()

    def _write(self, layer: StorageLayer, author: Author) -> None:
        try:
            for _, deed in zip(range(DEEDS), author.deeds(), strict=False):
                self._line.send(Begun(deed))
                self._doing[threading.get_ident()] = deed
                deed.do(layer)
                self._doing.pop(threading.get_ident())
                self._line.send(Done(deed.name))
        except BaseException as exc:  # noqa: BLE001 - raised by `run`
            self._failures.append(exc)

    def _arm(self, layer: StorageLayer, point: Point, patch: pytest.MonkeyPatch) -> None:
        """Have this point call `_pass`."""
        index = layer._reach.index

        def wrap(owner: Any, name: str, *, before: bool = False, counts: Callable[..., bool] = bool) -> None:
            original = getattr(owner, name)

            def wrapped(*arguments: Any, **named: Any) -> Any:
                if before and counts(*arguments):
                    self._pass(point)
                result = original(*arguments, **named)
                if not before and counts(*arguments):
                    self._pass(point)
                return result

            patch.setattr(owner, name, wrapped)

        match point:
            case "uncommitted":
                event.listen(layer.engine, "commit", self._before_commit)
            case "committed":
                wrap(layer, "_committed", before=True, counts=lambda _unit: self._changes_memories())
            case "claimed":
                wrap(Debts, "claim", counts=lambda _debts, claimed, _token: bool(claimed))
            case "written":
                wrap(index, "upsert")
            case "unsettled":
                wrap(Debts, "settle", before=True, counts=lambda _debts, settled, _token: bool(settled))
            case "settled":
                wrap(Debts, "settle", counts=lambda _debts, settled, _token: bool(settled))

    def _changes_memories(self) -> bool:
        deed = self._doing.get(threading.get_ident())
        return deed is not None and deed.changes_memories

    def _before_commit(self, connection: Connection) -> None:
        if self._changes_memories() and not connection.get_execution_options().get(READ_ONLY):
            self._pass("uncommitted")

    def _pass(self, point: Point) -> None:
        with self._passing:
            self._passed += 1
            if self._passed < self._task.kill.after:
                return
            deed = self._doing.get(threading.get_ident())
            self._line.send_last(Reached(point, None if deed is None else deed.name))
            if self._task.kill.with_children:
                for child in psutil.Process().children(recursive=True):
                    child.kill()
            os.kill(os.getpid(), signal.SIGKILL)
