"""What must be let go before this process forks, and made anew after it? Whoever holds such a thing says so here.

A fork copies memory alone: threads are gone in the child, a lock that one of them held is held for ever, sockets and
open SQLite files are the same ones in both processes. gunicorn with preload, and multiprocessing on Linux, fork.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import suppress
from typing import Protocol

log = logging.getLogger("memvault")


class Forked(Protocol):
    """What takes part in a fork. None of the methods may raise, or wait for long."""

    def before_fork(self) -> None:
        """In the process that will fork, on the thread that does."""
        ...

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None: ...


_following: list[weakref.ref[Forked]] = []


def follow(holder: Forked) -> None:
    """Have the holder told of forks for as long as it lives; before one, in the reverse order of these calls."""
    _following[:] = [reference for reference in _following if reference() is not None]
    _following.append(weakref.ref(holder))


def _holders() -> list[Forked]:
    return [holder for reference in list(_following) if (holder := reference()) is not None]


def _tell(name: str, holders: list[Forked]) -> None:
    for holder in holders:
        try:
            getattr(holder, name)()
        except Exception:
            with suppress(Exception):
                log.exception("a fork: %s of %r failed", name, holder)


def _before() -> None:
    _tell("before_fork", list(reversed(_holders())))


def _in_parent() -> None:
    _tell("after_fork_in_parent", _holders())


def _in_child() -> None:
    _tell("after_fork_in_child", _holders())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
