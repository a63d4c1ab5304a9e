"""Who may call what over gRPC. Keys are in the metadata: `authorization: Bearer KEY` or `x-api-key: KEY`."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from laconic.errors import LaconicError
from serve.grpc.grpc_call import Call, Context, fail
from serve.observation.observer import RequestObserver
from serve.observation.tracing import end_trace
from serve.security.access import Access, WrongSide

HEALTH = (
    "/grpc.health.v1.Health/",
    *(f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")),
)
"""What orchestrators ask without a key."""
ADMIN = re.compile(
    r"/inference\.GRPCInferenceService/"
    r"(Repository\w+|ModelConfig|ModelStatistics|TraceSetting|LogSettings|\w+SharedMemory\w+)"
)
"""The calls of operators."""


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a known key, those of a key whose rate is used up, and those of operators where these have
    an address of their own, which speaks HTTP. Has the others followed."""

    def __init__(self, access: Access, observer: RequestObserver) -> None:
        self.access = access
        self.observer = observer

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Call]], details: Any) -> Call:
        """Choose the handler of a call. details: `grpc.HandlerCallDetails`."""
        if not details.method.startswith(HEALTH):
            metadata = {name.encode(): to_bytes(value) for name, value in details.invocation_metadata}
            if self.observer.active:
                self.observer.follow_call(details.method, metadata)
            try:
                if self.access.settings.admin is not None and ADMIN.fullmatch(details.method):
                    raise WrongSide("this call is for operators, who have an address of their own for HTTP")
                self.access.identify(metadata)
            except LaconicError as error:
                self.access.refused[error.status] += 1
                with end_trace():
                    return refuse(error)
        return await continuation(details)


def to_bytes(value: str | bytes) -> bytes:
    """Return the value of a key in metadata, which is text unless the key's name says otherwise."""
    return value.encode() if isinstance(value, str) else value


def refuse(error: LaconicError) -> Call:
    """Make a call of any kind that fails."""

    async def answer(_: object, context: Context) -> None:
        await fail(context, error)

    return grpc.stream_stream_rpc_method_handler(answer)
