"""Host names and web origins: what a browser may send here on behalf of a page of somebody else.

A page can send requests to any server that its reader's browser reaches, this machine's included. It is stopped by two
checks: the origin of a request must be the server's own or an allowed one, and the host that the browser believes to
talk to must be one of the server's, since a domain can be pointed at this machine (DNS rebinding).
"""

import ipaddress
import re
from collections.abc import Sequence

from laconic.errors import InputError, LaconicError, UsageError
from serve.asgi.wire import Answer, Headers

HOST = re.compile(r"(\*\.)?[\w.-]+|\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*")
ORIGIN = re.compile(r"\*|https?://[^/\s]+")
SAFE = ("GET", "HEAD", "OPTIONS")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names that no page can point at another machine."""
PREFLIGHT_SECONDS = 600
READABLE = b"Inference-Header-Content-Length, Retry-After, X-Request-ID"
"""Headers of answers that a page of an allowed origin may read."""


class Misdirected(LaconicError):
    """The request is for a host that this server is not."""

    status = 421


class CrossOrigin(LaconicError):
    """A web page of another origin sent the request."""

    status = 403


class Hosts:
    """The names that this server goes by, this machine's own included. names: `example.com`, `*.example.com`."""

    def __init__(self, names: Sequence[str]) -> None:
        if wrong := [name for name in names if not HOST.fullmatch(name)]:
            raise UsageError(f"{wrong[0]!r} in allowed_hosts is no host name. Give it without a scheme and a port")
        self._exact = frozenset(name.lower().encode() for name in (*LOOPBACK, *names) if not name.startswith("*"))
        self._last = b""
        self._suffixes = tuple(name[1:].lower().encode() for name in names if name.startswith("*"))

    def is_last(self, host: bytes) -> bool:
        """Return whether this header `Host` is the last one that passed, as almost every one is."""
        return host != b"" and host == self._last

    def check(self, host: bytes) -> None:
        """Raise Misdirected if the header `Host` names another server, or none; it is empty where there is none."""
        name = strip_port(host).lower()
        if name in self._exact or (name and name.endswith(self._suffixes)):
            self._last = host
            return
        raise Misdirected(
            f"this server does not go by the name of {name.decode('latin-1')[:100]!r}. "
            f"If it should, add the name to the setting allowed_hosts"
        )


class Origins:
    """The web origins whose pages may send requests and read the answers. origins: `https://example.com`, or `*`."""

    def __init__(self, origins: Sequence[str]) -> None:
        if wrong := [origin for origin in origins if not ORIGIN.fullmatch(origin)]:
            raise UsageError(f"{wrong[0]!r} in cors_origins is no origin. Give one like https://example.com, or *")
        self._allowed = frozenset(origin.lower().encode() for origin in origins)

    def allows(self, origin: bytes) -> bool:
        """Return whether pages of that origin may read answers."""
        return b"*" in self._allowed or origin.lower() in self._allowed

    def check(self, method: str, headers: Headers) -> None:
        """Raise CrossOrigin for a request that another origin's page sent and that may do something.

        Browsers say themselves where a request is from, newer ones in `Sec-Fetch-Site`. Other clients send neither.
        """
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if (origin is None and site is None) or method in SAFE or site in (b"same-origin", b"none"):
            return
        if origin is not None:
            if site is None and origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower():
                return
            if self.allows(origin):
                return
        raise CrossOrigin(
            f"a web page of {(origin or b'another origin').decode('latin-1')[:100]} sent this request. "
            f"If it may, add its origin to the setting cors_origins"
        )


def check_host_count(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise InputError unless a request has the one header `Host` that RFC 9112 asks for; in HTTP/1.0 it may have none.

    version: of HTTP.
    """
    count = sum(name == b"host" for name, _ in headers)
    if count > 1 or (count == 0 and version != "1.0"):
        raise InputError(f"the request has {count} Host headers, and must have exactly one")


def strip_port(host: bytes) -> bytes:
    """Return the name or address in the header `Host`."""
    return host[: host.find(b"]") + 1] if host.startswith(b"[") else host.partition(b":")[0]


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def describe_access(origin: bytes) -> list[tuple[bytes, bytes]]:
    """Describe the headers that let a page of that origin read the answer."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", READABLE),
        (b"vary", b"Origin"),
    ]


def answer_preflight(headers: Headers) -> Answer:
    """Return the answer to a browser that asks what an allowed origin's page may send: any method and header."""
    return Answer(
        b"",
        204,
        headers=[
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"*")),
            (b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS),
        ],
    )
