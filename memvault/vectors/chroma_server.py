"""How is a Chroma server, shared with others, a vault's index?"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING

from memvault import forking
from memvault.vectors.base import IndexSpec
from memvault.vectors.chroma_address import parse_address
from memvault.vectors.chroma_backed import ChromaBacked
from memvault.vectors.chroma_collection import ChromaCollection, chroma_errors, name_of, require_chromadb

if TYPE_CHECKING:
    from memvault.vectors.chroma_client import ServerClient


class ChromaServerIndex(ChromaBacked):
    """The collection ``memvault_<vault_id>`` on a Chroma server, where other vaults and services have theirs.

    The URL is ``chroma+http://host:8000`` or ``chroma+https://host:443``; those ports where none is given, a path
    where the server has one. Options follow as a query, or are arguments:

    - ``user:password@`` before the host: Basic authorization. ``?header.X-Chroma-Token=…``, or ``headers``: whatever
      else the server wants to be told. Characters that mean something in a URL are written as %40 and so on.
    - ``tenant``, ``database``: they have to exist; by default Chroma's own ``default_tenant``, ``default_database``.
    - ``timeout``: seconds for the answer to each request, by default 10; for a connection 2 at most.
    - ``verify``: a file of certificates (PEM) to trust instead of the public authorities (or SSL_CERT_FILE's), or
      false to trust anybody.

    Nothing else directs it: neither CHROMA_ variables nor a .env file, nor HTTP_PROXY. `location`, which a vault
    remembers, has neither user, password, headers, timeout nor certificates: where the server wants them, every
    opening of the vault gives the URL again.

    Raises ConfigurationError, which shows no secret.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        tenant: str | None = None,
        database: str | None = None,
        timeout: float | None = None,
        verify: bool | str | PathLike[str] | None = None,
    ) -> None:
        options = {"tenant": tenant, "database": database, "timeout": timeout, "verify": verify}
        self._address = parse_address(url, options, headers)
        self.location = self._address.location
        super().__init__(self.location)
        self._guard = threading.RLock()  # for opening and closing; the session takes any number of threads
        self._client: ServerClient | None = None
        forking.follow(self)

    def open(self, spec: IndexSpec) -> bool:
        require_chromadb()
        with self._guard:
            self._spec = spec
            client = self._connected()
            found = None
            try:
                client.require_database()
                found = ChromaCollection.find(client, spec, self.location, self._failures())
            finally:
                self._collection = found
            return found is not None

    def create(self) -> None:
        with self._guard:
            spec = self._bound()
            if self._collection is None:
                client = self._connected()
                self._collection = ChromaCollection.make(client, spec, self.location, self._failures())

    def purge(self) -> None:
        """Delete the vault's collection. What the server's own files keep of it is up to the server."""
        from chromadb.errors import NotFoundError

        with self._guard:
            name = name_of(self._bound())
            self._collection = None
            with chroma_errors(self.location, "be removed", *self._failures()), suppress(NotFoundError):
                self._connected().delete_collection(name)

    def close(self) -> None:
        with self._guard:
            self._disconnect()
            self._spec = None

    def after_fork_in_child(self) -> None:
        """Forget the connections without closing them: they are the parent's."""
        self._guard = threading.RLock()
        self._inherited, self._client, self._collection = self._client, None, None

    def _connected(self) -> ServerClient:
        from memvault.vectors.chroma_client import ServerClient

        if self._client is None:
            self._client = ServerClient(self._address)
        return self._client

    def _disconnect(self) -> None:
        self._collection = None
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _failures(self) -> tuple[type[Exception], ...]:
        from memvault.vectors.chroma_client import FAILURES

        return FAILURES
