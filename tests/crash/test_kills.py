"""Is what was acknowledged there, and found, after the writer was killed by SIGKILL? Anywhere, again and again."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

import pytest

from memvault import StorageLayer
from tests.crash.ledger import Ledger, pay
from tests.crash.nursery import Nursery, Process
from tests.crash.writer import Begun, Done, Kill, Reached, Ready, Writing
from tests.support import HashingEmbedder

SOAK = os.environ.get("MEMVAULT_SOAK")
"""The seed of a long run, in which everything is killed ten times as often."""

pytestmark = pytest.mark.timeout(3600 if SOAK else 300)

BACKENDS = (("sqlite", "chroma"), ("sqlite", "chroma-server"), ("sqlite", "sqlite-vec"))

AT_RANDOM, OPENING = Kill(), Kill(after=0)
"""By the test: amid its writes, or while it opens a vault that the last one was torn from."""

KILLS = {
    "chroma": (
        Kill("committed", 9),
        Kill("written", 5, with_children=True),
        Kill("unsettled", 3),
        AT_RANDOM,
        Kill(with_children=True),
        OPENING,
        Kill("committed", 2, with_children=True),
    ),
    "chroma-server": (
        Kill("committed", 9),
        Kill("claimed", 4),
        Kill("written", 5),
        AT_RANDOM,
        Kill("unsettled", 3),
        Kill("settled", 4),
    ),
    "sqlite-vec": (
        Kill("uncommitted", 7),
        Kill("committed", 9),
        AT_RANDOM,
        Kill("uncommitted", 2),
        Kill("committed", 3),
        AT_RANDOM,
        Kill("uncommitted", 11),
    ),
}
"""How the writers of one vault end, one after the other."""

LONG = {"chroma": 80, "chroma-server": 60, "sqlite-vec": 60}


def test_what_was_acknowledged_survives(nursery: Nursery, vault_path: Path, vectors: str, index_name: str) -> None:
    url = f"sqlite:///{vault_path}"
    StorageLayer.open(url, vectors=vectors, embedder=HashingEmbedder()).close()
    kills = KILLS[index_name]
    if SOAK:
        kills = tuple(islice(cycle(kills), LONG[index_name]))
    ledger = Ledger(f"{SOAK or 0}-{index_name}")
    chance = random.Random(ledger.seed)
    reached: Counter[str | None] = Counter()
    for number, kill in enumerate(kills):
        task = Writing(
            url,
            name=f"{number}",
            seed=ledger.seed,
            indexing=indexing(kill, chance),
            exact_limit=chance.choice([0, 5, 20_000]),
            kill=kill,
            states=ledger.states,
        )
        with nursery.start(task) as writer:
            if kill is OPENING:
                time.sleep(chance.random() * 1.5)
                writer.kill()
            follow(writer, kill, ledger, chance)
        reached[kill.point] += 1
        check(url, ledger, last=number == len(kills) - 1)
    assert reached == Counter(kill.point for kill in kills)
    assert ledger.acknowledged > len(kills)


def indexing(kill: Kill, chance: random.Random) -> Literal["inline", "background", "manual"]:
    """Where nobody pays but by `sync`, there is nobody to be killed while a write waits for it."""
    if kill.point == "settled":
        return "inline"
    return chance.choice(["inline", "inline", "background", "manual"])


def follow(writer: Process, kill: Kill, ledger: Ledger, chance: random.Random) -> None:
    """Note what the writer says until it is dead, as it was to end."""
    point: str | None = None
    until = chance.randrange(5, 60)  # acknowledgements until it is killed at random
    ended = kill is OPENING
    for message in writer.messages():
        match message:
            case Ready():
                pass
            case Begun(deed):
                ledger.begin(deed)
            case Done(name):
                ledger.done(name)
                until -= 1
                if until <= 0 and kill.point is None and not ended:
                    ended = True
                    time.sleep(chance.random() * 0.05)
                    writer.kill(with_children=kill.with_children)
            case Reached(point, name):
                if name is not None and point == "committed":
                    ledger.done(name)  # it is committed, though its call has not returned
                elif name is not None and point == "uncommitted":
                    ledger.undone(name)
            case _:
                raise AssertionError(message)
    assert point == kill.point, f"the writer did not reach {kill}, but {point}, seed {ledger.seed}"
    assert kill.point or ended, f"the writer ended by itself, seed {ledger.seed}"


def check(url: str, ledger: Ledger, *, last: bool) -> None:
    """In a process that has written nothing: everything is there, and found at once; what is owed can be paid."""
    opened: Callable[..., StorageLayer] = lambda limit: StorageLayer.open(  # noqa: E731
        url, embedder=HashingEmbedder(), schema="ignore", indexing="manual", exact_limit=limit
    )
    with opened(60) as layer:  # less than most have, and more than is owed to most
        with opened(20_000) as exactly:
            ledger.settle(exactly)
            ledger.assert_found(exactly, sample=3)
        ledger.assert_found(layer, sample=3)
        pay(layer)
    sample = (10_000 if SOAK else 50) if last else 3
    with opened(0) as layer:
        ledger.assert_found(layer, sample, limit=0)
        ledger.assert_index_is_sql(layer, sample)
        assert layer.health()["debts"] == 0
    ledger.recent.clear()
