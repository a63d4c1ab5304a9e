"""The standard health protocol of gRPC, `grpc.health.v1.Health`, which Kubernetes and load balancers ask."""

import asyncio

import grpc

from laconic.errors import INTERRUPTS, UnknownModel
from serve.grpc.grpc_call import Context, call, fail
from serve.grpc.grpc_messages import parse_message, serialize
from serve.grpc.inference_pb2 import HealthCheckRequest, HealthCheckResponse
from serve.model_repository.repository import Repository
from serve.protocol.metadata import check_server, is_ready
from serve.settings.server_settings import Settings

NAME = "grpc.health.v1.Health"
LOOKED = 0.2
"""Seconds between two looks at whether the server is ready."""


class Health:
    """Answers whether the server is ready. services: those that it is asked about by name; "" is the whole server."""

    def __init__(self, repository: Repository, settings: Settings, services: frozenset[str]) -> None:
        self.repository = repository
        self.settings = settings
        self.services = services | {"", NAME}

    def handler(self) -> grpc.GenericRpcHandler:
        """Make the calls, as gRPC's server takes them."""
        calls = {
            "Check": call(self.settings, self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }
        return grpc.method_handlers_generic_handler(NAME, calls)

    async def check(self, body: bytes, _: Context) -> bytes:
        """Return the status now."""
        return self._status(body)

    async def watch(self, body: bytes, context: Context) -> None:
        """Send the status now, and whenever it changes. The call ends when the server stops."""
        try:
            status = self._status(body)
            await context.write(status)
            while self.repository.ready:
                await asyncio.sleep(LOOKED)
                if (now := self._status(body)) != status:
                    status = now
                    await context.write(status)
        except (*INTERRUPTS, asyncio.CancelledError):
            raise
        except BaseException as error:  # noqa: BLE001 - gRPC would answer UNKNOWN
            await fail(context, error)

    def _status(self, body: bytes) -> bytes:
        service = parse_message(HealthCheckRequest, body).service
        if service not in self.services:
            raise UnknownModel(f"no service {service!r} is here, only {', '.join(sorted(filter(None, self.services)))}")
        states = HealthCheckResponse
        status = states.SERVING if is_ready(check_server, self.repository) else states.NOT_SERVING
        return serialize(HealthCheckResponse(status=status))
