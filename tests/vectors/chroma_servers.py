"""Where do the tests get Chroma servers from? Real ones from chromadb's wheel, and a relay to stand before one."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

STARTING_S = 60.0
PORTS = 5
"""How many ports are tried."""

_RUN = """\
import os, sys, threading
def watch():
    while os.read(0, 4096):
        pass
    os._exit(0)
threading.Thread(target=watch, daemon=True).start()
import chromadb_rust_bindings
chromadb_rust_bindings.cli(["chroma", "run", *sys.argv[1:]])
"""
"""What the command `chroma run` does, without the seconds that importing chromadb takes; for as long as standard input
is open: the end of whoever started it is the server's end, too."""


class ChromaServer:
    """One running server. It keeps its port when it is stopped and started again."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="memvault-chroma-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._names = itertools.count()
        self.port = 0
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """What `StorageLayer.open` calls it."""
        return f"chroma+{self.base_url}"

    @property
    def api(self) -> str:
        return f"{self.base_url}/api/v2"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        log = self._folder / "log"
        for _ in range(PORTS):
            begins = log.stat().st_size if log.exists() else 0
            port = self.port or free_port()
            arguments = ["--path", str(self._folder / "data"), "--host", "127.0.0.1", "--port", str(port)]
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _RUN, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                )
            if self._answers(port):
                self.port = port
                return
            said = log.read_text(errors="replace")[begins:]
            self.stop()
            if "is not available" not in said:  # else somebody took the port before the server did
                break
            time.sleep(0.2)
        raise RuntimeError(f"the Chroma server does not start: {said}")

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + STARTING_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}/api/v2/heartbeat", verify=False, trust_env=False).is_success
            time.sleep(0.01)
        return False

    def stop(self) -> None:
        """Kill the server: its clients' connections break. `start` brings it back, with its data."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait(timeout=30)
            self._process.stdin.close()
            self._process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The server takes connections, by its kernel, and says nothing."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)  # nothing happens where it was stopped meanwhile

    def forget(self) -> None:
        """Lose all data, as where a container had no volume: to be called between `stop` and `start`."""
        shutil.rmtree(self._folder / "data")

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_database(self, tenant: str = "default_tenant") -> str:
        """A database that nobody else uses; its name."""
        name = f"tests_{next(self._names)}"
        self.post(f"/tenants/{tenant}/databases", {"name": name})
        return name

    def new_url(self) -> str:
        """The URL of a database that nobody else uses."""
        return f"{self.url}?database={self.new_database()}"

    def post(self, path: str, body: object) -> None:
        httpx.post(f"{self.api}{path}", json=body, verify=False, trust_env=False).raise_for_status()


@dataclass(frozen=True)
class Request:
    """One request as the relay was sent it."""

    method: str
    path: str
    headers: dict[str, str]
    size: int


class Relay:
    """Stands between a client and a server, with TLS where it is given a context, and notes what it is sent.

    ``answer``: what it does instead of passing a request on, as long as that returns something: send these bytes, and
    hang up.
    """

    def __init__(self, server: ChromaServer, context: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.answer: Callable[[Request], bytes | None] = lambda _request: None
        self.client = httpx.Client(base_url=server.base_url, timeout=60, verify=False, trust_env=False)
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, len(body))
                relay.requests.append(request)
                answered = relay.answer(request)
                if answered is None:
                    answered = self.forwarded(body)
                else:
                    self.close_connection = True
                self.wfile.write(answered)

            def forwarded(self, body: bytes) -> bytes:
                try:
                    answer = relay.client.request(
                        self.command, self.path, content=body, headers={"Content-Type": "application/json"}
                    )
                except httpx.TransportError:
                    self.close_connection = True
                    return b""
                kind = answer.headers.get("Content-Type", "text/plain")
                return http_answer(answer.status_code, answer.content, kind, last=False)

            def log_message(self, *_: object) -> None:
                pass

            do_GET = do_POST = do_DELETE = pass_on  # noqa: N815

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.url = f"chroma+{scheme}://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self.client.close()


def http_answer(status: int, body: bytes, kind: str = "application/json", *, last: bool = True) -> bytes:
    """``last``: nothing follows on this connection."""
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *(["Connection: close"] if last else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
