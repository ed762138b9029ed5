"""PostgreSQL databases that a test migrates itself, on the newest server and on an old one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.postgres import Postgres

NewDatabase = Callable[..., str]
"""Makes a database of that name, empty or of a template; its URL."""


@pytest.fixture(params=["postgres18", "postgres15"])
def server(request: pytest.FixtureRequest) -> Postgres:
    """Each version in turn."""
    running: Postgres = request.getfixturevalue(request.param)
    return running


@pytest.fixture
def new_database(server: Postgres) -> Iterator[NewDatabase]:
    """Databases on `server` that are dropped at the end."""
    made: list[str] = []

    def make(name: str, template: str | None = None) -> str:
        url = server.create_database(name, template)
        made.append(name)
        return url

    yield make
    for name in made:
        server.drop_database(name)


@pytest.fixture
def fresh(new_database: NewDatabase) -> str:
    """The URL of an empty database named "fresh"."""
    return new_database("fresh")
