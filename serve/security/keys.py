"""API keys: who asks, and how much of the server each may use, by token buckets."""

import base64
import binascii
import hashlib
import hmac
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

from laconic.errors import LaconicError, Overloaded, UsageError
from serve.asgi.wire import Headers
from serve.settings.server_settings import Settings

ENTRY = re.compile(r"([A-Za-z0-9_.-]{1,64})=([!-~]{16,512})")
ENTRIES = "NAME=KEY entries with keys of 16 characters or more. Make one with: openssl rand -hex 24"
MAX_FILE = 1 << 20


class Unauthorized(LaconicError):
    """The request has no key, or one that this server does not know."""

    status = 401


class RateLimited(Overloaded):
    """The caller has used its rate up. retry_after: whole seconds until the same request is accepted."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TokenBucket:
    """So many tokens a second, of which those of one second can be saved. what: what a token stands for, in messages.

    While one is left, any number can be taken: before the body of a request is read, nobody knows how many it will be.
    The debt has to be paid back before the next.
    """

    def __init__(self, rate: float, what: str) -> None:
        self.rate = rate
        self.what = what
        self.capacity = max(1.0, rate)
        self._tokens = self.capacity
        self._filled = time.monotonic()

    def take(self, count: int, now: float) -> None:
        """Take tokens. now: by `time.monotonic`. Raises RateLimited where none is left."""
        self._tokens = min(self.capacity, self._tokens + (now - self._filled) * self.rate)
        self._filled = now
        if self._tokens < 1:
            seconds = math.ceil((1 - self._tokens) / self.rate)
            raise RateLimited(
                f"this key may use {self.rate:g} {self.what} per second, and has. Try again in {seconds} s", seconds
            )
        self._tokens -= count


class Caller:
    """Who asks, by the name of a key, with what is left of the rates. requests, rows: counted so far."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.requests = 0
        self.rows = 0
        self._requests = TokenBucket(settings.requests_per_second, "requests") if settings.requests_per_second else None
        self._rows = TokenBucket(settings.rows_per_second, "rows") if settings.rows_per_second else None

    def count_request(self) -> None:
        """Count a request. Raises RateLimited."""
        now = time.monotonic()
        if self._rows is not None:
            self._rows.take(0, now)
        if self._requests is not None:
            self._requests.take(1, now)
        self.requests += 1

    def count_rows(self, rows: int) -> None:
        """Count the rows of a request. Raises RateLimited."""
        if self._rows is not None:
            self._rows.take(rows, time.monotonic())
        self.rows += rows


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Who asked what the current task works on."""


def count_request() -> None:
    """Count a request of the current stream for its caller. Raises RateLimited."""
    caller = CALLER.get()
    if caller is not None:
        caller.count_request()


def count_rows(rows: int) -> None:
    """Count the rows of the current request for its caller. Raises RateLimited."""
    caller = CALLER.get()
    if caller is not None:
        caller.count_rows(rows)


def name_caller() -> str:
    """Return the name of whoever sent the current request; empty without keys."""
    caller = CALLER.get()
    return "" if caller is None else caller.name


class Keyring:
    """Callers by their keys. Only digests of the keys are kept. before: keys that are replaced; whoever has the same
    name keeps its counts and what is left of its rates."""

    def __init__(self, keys: Mapping[str, str], settings: Settings, before: "Keyring | None" = None) -> None:
        known = {caller.name: caller for caller in before} if before is not None else {}
        self._callers = [
            (digest(key.encode()), known.get(name) or Caller(name, settings)) for name, key in keys.items()
        ]

    def __iter__(self) -> Iterator[Caller]:
        return (caller for _, caller in self._callers)

    def identify(self, headers: Headers) -> Caller:
        """Find out who asks. headers: of HTTP, or the metadata of gRPC. Raises Unauthorized.

        The key is compared with every one, each in constant time, so that the time tells nothing of them.
        """
        key = read_key(headers)
        if key is None:
            raise Unauthorized(
                "this server takes requests with a key: send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
            )
        digested, owner = digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(digested, known):
                owner = caller
        if owner is None:
            raise Unauthorized("this server does not know the key of the request")
        return owner


def digest(key: bytes) -> bytes:
    """Compute SHA-256, so that keys of all lengths compare alike."""
    return hashlib.sha256(key).digest()


def read_key(headers: Headers) -> bytes | None:
    """Read the key of a request: a bearer token, the header `X-API-Key`, or the password that a browser was given."""
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return headers.get(b"x-api-key")


def load_keys(settings: Settings, before: Keyring | None = None) -> Keyring | None:
    """Load the keys of the settings and of their file, or None where there are none. Raises UsageError."""
    keys = parse_keys(settings.api_keys or "", "the setting api_keys")
    if settings.api_key_file is not None:
        source = str(settings.api_key_file)
        for name, key in parse_keys(read_file(settings.api_key_file), source).items():
            if name in keys:
                raise UsageError(f"{source} and the setting api_keys both have a key {name!r}. Rename one")
            keys[name] = key
    if keys:
        return Keyring(keys, settings, before)
    if settings.requests_per_second or settings.rows_per_second:
        raise UsageError(
            "requests_per_second and rows_per_second are rates of a key, and there are no keys. Give --api-key-file"
        )
    return None


def read_file(path: Path) -> str:
    """Read the content of a file of keys. Raises UsageError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1).decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"the file of keys {path} does not read: {error}") from None
    if not content.strip() or len(content) > MAX_FILE:
        raise UsageError(f"the file of keys {path} is empty or too large. It holds lines of {ENTRIES}")
    return content


def parse_keys(text: str, source: str) -> dict[str, str]:
    """Parse keys by name, from entries in lines or behind one another; what follows a # is a comment. Raises
    UsageError."""
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for entry in line.partition("#")[0].split():
            match = ENTRY.fullmatch(entry)
            if match is None:  # its text stays secret
                raise UsageError(f"{source}, line {number}: expected {ENTRIES}")
            if match[1] in keys:
                raise UsageError(f"{source}, line {number}: there are two keys {match[1]!r}. Rename one")
            keys[match[1]] = match[2]
    return keys
