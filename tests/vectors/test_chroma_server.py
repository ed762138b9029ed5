"""Does the Chroma server index ask none but its server, tell no secret, and outlive the server's faults?"""

from __future__ import annotations

import base64
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from chromadb.api.shared_system_client import SharedSystemClient

from memvault import ConfigurationError, StorageLayer
from memvault.errors import IndexMismatchError, VectorIndexError
from memvault.filters import MAX_LISTED, F
from memvault.vectors.base import VectorRecord
from memvault.vectors.chroma_collection import WRITE_BYTES
from memvault.vectors.chroma_server import ChromaServerIndex
from tests.support import HashingEmbedder, unavailable
from tests.vectors.chroma_servers import ChromaServer, Relay, Request, free_port, http_answer
from tests.vectors.worlds import SPEC, ChromaServerWorld, direction, make_record, make_records

PAYLOAD_LIMIT = 40 << 20
"""Of a server's as it comes; `test_batches_are_of_records_and_of_bytes` sees it refuse more."""

CALLS: dict[str, Callable[[ChromaServerIndex], object]] = {
    "open": lambda index: index.open(SPEC),
    "upsert": lambda index: index.upsert(make_records(3)),
    "delete": lambda index: index.delete(["mem_1"]),
    "query": lambda index: index.query("user_alice", direction(), 5),
    "scan": lambda index: list(index.scan()),
    "count": lambda index: index.count(),
    "count of a user": lambda index: index.count("user_alice"),
    "purge": lambda index: index.purge(),
}
"""All that asks the server."""

Open = Callable[..., ChromaServerIndex]


@pytest.fixture
def own_server() -> Iterator[ChromaServer]:
    """A server that the test may stop."""
    server = ChromaServer()
    yield server
    server.close()


@pytest.fixture
def relay(chroma_server: ChromaServer) -> Iterator[Relay]:
    relay = Relay(chroma_server)
    yield relay
    relay.close()


@pytest.fixture
def world(chroma_server: ChromaServer) -> Iterator[ChromaServerWorld]:
    world = ChromaServerWorld(chroma_server.new_url())
    yield world
    world.close()


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens an index, creating it where it is missing; all are closed at the end."""
    with ExitStack() as closing:

        def open_it(url: str, spec: Any = SPEC, **options: Any) -> ChromaServerIndex:
            index = ChromaServerIndex(url, **options)
            closing.callback(index.close)
            if not index.open(spec):
                index.create()
            return index

        yield open_it


@contextmanager
def failing(*words: str) -> Iterator[pytest.ExceptionInfo[VectorIndexError]]:
    """The block raises a VectorIndexError, chained, that says these words."""
    with pytest.raises(VectorIndexError) as caught:
        yield caught
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert caught.value.__cause__ is not None


def create_collection(server: ChromaServer, database: str, space: str, metadata: dict[str, Any] | None = None) -> None:
    server.post(
        f"/tenants/default_tenant/databases/{database}/collections",
        {
            "name": f"memvault_{SPEC.vault_id}",
            "metadata": metadata,
            "configuration": {"hnsw": {"space": space}},
        },
    )


# What the URL says.


@pytest.mark.parametrize(
    ("url", "options", "location"),
    [
        ("chroma+http://chroma", {}, "chroma+http://chroma:8000"),
        ("chroma+https://chroma", {}, "chroma+https://chroma:443"),
        ("chroma+http://Chroma.Example:9000/", {}, "chroma+http://chroma.example:9000"),
        ("CHROMA+HTTP://[::1]:8000", {}, "chroma+http://[::1]:8000"),
        ("chroma+https://h/behind/a-proxy/", {}, "chroma+https://h:443/behind/a-proxy"),
        ("chroma+http://user:s3cret@h?timeout=3&header.X-Chroma-Token=s3cret", {}, "chroma+http://h:8000"),
        ("chroma+http://h?tenant=default_tenant&database=default_database", {}, "chroma+http://h:8000"),
        ("chroma+http://h?database=d&tenant=t", {}, "chroma+http://h:8000?tenant=t&database=d"),
        ("chroma+http://h", {"tenant": "t", "database": "a b"}, "chroma+http://h:8000?tenant=t&database=a%20b"),
        ("chroma+http://h", {"headers": {"X-Chroma-Token": "s3cret"}, "timeout": 1}, "chroma+http://h:8000"),
        ("chroma+https://h?verify=false", {}, "chroma+https://h:443"),
    ],
)
def test_location_is_the_url_without_what_is_secret_or_may_change(
    url: str, options: dict[str, Any], location: str
) -> None:
    index = ChromaServerIndex(url, **options)
    assert index.location == location
    assert ChromaServerIndex(location).location == location
    assert "s3cret" not in f"{index!r} {index._address!r}"


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("http://u:s3cret@h", {}, "begins with chroma"),
        ("chroma+http://", {}, "no host"),
        ("chroma+http://:8000", {}, "no host"),
        ("chroma+http://u:s3cret@", {}, "no host"),
        ("chroma+http://h_o st", {}, "odd host"),
        ("chroma+http://[::1", {}, "brackets"),
        ("chroma+http://h:port", {}, "port"),
        ("chroma+http://h:0", {}, "port"),
        ("chroma+http://h:65536", {}, "port"),
        ("chroma+http://h:-1", {}, "port"),
        ("chroma+http://u:s3cret/half@h", {}, "port"),
        ("chroma+http://s3cret@h", {}, "user:password"),
        ("chroma+http://:s3cret@h", {}, "user:password"),
        ("chroma+http://h/a/../b", {}, "path"),
        ("chroma+http://h/a%2Fb", {}, "path"),
        ("chroma+http://h#s3cret", {}, "fragment"),
        ("chroma+http://h?token=s3cret", {}, "option that there is not"),
        ("chroma+http://h?s3cret", {}, "option that there is not"),
        ("chroma+http://h?tenant=a&tenant=b", {}, "twice"),
        ("chroma+http://h?tenant=a", {"tenant": "b"}, "twice"),
        ("chroma+http://h?tenant=", {}, "tenant"),
        ("chroma+http://h?database=a%2Fb", {}, "database"),
        ("chroma+http://h?database=..", {}, "database"),
        ("chroma+http://h?timeout=soon", {}, "timeout"),
        ("chroma+http://h?timeout=0", {}, "timeout"),
        ("chroma+http://h?timeout=nan", {}, "timeout"),
        ("chroma+http://h", {"timeout": True}, "timeout"),
        ("chroma+http://h?verify=false", {}, "chroma+https"),
        ("chroma+https://h?verify=/absent.pem", {}, "/absent.pem"),
        ("chroma+https://h", {"verify": 3}, "verify"),
        ("chroma+http://h?header.=s3cret", {}, "name"),
        ("chroma+http://h?header.A%20B=s3cret", {}, "name"),
        ("chroma+http://h?header.X=s3cret%0d%0aY:%20z", {}, "header X"),
        ("chroma+http://h?header.X=s3cret%C3%A9", {}, "header X"),
        ("chroma+http://h?header.Host=s3cret", {}, "header Host"),
        ("chroma+http://u:s3cret@h?header.authorization=s3cret", {}, "twice"),
        ("chroma+http://h?header.X=s3cret", {"headers": {"x": "s3cret"}}, "twice"),
        ("chroma+http://h", {"headers": {"X": 3}}, "header X"),
        (None, {}, "str"),
    ],
)
def test_odd_urls_are_refused_and_show_no_secret(url: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ChromaServerIndex(url, **options)
    assert says in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None or "s3cret" not in str(caught.value.__cause__)
    assert caught.value.__context__ is caught.value.__cause__


def test_headers_arrive_with_every_request(relay: Relay, opened: Open) -> None:
    index = opened(
        relay.url.replace("127", "u%40x:p%3Aw+%C3%A9@127") + "?header.X-Chroma-Token=a+b%26c",
        headers={"X-Other": "yes"},
    )
    index.upsert(make_records(3))
    index.purge()
    basic = "Basic " + base64.b64encode("u@x:p:w+é".encode()).decode()
    assert len(relay.requests) >= 5
    for request in relay.requests:
        assert request.headers["authorization"] == basic
        assert request.headers["x-chroma-token"] == "a+b&c"
        assert request.headers["x-other"] == "yes"


def test_nothing_but_the_url_directs_it(
    world: ChromaServerWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Open
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    (tmp_path / ".env").write_text("MIGRATIONS=never\nCHROMA_SERVER_HOST=nowhere.invalid\n")
    monkeypatch.chdir(tmp_path)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, nowhere)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHROMA_SERVER_HOST", "nowhere.invalid")
    monkeypatch.setenv("CHROMA_SERVER_HTTP_PORT", "no number")
    monkeypatch.setenv("CHROMA_SERVER_SSL_ENABLED", "true")
    monkeypatch.setenv("CHROMA_CLIENT_AUTH_PROVIDER", "none.such")
    world.put(make_records(5))
    assert opened(world.url).count() == 5


# TLS.


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate that signs itself, for 127.0.0.1, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        unavailable("certificates are made by openssl: apt-get install openssl")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=memvault tests",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key", "-out", folder / "certificate",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    both = folder / "both.pem"
    both.write_text((folder / "key").read_text() + (folder / "certificate").read_text())
    return both


@pytest.fixture
def tls_relay(chroma_server: ChromaServer, certificate: Path) -> Iterator[Relay]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    relay = Relay(chroma_server, context)
    yield relay
    relay.close()


def test_a_certificate_is_verified(tls_relay: Relay, certificate: Path, chroma_server: ChromaServer) -> None:
    database = chroma_server.new_database()
    url = f"{tls_relay.url}?database={database}"
    index = ChromaServerIndex(url, headers={"X-Chroma-Token": "s3cret"})
    with failing("could not be opened", "certificate verify failed"):
        index.open(SPEC)
    index.close()
    assert tls_relay.requests == []  # nothing was told, the token least of all
    for verify in (certificate, str(certificate), False):
        trusting = ChromaServerIndex(url, verify=verify)
        assert not trusting.open(SPEC)
        assert trusting.location == index.location == f"{tls_relay.url}?database={database}"
        trusting.close()
    said = ChromaServerIndex(f"{url}&verify={certificate}")
    assert not said.open(SPEC)
    said.create()
    said.upsert(make_records(3))
    assert said.count() == 3
    said.close()


# What is apart.


def test_databases_and_tenants_are_apart(chroma_server: ChromaServer, opened: Open) -> None:
    chroma_server.post("/tenants", {"name": "tests_tenant"})
    database = chroma_server.new_database()
    chroma_server.post("/tenants/tests_tenant/databases", {"name": database})
    here = opened(chroma_server.url, database=database)
    there = opened(f"{chroma_server.url}?tenant=tests_tenant&database={database}")
    here.upsert(make_records(3))
    assert [here.count(), there.count()] == [3, 0]
    there.purge()
    assert here.count() == 3


def test_a_database_or_tenant_that_is_missing_is_named(chroma_server: ChromaServer) -> None:
    for options, missing in (
        ({"database": "absent"}, "no database 'absent' in tenant 'default_tenant'"),
        ({"tenant": "nobody"}, "no tenant 'nobody'"),
    ):
        index = ChromaServerIndex(chroma_server.url, **options)  # type: ignore[arg-type]
        with failing(missing, "create_database", chroma_server.url):
            index.open(SPEC)
        with pytest.raises(VectorIndexError, match="not created"):
            index.count()
        index.close()


def test_two_vaults_on_one_server_never_meet(chroma_server: ChromaServer, opened: Open) -> None:
    url = chroma_server.new_url()
    one = opened(url, replace(SPEC, vault_id="000000000001"))
    other = opened(url, replace(SPEC, vault_id="000000000002"))
    one.upsert(make_records(20))
    other.upsert(make_records(5, seed=2))
    one.delete(["mem_0"])
    assert [one.count(), other.count()] == [19, 5]
    assert [one.count("user_alice"), other.count("user_alice")] == [19, 5]
    assert len(one.query("user_alice", direction(), 100)) == 19
    assert {record.id for some in other.scan() for record in some} == {f"mem_{place}" for place in range(5)}
    one.purge()
    assert other.count() == 5
    assert not one.open(replace(SPEC, vault_id="000000000001"))
    assert other.open(replace(SPEC, vault_id="000000000002"))


@pytest.mark.parametrize(
    ("space", "metadata", "message"),
    [
        ("l2", vars(SPEC), "space 'l2'; expected space 'cosine'"),
        ("cosine", {**vars(SPEC), "vault_id": "other"}, "vault_id 'other'"),
        ("l2", None, "vault_id None"),
    ],
)
def test_another_collection_of_that_name_is_refused(
    chroma_server: ChromaServer, space: str, metadata: dict[str, Any] | None, message: str
) -> None:
    database = chroma_server.new_database()
    create_collection(chroma_server, database, space, metadata)
    index = ChromaServerIndex(chroma_server.url, database=database)
    for _ in range(2):
        with pytest.raises(IndexMismatchError) as caught:
            index.open(SPEC)
        assert message in str(caught.value)
        assert index.location in str(caught.value)
    index.purge()
    index.create()
    assert index.count() == 0
    index.close()


def test_indexes_of_one_process_do_not_disturb_each_other(relay: Relay, chroma_server: ChromaServer) -> None:
    systems = dict(SharedSystemClient._identifier_to_system)
    threads = threading.active_count()
    sockets = len(psutil.Process().net_connections())
    url = f"{relay.url}?database={chroma_server.new_database()}"
    one = ChromaServerIndex(url, headers={"X-Chroma-Token": "one"}, timeout=50)
    other = ChromaServerIndex(url, headers={"X-Chroma-Token": "other"}, timeout=40)
    assert not one.open(SPEC)
    assert not other.open(SPEC)
    one.create()
    other.create()  # made meanwhile by the first
    one.upsert(make_records(4))
    assert other.count() == 4
    assert relay.requests[-1].headers["x-chroma-token"] == "other"
    other.close()
    assert one.count() == 4
    assert relay.requests[-1].headers["x-chroma-token"] == "one"
    assert other.open(SPEC)
    one.close()
    assert other.count() == 4
    assert relay.requests[-1].headers["x-chroma-token"] == "other"
    other.close()
    assert systems == SharedSystemClient._identifier_to_system
    relay.close()
    assert threading.active_count() < threads  # the relay's own is gone, too
    assert len(psutil.Process().net_connections()) < sockets


def test_closing_while_others_ask_is_an_index_error_at_worst(world: ChromaServerWorld) -> None:
    world.put(make_records(20))
    index = world.fresh()
    index.open(SPEC)
    scan = index.scan(batch=5)
    assert len(next(scan)) == 5
    asked = threading.Barrier(5)

    def ask() -> str:
        for turn in range(10_000):
            try:
                index.count()
            except VectorIndexError as exc:
                return str(exc)
            if turn == 0:
                asked.wait()
        return "never closed"

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask) for _ in range(4)]
        asked.wait()
        index.close()
        assert all(index.location in answer.result() for answer in answers)
    with failing(index.location):
        next(scan)


# A server that fails.


def filled(url: str, **options: Any) -> ChromaServerIndex:
    """A new index with three records."""
    index = ChromaServerIndex(url, **options)
    assert not index.open(SPEC)
    index.create()
    index.upsert(make_records(3))
    return index


NONSENSE = {
    "a page": http_answer(200, b"<html>Welcome to nginx</html>", "text/html"),
    "no content": http_answer(200, b"", "text/plain"),
    "half of it": http_answer(200, b'{"ids": [', "application/json"),
    "less than promised": http_answer(200, b'{"ids": []}' + b" " * 50)[:-40],
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "moved": http_answer(301, b"", "text/plain"),
    "401": http_answer(401, b'{"detail": "who?"}'),
    "403 of Chroma's": http_answer(403, b'{"error": "AuthError", "message": "no"}'),
    "404 of another": http_answer(404, b"404 page not found", "text/plain"),
    "413": http_answer(413, b"Payload too large", "text/plain"),
    "500": http_answer(500, b"s3cret " * 10_000, "text/plain"),
    "500 of Chroma's": http_answer(500, b'{"error": "InternalError", "message": "disk full"}'),
    "500 of an unknown kind": http_answer(500, b'{"error": "New", "message": "kind"}'),
    "502": http_answer(502, b"\xff\xfe", "text/html"),
}


@pytest.mark.parametrize("answer", list(NONSENSE))
def test_nonsense_is_an_index_error(relay: Relay, chroma_server: ChromaServer, answer: str) -> None:
    url = f"{relay.url}?database={chroma_server.new_database()}"
    index = filled(url, headers={"X-Chroma-Token": "s3cret"})
    for call in CALLS.values():
        relay.answer = lambda _request: NONSENSE[answer]
        with failing(index.location) as caught:
            call(index)
        relay.answer = lambda _request: None
        assert "s3cret" not in str(caught.value)
        assert len(str(caught.value)) < 800
        if answer[:3] in ("401", "403"):
            assert "header.X-Chroma-Token" in str(caught.value)
        assert index.open(SPEC)
    assert index.count() == 3
    index.close()


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b"7", b'"text"'])
def test_json_of_another_service_is_an_index_error(relay: Relay, chroma_server: ChromaServer, body: bytes) -> None:
    index = filled(f"{relay.url}?database={chroma_server.new_database()}")
    relay.answer = lambda _request: http_answer(200, body)
    for name in ("query", "scan", "count of a user", "open"):
        with failing(index.location):
            CALLS[name](index)
    index.close()


def test_a_server_that_hangs_or_is_down_is_an_index_error(own_server: ChromaServer) -> None:
    filled(own_server.url).close()
    indexes = {name: ChromaServerIndex(own_server.url, timeout=2) for name in CALLS}
    for index in indexes.values():
        assert index.open(SPEC)

    def asked(name: str) -> BaseException | None:
        with failing(own_server.url) as caught:
            CALLS[name](indexes[name])
        return caught.value.__cause__

    with own_server.frozen():
        with ThreadPoolExecutor(len(CALLS)) as pool:
            for cause in pool.map(asked, CALLS):
                assert isinstance(cause, httpx.TimeoutException)
        own_server.stop()  # or it would do afterwards what it was asked
    for index in indexes.values():
        with failing(own_server.url) as caught:
            index.open(SPEC)
        assert isinstance(caught.value.__cause__, httpx.NetworkError)
    own_server.start()
    for index in indexes.values():
        assert index.open(SPEC)
        assert index.count() == 3
    own_server.stop()
    for name in CALLS:
        assert isinstance(asked(name), httpx.NetworkError)
    for index in indexes.values():
        index.close()


def test_a_server_killed_in_the_middle_of_a_request(own_server: ChromaServer) -> None:
    relay = Relay(own_server)
    index = filled(relay.url)

    def kill(_request: Request) -> None:
        own_server.stop()

    for name in ("upsert", "query"):
        relay.answer = kill
        with failing("could not"):
            CALLS[name](index)
        relay.answer = lambda _request: None
        own_server.start()
        assert index.count() == 3
    index.close()
    relay.close()

    index = ChromaServerIndex(own_server.url)
    assert index.open(SPEC)
    with ThreadPoolExecutor(1) as pool, own_server.frozen():
        asked = pool.submit(index.count)
        own_server.stop()
        with failing("could not"):
            asked.result()
    index.close()


def test_a_server_that_comes_back_is_used_again(own_server: ChromaServer) -> None:
    index = filled(own_server.url)
    for _ in range(2):
        own_server.stop()
        own_server.start()
        assert index.count() == 3
        index.upsert(make_records(3))
        assert len(index.query("user_alice", direction(), 10)) == 3
    index.close()


def test_a_collection_that_is_gone_is_said_so(own_server: ChromaServer) -> None:
    index = filled(own_server.url)
    own_server.stop()
    own_server.forget()
    own_server.start()
    for name, call in CALLS.items():
        if name not in ("open", "purge"):
            with failing("gone", "It is made anew"):
                call(index)
    assert not index.open(SPEC)
    index.purge()
    index.create()
    index.upsert(make_records(2))
    assert index.count() == 2
    index.close()


# Sizes.


def test_the_longest_text_goes_through(relay: Relay, chroma_server: ChromaServer, opened: Open) -> None:
    index = opened(f"{relay.url}?database={chroma_server.new_database()}")
    longest = "\x01" * (1 << 20)  # JSON makes six characters of each
    index.upsert([make_record("mem_1", direction(), document=longest)])
    assert relay.requests[-1].size > 6 << 20
    assert index.count() == 1


def test_batches_are_of_records_and_of_bytes(relay: Relay, chroma_server: ChromaServer, opened: Open) -> None:
    index = opened(f"{relay.url}?database={chroma_server.new_database()}")

    def written(records: list[VectorRecord]) -> list[int]:
        """The sizes of the requests."""
        relay.requests.clear()
        index.upsert(records)
        return [request.size for request in relay.requests]

    relay.answer = lambda _request: http_answer(200, b"{}")
    assert len(written(make_records(2001))) == 2
    mebibyte = [replace(record, document="\x01" * (1 << 20)) for record in make_records(12)]
    sizes = written(mebibyte)
    assert len(sizes) == 3
    assert max(sizes) < PAYLOAD_LIMIT
    assert len(written([replace(record, document="x" * (WRITE_BYTES + 1)) for record in make_records(3)])) == 3
    assert written([]) == []
    refused = httpx.post(
        f"{chroma_server.api}/tenants", content=b" " * (PAYLOAD_LIMIT + 1), verify=False, trust_env=False
    )
    assert refused.status_code == 413


def test_a_filter_may_list_thousands(world: ChromaServerWorld) -> None:
    world.put([replace(record, metadata=replace(record.metadata, session_id="sess_7")) for record in make_records(30)])
    for many in (1000, MAX_LISTED):
        sessions = [f"sess_{place}" for place in range(many)]
        assert len(world.check("user_alice", direction(), 50, F.session_id.in_(sessions))) == 30
        assert world.check("user_alice", direction(), 50, ~F.session_id.in_(sessions)) == []


# A vault on it.


def open_vault(path: Path, vectors: str | None, **options: Any) -> StorageLayer:
    return StorageLayer.open(f"sqlite:///{path}", vectors=vectors, embedder=HashingEmbedder(), exact_limit=0, **options)


def test_a_vault_outlives_its_server(own_server: ChromaServer, vault_path: Path) -> None:
    with open_vault(vault_path, own_server.url) as storage:
        alice = storage.for_user("user_alice")
        alice.chunks.add("cats sleep all day")
        assert storage.health()["debts"] == 0
        [hit] = alice.search("cats", mode="vector", k=1)
        assert hit.explain()["tier"] == "index"

        own_server.stop()
        dog = alice.chunks.add("dogs bark at night")
        alice.chunks.delete(alice.chunks.add("soon gone").id)
        assert storage.health()["debts"] == 2
        assert "could not" in storage.health()["last_error"]
        [hit] = alice.search("dogs bark", mode="vector", k=1)
        assert hit.chunk.id == dog.id
        assert storage.sync().owed == 2

        own_server.start()
        assert storage.sync().owed == 0
        assert storage.health()["last_error"] is None
        assert len(alice.search("dogs", mode="vector", k=10)) == 2
        [hit] = alice.search("dogs bark", mode="vector", k=1)
        assert hit.explain()["tier"] == "index"
        assert storage.erase_user("user_alice").owed == 0

    own_server.stop()
    with open_vault(vault_path, None) as storage:  # remembered, and down
        bob = storage.for_user("user_bob")
        bob.chunks.add("cats again")
        assert [hit.chunk.content for hit in bob.search("cats")] == ["cats again"]
        assert storage.health()["debts"] == 1
        own_server.start()
        assert storage.sync().owed == 0


def test_a_server_that_lost_everything_is_filled_from_sql(own_server: ChromaServer, vault_path: Path) -> None:
    with open_vault(vault_path, own_server.url) as storage:
        storage.for_user("user_alice").chunks.add("cats sleep all day")
    own_server.stop()
    own_server.forget()
    own_server.start()
    with open_vault(vault_path, None) as storage:
        alice = storage.for_user("user_alice")
        assert storage.health()["debts"] == 1
        assert storage.sync().paid == 1
        [hit] = alice.search("cats", mode="vector", k=1)
        assert hit.explain()["tier"] == "index"


def test_what_a_vault_remembers_is_no_secret(relay: Relay, vault_path: Path, chroma_server: ChromaServer) -> None:
    database = chroma_server.new_database()

    def let_in(request: Request) -> bytes | None:
        wanted = request.headers.get("x-chroma-token") in ("s3cret", "renewed")
        return None if wanted else http_answer(401, b"Unauthorized", "text/plain")

    relay.answer = let_in
    url = f"{relay.url}?database={database}"
    for token in ("s3cret", "renewed"):
        with open_vault(vault_path, f"{url}&header.X-Chroma-Token={token}") as storage:
            storage.for_user("user_alice").chunks.add(f"cats and {token[:3]}")
            assert storage.health()["debts"] == 0
    assert b"s3cret" not in vault_path.read_bytes()
    with open_vault(vault_path, None) as storage:
        storage.for_user("user_alice").chunks.add("dogs")
        health = storage.health()
        assert health["debts"] == 1
        assert "401" in health["last_error"]
        assert "header.X-Chroma-Token" in health["last_error"]
    with pytest.raises(IndexMismatchError):
        open_vault(vault_path, f"{relay.url}?database=another")
    with open_vault(vault_path, f"{url}&header.X-Chroma-Token=renewed") as storage:
        assert storage.sync().owed == 0


def test_nothing_is_founded_on_an_odd_url(tmp_path: Path) -> None:
    path = tmp_path / "memvault.db"
    for url in (
        "chroma+http://",
        "chroma+ftp://h?a=s3cret",
        "Chroma+http://u:s3cret@h?tokn=s3cret",
        "chroma+http:/s3cret",
    ):
        with pytest.raises(ConfigurationError) as caught:
            open_vault(path, url)
        assert "s3cret" not in str(caught.value)
    with open_vault(path, "exact") as storage:
        assert storage.stats()
