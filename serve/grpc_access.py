"""Keys of calls over gRPC, in their metadata: `authorization: Bearer KEY` or `x-api-key: KEY`."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from laconic.errors import LaconicError
from serve.grpc_call import Call, Context, fail
from serve.guard import Guard

HEALTH = (
    "/grpc.health.v1.Health/",
    *(f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")),
)
"""What orchestrators ask without a key."""


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a known key, and those of a key whose rate is used up."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Call]], details: Any) -> Call:
        """The handler of a call. details: `grpc.HandlerCallDetails`."""
        if not details.method.startswith(HEALTH):
            metadata = {name.encode(): to_bytes(value) for name, value in details.invocation_metadata}
            try:
                self.guard.identify(metadata)
            except LaconicError as error:
                return refuse(error)
        return await continuation(details)


def to_bytes(value: str | bytes) -> bytes:
    """The value of a key in metadata, which is text unless the key's name says otherwise."""
    return value.encode() if isinstance(value, str) else value


def refuse(error: LaconicError) -> Call:
    """A call of any kind that fails."""

    async def answer(_: object, context: Context) -> None:
        await fail(context, error)

    return grpc.stream_stream_rpc_method_handler(answer)
