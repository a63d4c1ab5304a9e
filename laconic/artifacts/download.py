"""Artifacts at addresses of object stores and web servers, downloaded once into the cache.

A copy is kept under the digest of its manifest, which holds the digests of the other files: what has been downloaded is
the same wherever it came from, and is verified again whenever it is opened.
"""

import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from laconic.artifacts.artifact_files import REPORT_BYTES, check_digest
from laconic.artifacts.artifact_signature import SIGNATURE, check_signature, make_hint, read_statement
from laconic.artifacts.manifest import FILE_NAME, MANIFEST, MEASURED, REPORT, read_manifest, read_measurements
from laconic.cache import Cache
from laconic.errors import (
    ArtifactError,
    CorruptArtifact,
    LaconicError,
    MissingPackage,
    UnsignedArtifact,
    UsageError,
    describe_error,
)
from laconic.files import MAX_BYTES
from laconic.hashing import digest_file, hash_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

ADDRESS = re.compile(r"(s3|gs|https?|hf)://[^\s?#]+")
"""Schemes that artifacts are downloaded by; an address is that of a folder, so it has no query."""
UNENCRYPTED = "http://"
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""What opens each kind of address beside fsspec, where the extra `remote` does not bring it."""
STAMPS = ("ETag", "etag", "blob_id", "LastModified", "created")
"""What file systems call the value that changes with a file."""
TRIES = 3
PAUSE = 0.5
"""Seconds before the second try."""
T = TypeVar("T")


def fetch_artifact(
    address: str,
    *,
    sha256: str | None,
    timeout: float,
    signer: "EllipticCurvePublicKey | None" = None,
    cache: Cache | None = None,
) -> Path:
    """Return the folder of a downloaded artifact; what is in the cache is not downloaded again.

    sha256: of its manifest; with it an artifact in the cache needs no network. timeout: seconds without a byte, tries
    included. signer: whose signature it must have; the copy is then one for this key. Raises UsageError for what is no
    address, ArtifactError for what cannot be downloaded, CorruptArtifact for files that are not those of the manifest,
    UnsignedArtifact, MissingPackage.
    """
    if not ADDRESS.fullmatch(address):
        raise UsageError(
            f"{address} is no address of an artifact: expected s3://, gs://, https:// or hf:// and the path of its "
            f"folder, without a query"
        )
    if address.startswith(UNENCRYPTED) and sha256 is None:
        raise UsageError(f"{address} is not encrypted: give the digest of its manifest with --sha256, or use https://")
    cache = cache or Cache()
    remote = RemoteFolder(address.rstrip("/"), timeout)
    try:
        digest = sha256 or remote.find_digest(cache)
        key = f"artifact-{digest}" if signer is None else f"artifact-{digest}-{make_hint(signer)[:16]}"
        with cache.lock(key):
            return cache.directory(key, lambda folder: remote.fill(folder, digest, signer))
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(f"{address} cannot be kept in {cache.folder}: {reason}. Set LACONIC_CACHE") from None


class RemoteFolder:
    """An artifact at an address. timeout: seconds without a byte after which it is given up."""

    def __init__(self, address: str, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        self._manifest: bytes | None = None
        self._filesystem: Any = None

    def find_digest(self, cache: Cache) -> str:
        """Find the digest of the manifest: downloaded unless the store says that it is the one of the last time."""
        info = self._attempt(lambda: self._open().info(f"{self.address}/{MANIFEST}"), MANIFEST)
        stamp = find_stamp(info)
        key = f"address-{hash_of(self.address, stamp)}"
        return str(cache.json(key, self._digest_manifest, again=stamp is None))

    def list_files(self) -> dict[str, tuple[str, int]]:
        """List the files below the address by their names relative to it, each with what changes with it, and its size.
        Raises ArtifactError where the store cannot be reached."""

        def find() -> dict[str, Any]:
            filesystem = self._open()
            filesystem.invalidate_cache()
            with suppress(FileNotFoundError):
                return dict(filesystem.find(self.address, detail=True))
            return {}

        prefix = f"{self.address.partition('://')[2]}/"
        return {
            name.lstrip("/").removeprefix(prefix): (find_stamp(info) or "", int(info.get("size") or 0))
            for name, info in self._attempt(find, "").items()
        }

    def fill(self, folder: Path, sha256: str, signer: "EllipticCurvePublicKey | None") -> None:
        """Download the artifact into a folder. sha256: of its manifest, which says what else there is. signer: whose
        signature it must have."""
        if self._manifest is None:
            self._download(folder, MANIFEST, MAX_BYTES)
        else:
            (folder / MANIFEST).write_bytes(self._manifest)
        if (digest := digest_file(folder / MANIFEST).sha256) != sha256:
            raise CorruptArtifact(f"{self.address} is another artifact: the sha256 of its manifest is {digest}")
        signed: set[str] = set()
        if signer is not None:
            self._download(folder, SIGNATURE, MAX_BYTES)
            signed |= read_statement(folder / SIGNATURE, signer)[0].keys()
        self._download(folder, MEASURED, MAX_BYTES)
        if read_measurements(folder).report is not None:
            self._download(folder, REPORT, REPORT_BYTES)
        for name, expected in read_manifest(folder).files.items():
            self._download(folder, name, expected.size)
            check_digest(folder / name, expected)
        for name in signed:
            if FILE_NAME.fullmatch(name) and not (folder / name).exists():
                self._download(folder, name, REPORT_BYTES)
        if signer is not None:
            check_signature(folder, signer)

    def _digest_manifest(self) -> str:
        with tempfile.TemporaryDirectory(prefix="laconic-") as name:
            self._download(Path(name), MANIFEST, MAX_BYTES)
            self._manifest = (Path(name) / MANIFEST).read_bytes()
            return digest_file(Path(name) / MANIFEST).sha256

    def _download(self, folder: Path, name: str, most: int) -> None:
        """Download a file. Raises CorruptArtifact for one of more than so many bytes."""
        path = folder / name

        def size() -> int:
            with suppress(FileNotFoundError):
                if (held := path.stat().st_size) > most:
                    raise CorruptArtifact(f"{self.address}/{name} has more than the {most:,} bytes that it should have")
                return held
            return 0

        self._attempt(lambda: self._open().get_file(f"{self.address}/{name}", str(path)), name, size)
        size()

    def _attempt(self, call: Callable[[], T], name: str, progress: Callable[[], int] = lambda: 0) -> T:
        """Return what a call returns, tried several times. Raises ArtifactError."""
        reason = ""
        for attempt in range(TRIES):
            try:
                return run_watched(call, progress, self.timeout / TRIES)
            except (LaconicError, KeyboardInterrupt):
                raise
            except PermissionError as error:
                raise ArtifactError(f"{self.address}/{name} may not be read: {describe_error(error)}") from None
            except TimeoutError:
                reason = f"no byte came within {self.timeout / TRIES:g} s"
                continue
            except Exception as error:  # noqa: BLE001 - each file system has exceptions of its own
                if is_missing(error) and name == SIGNATURE:
                    raise UnsignedArtifact(f"{self.address} is not signed: there is no {name}") from None
                if is_missing(error):
                    raise ArtifactError(
                        f"{self.address} is no artifact: there is no {name}. Give the address of the folder that "
                        f"holds manifest.json"
                    ) from None
                reason = describe_error(error.__cause__ or error)
            time.sleep((attempt + 1) * PAUSE)
        raise ArtifactError(f"{self.address}/{name} cannot be downloaded: {reason} ({TRIES} tries)")

    def _open(self) -> Any:
        """Open the file system, once. Raises MissingPackage."""
        if self._filesystem is None:
            import fsspec

            scheme = self.address.partition("://")[0]
            options: dict[str, Any] = {"skip_instance_cache": True}
            if scheme in ("http", "https"):
                import aiohttp

                # By default a download ends after five minutes, however large it is.
                options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None), "trust_env": True}
            try:
                self._filesystem = fsspec.filesystem(scheme, **options)
            except ImportError as error:
                package = PACKAGES.get(scheme, "huggingface_hub")
                raise MissingPackage(f"{scheme}:// needs the package {package}. Try: pip install {package}") from error
        return self._filesystem


def find_stamp(info: Mapping[str, Any]) -> str | None:
    """Return what changes with a file, of what its file system says of it; None where it says nothing of the kind."""
    return next((str(info[name]) for name in STAMPS if info.get(name)), None)


def is_missing(error: Exception) -> bool:
    """Return whether an error says that there is no such file. Over HTTP fsspec raises FileNotFoundError whatever the
    matter is, such as an unknown certificate, with what it was as the cause."""
    cause = error.__cause__
    is_absence = not isinstance(cause, OSError) and getattr(cause, "status", 404) == 404
    return isinstance(error, FileNotFoundError) and is_absence


def run_watched(call: Callable[[], T], progress: Callable[[], int], patience: float) -> T:
    """Run a call in a thread, and return its result. Raises TimeoutError when `progress` stays the same for so many
    seconds: the thread is left to itself then, since file systems have no way to interrupt it."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=work, name="download", daemon=True).start()
    before, since = progress(), time.monotonic()
    while not wait([future], timeout=min(0.1, patience)).done:
        if (now := progress()) != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > patience:
            raise TimeoutError
    return future.result()
