"""Calls over gRPC: what each reads within a deadline, and errors as statuses."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from laconic.errors import INTERRUPTS, InputError, LaconicError, NotReady, Overloaded
from serve.observation.tracing import end_trace
from serve.requests.public_errors import to_public_error
from serve.settings.server_settings import Settings

Context = Any
"""`grpc.aio.ServicerContext`, of which gRPC has no types."""
Respond = Callable[[bytes, Context], Awaitable[bytes]]
"""From a request to its response, both serialized."""
Call = Any
"""`grpc.RpcMethodHandler`."""

STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By the HTTP status of an error; what is missing is INTERNAL."""
PUSHBACK = "grpc-retry-pushback-ms"
"""What clients that retry wait for."""
LONGEST_TEXT = 2000
"""Characters of an error's text, which is sent as a header: clients take 8 KiB of headers."""


class RequestTimeout(LaconicError):
    """A request did not arrive in time."""

    status = 408


async def read(context: Context) -> bytes | None:
    """Read the next message of the call; None where the client sends no further one."""
    message = await context.read()
    return None if message is grpc.aio.EOF else message


async def fail(context: Context, error: BaseException) -> None:
    """End the call with the status of the error; it does not return."""
    public = to_public_error(error)
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(public, (Overloaded, NotReady)):
        trailing = ((PUSHBACK, str(1000 * public.retry_after)),)
    await context.abort(STATUS.get(public.status, grpc.StatusCode.INTERNAL), str(public)[:LONGEST_TEXT], trailing)


def call(settings: Settings, respond: Respond) -> Call:
    """Make a call with one message either way.

    gRPC would wait for the message without end. Read as a stream of one, it has `body_timeout` to arrive.
    """

    async def answer(_: object, context: Context) -> bytes | None:
        with end_trace():
            try:
                return await respond(await read_whole(context), context)
            except (*INTERRUPTS, asyncio.CancelledError):
                raise
            except BaseException as error:  # noqa: BLE001 - gRPC would answer UNKNOWN
                await fail(context, error)
                return None

    async def read_whole(context: Context) -> bytes:
        try:
            async with asyncio.timeout(settings.body_timeout):
                body = await read(context)
        except TimeoutError:
            raise RequestTimeout(f"the request did not arrive within {settings.body_timeout:g} s") from None
        if body is None:
            raise InputError("the call has no message")
        return body

    return grpc.stream_unary_rpc_method_handler(answer)
