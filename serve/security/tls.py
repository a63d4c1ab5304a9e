"""TLS, with a certificate that is read again when its files change."""

import logging
import ssl
from pathlib import Path

from laconic.errors import UsageError
from serve.settings.server_settings import Settings

Pem = tuple[bytes, bytes]
"""A private key and a certificate chain."""

log = logging.getLogger("laconic.serve")


class Certificate:
    """A certificate chain and its private key. context: what the server listens with, for as long as it runs. pem: the
    content of the files.

    Raises UsageError for files that do not read or do not belong together.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self.chain = chain
        self.key = key
        self._stamp = self._read_stamp()
        self.pem, self._current = self._load()
        self.context = self._current
        self.context.sni_callback = self._choose

    def refresh(self) -> None:
        """Load the files again if they changed. Connections that are open keep theirs; so do all where it fails."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.pem, self._current = self._load()
        except UsageError as error:  # the one file may be there before the other
            log.warning("the certificate stays as it was: %s", error)

    def _load(self) -> tuple[Pem, ssl.SSLContext]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.chain, self.key, password="")  # without one, OpenSSL asks at the terminal
            pem = self.key.read_bytes(), self.chain.read_bytes()
        except OSError as error:  # those of OpenSSL are of this kind, too
            raise UsageError(
                f"{self.chain} and {self.key} are not a certificate in PEM with its key, not encrypted: {error}"
            ) from None
        return pem, context

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current

    def _read_stamp(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in (self.chain, self.key):
            try:
                status = path.stat()
            except OSError:
                stamps.append((0, 0, 0))
            else:
                stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return stamps


def load_certificate(settings: Settings) -> Certificate | None:
    """Load the certificate of the settings, or None where there is none. Raises UsageError."""
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise UsageError("TLS takes a certificate and its key. Give both --tls-cert and --tls-key, or neither")
    return Certificate(settings.tls_cert, settings.tls_key)
