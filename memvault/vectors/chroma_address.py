"""What does a chroma+http URL say of a Chroma server, and which part of it is remembered?"""

from __future__ import annotations

import base64
import math
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from memvault.errors import ConfigurationError
from memvault.text import shown

DEFAULT_TENANT = "default_tenant"
DEFAULT_DATABASE = "default_database"

DEFAULT_TIMEOUT = 10.0
"""Seconds for the answer to one request. A full batch of 2,000 records takes a server about one."""

_PORTS = {"chroma+http": 8000, "chroma+https": 443}
"""Chroma's own; what stands in front of it where there is TLS, which it does not speak itself."""

_FORM = (
    "chroma+http(s)://[user:password@]host[:port][/path]"
    "[?tenant=…&database=…&timeout=seconds&verify=ca.pem&header.X-Chroma-Token=…]"
)
_OPTIONS = ("tenant", "database", "timeout", "verify")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_OWN_HEADERS = {"connection", "content-length", "content-type", "host", "transfer-encoding"}
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_PATH = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*")


@dataclass(frozen=True)
class ChromaAddress:
    """A server and what is said to it; ``verify``: a file of certificates to trust, or whether to verify at all."""

    scheme: str
    base_url: str
    tenant: str
    database: str
    timeout: float
    verify: bool | str
    headers: Mapping[str, str] = field(repr=False)

    @property
    def location(self) -> str:
        """The URL without what is secret or may change: headers, password, timeout, certificates."""
        kept = {"tenant": (self.tenant, DEFAULT_TENANT), "database": (self.database, DEFAULT_DATABASE)}
        query = urlencode({name: value for name, (value, default) in kept.items() if value != default}, quote_via=quote)
        return f"chroma+{self.base_url}{'?' if query else ''}{query}"


def parse_address(url: str, options: Mapping[str, Any], headers: Mapping[str, str] | None) -> ChromaAddress:
    """``options`` and ``headers`` are those given beside the URL; what is given in both is refused.

    Raises ConfigurationError, which quotes nothing that may be a secret.
    """
    parts, port = _split(url)
    given, found = _query(parts)
    for name, value in options.items():
        if value is not None and name in given:
            raise ConfigurationError(f"the Chroma server's {name} is given twice, in the URL and as an argument")
    merged = {**given, **{name: value for name, value in options.items() if value is not None}}
    scheme = parts.scheme.removeprefix("chroma+")
    host = (parts.hostname or "").lower()
    return ChromaAddress(
        scheme=scheme,
        base_url=f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{parts.path.rstrip('/')}",
        tenant=_name(merged, "tenant", DEFAULT_TENANT),
        database=_name(merged, "database", DEFAULT_DATABASE),
        timeout=_timeout(merged.get("timeout", DEFAULT_TIMEOUT)),
        verify=_verify(merged.get("verify"), scheme),
        headers=_headers([*_basic(parts), *found, *(headers or {}).items()]),
    )


def _split(url: object) -> tuple[SplitResult, int]:
    if not isinstance(url, str):
        raise ConfigurationError(f"a Chroma server's URL is a str, {_FORM}; got {type(url).__name__}")
    broken = False
    try:
        parts = urlsplit(url)
        port = parts.port  # raises
    except ValueError:
        broken = True
    if broken:  # not chained: urllib's message quotes what may be half a password
        raise ConfigurationError(
            "a Chroma server's URL has a port that is no number up to 65535, or brackets that do not match; "
            f"expected {_FORM}, with any of :/?#[]@% in a password written as %3A and so on"
        )
    if parts.scheme not in _PORTS:
        raise ConfigurationError(f"a Chroma server's URL begins with chroma+http:// or chroma+https://; write {_FORM}")
    host = parts.netloc.rpartition("@")[2]
    if parts.port is not None or host.endswith(":"):
        host = host.rpartition(":")[0]
    if not _HOST.fullmatch(host):
        raise ConfigurationError(f"a Chroma server's URL names {'an odd' if host else 'no'} host; expected {_FORM}")
    if port == 0:
        raise ConfigurationError(f"a Chroma server's URL has port 0; expected {_FORM}")
    if parts.fragment or url.endswith("#") or not _PATH.fullmatch(parts.path.rstrip("/")):
        raise ConfigurationError(f"a Chroma server's URL has an odd path, or a fragment; expected {_FORM}")
    return parts, port or _PORTS[parts.scheme]


def _query(parts: SplitResult) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The options, and the headers."""
    options: dict[str, str] = {}
    headers: list[tuple[str, str]] = []
    # A plus is a plus, as tokens have them, and no blank, as forms do.
    for name, value in parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True):
        if name.startswith("header."):
            headers.append((name.removeprefix("header."), value))
        elif name not in _OPTIONS:
            # The name is not shown: of "?token" or "?s3cret" it would be the secret.
            raise ConfigurationError(
                f"a Chroma server's URL has an option that there is not; there are {', '.join(_OPTIONS)} and "
                "header.<name>, such as header.X-Chroma-Token"
            )
        elif name in options:
            raise ConfigurationError(f"a Chroma server's URL has the option {name} twice")
        else:
            options[name] = value
    return options, headers


def _basic(parts: SplitResult) -> list[tuple[str, str]]:
    if "@" not in parts.netloc:
        return []
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    if not user or not colon:
        raise ConfigurationError(
            "a Chroma server's URL has something before the @ that is not user:password; a token is given as "
            "?header.X-Chroma-Token=… or ?header.Authorization=Bearer%20…"
        )
    both = f"{unquote(user)}:{unquote(password)}"
    return [("Authorization", f"Basic {base64.b64encode(both.encode()).decode('ascii')}")]


def _headers(pairs: list[tuple[str, str]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in pairs:
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigurationError("a header for the Chroma server has a name that HTTP does not allow")
        if name.lower() in _OWN_HEADERS:
            raise ConfigurationError(f"the header {name} cannot be given: it is said by the HTTP client")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigurationError(
                f"the header {name} for the Chroma server must be printable ASCII without blanks around it; "
                "its value is not shown"
            )
        if name.lower() in (other.lower() for other in headers):
            raise ConfigurationError(f"the header {name} for the Chroma server is given twice")
        headers[name] = value
    return headers


def _name(options: Mapping[str, Any], option: str, default: str) -> str:
    name = options.get(option, default)
    # It becomes a part of a path.
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or "/" in name or name in (".", ".."):
        raise ConfigurationError(f"the Chroma server's {option} must be a name without a slash, got {shown(name)}")
    return name


def _timeout(value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"the Chroma server's timeout must be a number of seconds above 0, got {shown(value)}")
    return seconds


def _verify(value: object, scheme: str) -> bool | str:
    if value is None:
        return True
    if scheme != "https":
        raise ConfigurationError("verify is about certificates, which only chroma+https:// has")
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, str | PathLike):
        raise ConfigurationError(f"verify must be true, false or a file of certificates, got {shown(value)}")
    path = str(fspath(value))
    try:
        ssl.create_default_context(cafile=path)
    except OSError as exc:
        raise ConfigurationError(f"verify names no file of certificates (PEM) that can be read: {path!r}") from exc
    return path
