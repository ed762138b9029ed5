"""Is a password with every character that a URL escapes understood everywhere, and shown nowhere?"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import URL, make_url

from memvault import MemvaultError, StorageError, StorageLayer, create_engine
from memvault.database import migrate
from tests.database.migrating import Done, alembic, run_python
from tests.postgres import PASSWORD, PASSWORD_ROLE, Postgres

WRONG = PASSWORD.replace("ss", "zz")

FRAGMENTS = ("wo:rd", "wo%3Ard", "wo%253Ard", "p%40@", "p%2540")
"""No way of writing either password is without one of these."""


@pytest.fixture(params=["postgres18"])
def server(request: pytest.FixtureRequest) -> Postgres:
    running: Postgres = request.getfixturevalue(request.param)
    return running


@pytest.fixture
def url(server: Postgres, fresh: str) -> str:
    """The URL of the fresh database with the password in it; it is the role's own database."""
    server.execute(f'ALTER DATABASE fresh OWNER TO "{PASSWORD_ROLE}"')
    return server.url("fresh", PASSWORD_ROLE, PASSWORD)


@pytest.fixture(autouse=True)
def shown(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """What anybody gets to see: a test adds to it; logs at their most talkative and both streams belong to it."""
    seen: list[str] = []
    with caplog.at_level(logging.DEBUG):
        yield seen
    seen += [caplog.text, *capfd.readouterr()]
    for text in seen:
        assert [fragment for fragment in FRAGMENTS if fragment in text] == []


def as_query(url: str) -> str:
    """The password where libpq allows it, too."""
    given = make_url(url)
    bare = URL.create("postgresql", given.username, None, given.host, given.port, given.database).render_as_string()
    return f"{bare.replace(' ', '%20')}?password={quote(PASSWORD, safe='')}"


class TestUnderstood:
    @pytest.mark.parametrize("write", [str, make_url, as_query], ids=["text", "object", "query"])
    def test_by_the_api(self, url: str, write: Callable[[str], str | URL], shown: list[str]) -> None:
        given = write(url)
        migrate.upgrade(given)
        assert migrate.current(given) == migrate.head()
        migrate.require_declared(given)
        with StorageLayer.open(
            given, vectors="exact", embedder="none", engine_options={"echo": "debug", "echo_pool": "debug"}
        ) as storage:
            storage.for_user("alice").procedural.set("key", 1)
            shown += [repr(storage), repr(storage.engine), str(storage.health()), str(storage.stats())]
        migrate.downgrade(given, "base")

    def test_by_the_commands(self, url: str, tmp_path: Path, shown: list[str]) -> None:
        def run(done: Done) -> str:
            shown.extend((done.out, done.err))
            assert done.code == 0, done.err
            return done.out

        run(alembic("upgrade", "head", cwd=tmp_path, url=url))
        run(alembic("-x", f"url={url}", "downgrade", "base", cwd=tmp_path))
        run(run_python("-m", "memvault", "--debug", "db", "upgrade", cwd=tmp_path, url=url))
        assert migrate.head() in run(
            run_python("-m", "memvault", "--debug", "db", "current", "--database-url", url, cwd=tmp_path)
        )


class TestNotShown:
    @pytest.fixture(params=["wrong password", "no such database", "nobody there"])
    def bad_url(self, request: pytest.FixtureRequest, server: Postgres, url: str) -> str:
        if request.param == "wrong password":
            return server.url("fresh", PASSWORD_ROLE, WRONG)
        if request.param == "no such database":
            return server.url("absent", PASSWORD_ROLE, PASSWORD)
        return make_url(url).set(port=1).render_as_string(hide_password=False)

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda url: StorageLayer.open(url, vectors="exact"), id="open"),
            pytest.param(migrate.upgrade, id="upgrade"),
            pytest.param(migrate.current, id="current"),
        ],
    )
    def test_in_an_error(self, bad_url: str, call: Callable[[str], object], shown: list[str]) -> None:
        with pytest.raises(StorageError) as caught:
            call(bad_url)
        shown.append("".join(traceback.format_exception(caught.value)))
        assert "127.0.0.1" in str(caught.value)  # but it says where it was

    @pytest.mark.parametrize("bad_url", ["wrong password"], indirect=True)
    def test_by_the_commands(self, bad_url: str, tmp_path: Path, shown: list[str]) -> None:
        for done in (
            run_python("-m", "memvault", "--debug", "db", "upgrade", cwd=tmp_path, url=bad_url),
            alembic("upgrade", "head", cwd=tmp_path, url=bad_url),
        ):
            assert done.code != 0
            shown.extend((done.out, done.err))

    @pytest.mark.parametrize("broken", ["port/x", "[", "nonsense+"])
    def test_where_the_url_is_wrong_itself(self, url: str, broken: str, shown: list[str]) -> None:
        written = f"{broken}{url}" if broken.endswith("+") else url.replace("127.0.0.1:", f"127.0.0.1:{broken}")
        for call in (create_engine, migrate.upgrade, StorageLayer.open):
            with pytest.raises(MemvaultError) as caught:
                call(written)
            shown.append("".join(traceback.format_exception_only(caught.value)))
            shown.append(repr(caught.value.__cause__))
