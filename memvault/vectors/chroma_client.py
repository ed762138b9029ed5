"""How is a Chroma server spoken to, in bounded time and to the address that was given alone?

chromadb's own `HttpClient` is not used: its first requests happen in its constructor, before anybody could set a
timeout, and it keeps what it makes in a table of the whole process. What is below it does the talking: its server API,
with a session of ours. Imports chromadb, so it is imported at use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
from chromadb.api.fastapi import FastAPI
from chromadb.api.models.Collection import Collection
from chromadb.config import Settings, System
from chromadb.errors import NotFoundError, error_types

from memvault.errors import VectorIndexError
from memvault.vectors.chroma_address import ChromaAddress
from memvault.vectors.chroma_collection import chroma_errors

if TYPE_CHECKING:
    from chromadb.api.collection_configuration import CreateCollectionConfiguration
    from chromadb.types import Collection as CollectionModel

CONNECT_TIMEOUT = 2.0
"""Seconds to be let in: a server that is there does so in milliseconds."""

KEEPALIVE = 30.0
"""Seconds that an idle connection is kept; what stands between drops it after 60 at the earliest."""

FAILURES: tuple[type[Exception], ...] = (
    httpx.HTTPError,
    RuntimeError,  # httpx: the session was closed by another thread
    ValueError, KeyError, TypeError, AttributeError,  # chromadb: JSON, but not what Chroma answers
)  # fmt: skip
"""What chromadb raises where a server is away, or answers nonsense; beside its own errors."""


class ServerClient:
    """The part of chromadb's client that a collection needs."""

    def __init__(self, address: ChromaAddress) -> None:
        """Makes no request."""
        self._address = address
        # Without validation, which is what reads the environment: CHROMA_ variables and a .env file are the
        # service's, and may be meant for its server.
        settings = Settings.model_construct(
            chroma_api_impl="chromadb.api.fastapi.FastAPI",
            chroma_server_host=address.base_url,
            chroma_server_http_port=0,  # required, and overruled by the URL's
            chroma_server_ssl_enabled=address.scheme == "https",
            chroma_server_ssl_verify=False,  # of the session that is thrown away
            anonymized_telemetry=False,
        )
        self._server = FastAPI(System(settings))
        self._server._session.close()
        self._server._session = httpx.Client(
            headers={**address.headers, "Content-Type": "application/json", "User-Agent": "memvault"},
            timeout=httpx.Timeout(address.timeout, connect=min(CONNECT_TIMEOUT, address.timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=KEEPALIVE),
            verify=_certificates(address),
            trust_env=False,  # memories and tokens go where the URL says, not through what HTTP_PROXY names
            event_hooks={"response": [self._check]},
        )

    def require_database(self) -> None:
        """Raise VectorIndexError where the tenant or the database is not there."""
        tenant, database = self._address.tenant, self._address.database
        with chroma_errors(self._address.location, "be opened", *FAILURES):
            try:
                self._server.get_database(database, tenant)
            except NotFoundError as exc:
                missing = f"database {database!r} in tenant {tenant!r}"
                try:
                    self._server.get_tenant(tenant)
                except NotFoundError:
                    missing = f"tenant {tenant!r}"
                raise VectorIndexError(
                    f"the Chroma server at {self._address.location} has no {missing}; make it with create_tenant and "
                    "create_database of chromadb.AdminClient, or name another (?tenant=…&database=…)"
                ) from exc

    def get_collection(self, name: str, *, embedding_function: None) -> Collection:
        return self._wrap(self._server.get_collection(name, self._address.tenant, self._address.database))

    def create_collection(
        self,
        name: str,
        *,
        configuration: CreateCollectionConfiguration,
        metadata: dict[str, Any],
        embedding_function: None,
    ) -> Collection:
        model = self._server.create_collection(
            name,
            configuration=configuration,
            metadata=metadata,
            tenant=self._address.tenant,
            database=self._address.database,
        )
        return self._wrap(model)

    def delete_collection(self, name: str) -> None:
        self._server.delete_collection(name, self._address.tenant, self._address.database)

    def get_max_batch_size(self) -> int:
        return self._server.get_max_batch_size()

    def close(self) -> None:
        self._server._session.close()

    def _wrap(self, model: CollectionModel) -> Collection:
        return Collection(self._server, model, embedding_function=None)

    def _check(self, response: httpx.Response) -> None:
        """Refuse, as an HTTPStatusError, what chromadb would raise as a bare Exception of the whole text."""
        kind = response.headers.get("Content-Type", "nothing")
        if response.is_success and "json" in kind:
            return
        response.read()
        hint = ""
        if response.status_code in (401, 403):
            hint = (
                "; give the URL with the header that the server wants, chroma+http://user:password@host or "
                "?header.X-Chroma-Token=…"
            )
        elif not response.is_success and _is_of_chroma(response):
            return
        text = " ".join(response.text[:200].split())
        for value in self._address.headers.values():  # a server may repeat what it was told
            text = text.replace(value, "***")
        raise httpx.HTTPStatusError(
            f"the server answered {response.status_code} {response.reason_phrase} ({kind}), {text!r}{hint}",
            request=response.request,
            response=response,
        )


def _is_of_chroma(response: httpx.Response) -> bool:
    try:
        answer = response.json()
    except ValueError:
        return False
    return isinstance(answer, dict) and answer.get("error") in error_types and isinstance(answer.get("message"), str)


def _certificates(address: ChromaAddress) -> Any:
    """An SSLContext: by default with the authorities of SSL_CERT_FILE, or of certifi."""
    import ssl

    if address.scheme != "https":
        return False
    if isinstance(address.verify, str):
        return ssl.create_default_context(cafile=address.verify)
    return httpx.create_ssl_context(verify=address.verify)
