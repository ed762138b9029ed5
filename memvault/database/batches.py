"""How is a long list handed to a statement that takes a short one?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

STATEMENT_SIZE = 1000
"""Ids bound to one statement: far below SQLite's 32,766 values, and past the point where more of them save time."""


def batches(items: Iterable[T], size: int = STATEMENT_SIZE) -> Iterator[list[T]]:
    """The items in lists of at most ``size``, in order; `itertools.batched` came with Python 3.12."""
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some
