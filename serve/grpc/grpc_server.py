"""The gRPC server beside the HTTP server, in the same event loop and over the same models."""

from collections.abc import Sequence
from typing import Any

import grpc

from laconic.errors import UsageError
from serve.grpc import grpc_service
from serve.grpc.grpc_access import AccessInterceptor
from serve.grpc.grpc_control import GrpcControl
from serve.grpc.grpc_health import Health
from serve.grpc.grpc_service import InferenceService
from serve.model_repository.repository import Repository
from serve.model_repository.watched_folder import WatchedFolder
from serve.observation.observer import RequestObserver
from serve.requests.memory_budget import MemoryBudget
from serve.security.access import Access
from serve.security.tls import Certificate
from serve.settings.server_settings import Settings

MILLISECONDS = 1000
UNLIMITED = -1


class GrpcServer:
    """Listens on an address. Made on the event loop that it runs in."""

    def __init__(
        self,
        repository: Repository,
        settings: Settings,
        budget: MemoryBudget,
        *,
        access: Access,
        observer: RequestObserver,
        folders: Sequence[WatchedFolder] = (),
        certificate: Certificate | None = None,
    ) -> None:
        """budget, access, observer, folders: those of the HTTP server."""
        self.port = 0
        self._certificate = certificate
        self._service = InferenceService(repository, settings, budget)
        is_watched = access.keys is not None or settings.admin is not None or observer.active
        self._server = grpc.aio.server(
            options=make_options(settings),
            maximum_concurrent_rpcs=settings.max_connections,
            interceptors=[AccessInterceptor(access, observer)] if is_watched else None,
        )
        health = Health(repository, settings, frozenset({grpc_service.NAME}))
        control = GrpcControl(repository, settings, folders)
        self._server.add_generic_rpc_handlers((self._service.handler(control.calls()), health.handler()))

    async def start(self, host: str, port: int) -> None:
        """Listen. port: 0 takes a free one. Raises UsageError where it cannot be bound."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._certificate is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, make_credentials(self._certificate))
        except RuntimeError:
            raise UsageError(
                f"cannot listen on {address} for gRPC. Choose another --grpc-port, or stop what uses it"
            ) from None
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Take no further calls, and wait for those under way. grace: seconds, after which they are cut."""
        self._service.close()
        await self._server.stop(grace)


def make_credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Make credentials for TLS with the certificate as it is at each handshake."""
    served = certificate.pem

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        if served is certificate.pem:
            return None
        served = certificate.pem
        return grpc.ssl_server_certificate_configuration([served])

    return grpc.dynamic_ssl_server_credentials(grpc.ssl_server_certificate_configuration([served]), fetch)


def make_options(settings: Settings) -> list[tuple[str, Any]]:
    """Make gRPC's options of the limits in the settings."""
    return [
        ("grpc.max_receive_message_length", settings.max_body),
        ("grpc.max_send_message_length", UNLIMITED),
        ("grpc.max_metadata_size", settings.max_headers),
        ("grpc.max_connection_idle_ms", int(settings.keep_alive * MILLISECONDS)),
        ("grpc.so_reuseport", int(settings.fronts > 1)),
    ]
