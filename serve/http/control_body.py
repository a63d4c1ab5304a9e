"""The bodies of control routes: small JSON, or nothing."""

from typing import Any

from fastapi import Request

from laconic.errors import InputError
from serve.asgi.body import parse, read_body
from serve.asgi.wire import ClientGone
from serve.requests.memory_budget import MemoryBudget, Reservation

MAX_BODY = 1 << 16
"""Bytes."""


async def read_control_body(request: Request) -> Any:
    """What the JSON in the body holds; an empty object where there is no body. Raises InputError."""
    budget = MemoryBudget(2 * MAX_BODY)
    try:
        body = await read_body(dict(request.scope["headers"]), request.receive, MAX_BODY, Reservation(budget))
    except ClientGone:
        raise InputError("the client left") from None
    return parse(body) if body else {}
