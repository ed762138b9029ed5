"""What must be let go before this process forks, and made anew after it? Whoever holds such a thing says so here.

A fork copies memory alone: threads are gone in the child, a lock that one of them held is held for ever, sockets and
open SQLite files are the same ones in both processes. gunicorn with preload, and multiprocessing on Linux, fork.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import suppress

log = logging.getLogger("memvault")


_following: list[weakref.ref[object]] = []
_told: list[object] = []


def follow(holder: object) -> None:
    """Have the holder told of forks for as long as it lives; before one, in the reverse order of these calls.

    Those of its methods ``before_fork``, on the thread that forks, ``after_fork_in_parent`` and
    ``after_fork_in_child`` that there are. None may raise, or wait for long.
    """
    _following[:] = [reference for reference in _following if reference() is not None]
    _following.append(weakref.ref(holder))


def _holders() -> list[object]:
    return [holder for reference in list(_following) if (holder := reference()) is not None]


def _tell(name: str, holders: list[object]) -> None:
    for holder in holders:
        try:
            if (told := getattr(holder, name, None)) is not None:
                told()
        except Exception:
            with suppress(Exception):
                log.exception("a fork: %s of %r failed", name, holder)


def _before() -> None:
    _told[:] = _holders()
    _tell("before_fork", list(reversed(_told)))


def _in_parent() -> None:
    _tell("after_fork_in_parent", _told)  # and not those that began to follow meanwhile
    _told.clear()


def _in_child() -> None:
    _told.clear()
    _tell("after_fork_in_child", _holders())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
