"""What every request has to pass before any work is done for it: host, origin, key and rate."""

import re

from laconic.errors import LaconicError
from serve.asgi.wire import CLOSE, CONNECTION, Answer, Headers, Message, Scope, Send, to_answer
from serve.openai.openai_shape import to_openai_answer
from serve.security.access import Access, WrongSide
from serve.security.keys import Unauthorized
from serve.security.origin import Hosts, Origins, answer_preflight, check_host_count, describe_access

HEALTH = re.compile(r"/v2/health/\w+|/v2/models/[^/]+(?:/versions/[^/]+)?/ready")
"""Routes that orchestrators ask by address and without a key."""
ADMIN = re.compile(
    r"/metrics|/v2/models/stats|/v2/models/[^/]+(?:/versions/[^/]+)?/(?:config|stats|trace/setting)"
    r"|/v2/(?:repository|trace|logging|systemsharedmemory|cudasharedmemory)(?:/.*)?"
)
"""Routes of operators."""
OPENAI = re.compile(r"/v1/(?:embeddings|completions|chat/completions|models(?:/[^/]+)?)")
"""Routes of which the errors have OpenAI's shape."""
CHALLENGE = b'Bearer realm="laconic"'
PAGE_CHALLENGE = b'Basic realm="laconic: any user name, and a key as the password", charset="UTF-8"'
"""What makes a browser ask its user for a key."""


class Guard:
    """Admits HTTP requests or refuses them. Raises UsageError for settings that do not fit."""

    def __init__(self, access: Access) -> None:
        self.access = access
        settings = access.settings
        self._hosts = Hosts(settings.allowed_hosts) if settings.allowed_hosts else None
        self._origins = Origins(settings.cors_origins)

    def _passes(self, scope: Scope, headers: Headers) -> bool:
        """Return whether nothing can be wrong: no header is repeated, no key is needed, no browser sent the request,
        and its host is that of the last one."""
        return (
            b"host" in headers
            and len(headers) == len(scope["headers"])
            and self.access.keys is None
            and self.access.settings.admin is None
            and b"origin" not in headers
            and b"sec-fetch-site" not in headers
            and (self._hosts is None or self._hosts.is_last(headers[b"host"]))
        )

    def admit(self, scope: Scope, headers: Headers, send: Send) -> tuple[Send, Answer | None]:
        """Admit a request or refuse it; return where the answer is to be sent, and the refusal, if it is one."""
        if self._passes(scope, headers):
            return send, None
        try:
            check_host_count(scope["http_version"], scope["headers"])
        except LaconicError as error:
            return send, self._refuse(error, scope, headers)
        origin = headers.get(b"origin")
        if origin is not None and self._origins.allows(origin):
            send = AddHeaders(send, describe_access(origin))
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                return send, answer_preflight(headers)
        try:
            connection = scope.get(CONNECTION)
            if self.access.settings.admin is not None:
                check_side(scope["path"], admin=connection is not None and connection.admin)
            if connection is not None and connection.local:
                return send, None
            if self._hosts is not None:
                self._hosts.check(headers.get(b"host", b""))
            self._origins.check(scope["method"], headers)
            self.access.identify(headers)
        except LaconicError as error:
            if HEALTH.fullmatch(scope["path"]):
                return send, None
            return send, self._refuse(error, scope, headers)
        return send, None

    def _refuse(self, error: LaconicError, scope: Scope, headers: Headers) -> Answer:
        """Count a refusal, and put it in the shape of the route's API."""
        self.access.refused[error.status] += 1
        refusal = to_openai_answer(error) if OPENAI.fullmatch(scope["path"]) else to_answer(error)
        if isinstance(error, Unauthorized):
            refusal.headers.append((b"www-authenticate", PAGE_CHALLENGE if scope["path"] == "/" else CHALLENGE))
        if b"expect" in headers:
            refusal.headers.append(CLOSE)
        return refusal


def check_side(path: str, *, admin: bool) -> None:
    """Raise WrongSide for a route of operators where others ask, and the other way round."""
    if (ADMIN.fullmatch(path) is not None) == admin:
        return
    where = "at the address of the setting admin" if not admin else "at the address that clients use"
    raise WrongSide(f"{path} is answered {where}, and not here")


class AddHeaders:
    """Sends an answer with further headers."""

    __slots__ = ("_headers", "_send")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *self._headers]}
        await self._send(message)
