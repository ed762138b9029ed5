"""Where the tests of crashes have their processes from, of which none outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.nursery import Nursery


@pytest.fixture(scope="session")
def shared_nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(shared_nursery: Nursery) -> Iterator[Nursery]:
    """Starts processes; those that a test leaves behind fail it, and are killed."""
    yield shared_nursery
    shared_nursery.assert_childless()
