"""Sockets that the server listens on."""

import socket
import stat
from pathlib import Path

from laconic.errors import UsageError
from serve.settings.server_settings import MAX_PORT

BACKLOG = 2048
OPTION = "--admin"
UNIX = "unix:"
"""What stands before the path of a unix socket."""


def bind(host: str, port: int, option: str = "--port", *, shared: bool = False) -> socket.socket:
    """Bind a socket before any model is loaded, so that a port in use is reported at once. Raises UsageError.

    shared: with other processes of this user, of which the system gives each a share of the connections.
    """
    if not 0 <= port <= MAX_PORT:
        raise UsageError(f"there is no port {port}. Choose one from 1 to {MAX_PORT}, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"this machine has no address {host!r} ({error.strerror}). Try --host 0.0.0.0") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise make_address_error(host, port, error, option) from None
    return listener


def listen(listener: socket.socket, host: str, port: int) -> None:
    """Listen on the bound socket. Raises UsageError where another process was faster."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise make_address_error(host, port, error) from None


def make_address_error(host: str, port: int, error: OSError, option: str = "--port") -> UsageError:
    """Make the error for an address that cannot be bound."""
    return UsageError(
        f"cannot listen on {host} port {port}: {error.strerror}. Choose another {option}, or stop what uses it"
    )


def open_admin(address: str) -> socket.socket:
    """Listen at an address: `unix:PATH`, `HOST:PORT`, or a port of this machine alone. Raises UsageError."""
    if address.startswith(UNIX):
        return open_unix(Path(address.removeprefix(UNIX)))
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal():
        raise UsageError(f"{address!r} is no address for --admin. Give a port, HOST:PORT or unix:PATH")
    listener = bind(host, int(port), option=OPTION)
    listen(listener, host, int(port))
    return listener


def open_unix(path: Path) -> socket.socket:
    """Listen on a unix socket that this user alone can connect to. Raises UsageError.

    A socket that an earlier server left behind is replaced, one that somebody listens on is not.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not is_answered(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)  # before anybody can connect
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {path}: {error.strerror or error}. Choose another path for --admin"
        ) from None
    return listener


def is_answered(path: Path) -> bool:
    """Return whether a process listens on a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def close_admin(listener: socket.socket, address: str) -> None:
    """Close a listener, and remove the file of a unix socket."""
    listener.close()
    if address.startswith(UNIX):
        Path(address.removeprefix(UNIX)).unlink(missing_ok=True)


def format_address(listener: socket.socket) -> str:
    """Format the address at which a listener is reached."""
    address = listener.getsockname()
    return f"{UNIX}{address}" if isinstance(address, str) else f"{address[0]}:{address[1]}"
