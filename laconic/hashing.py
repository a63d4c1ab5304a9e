"""Digests of values, of files and of Laconic's own code; and sealed JSON files, which contain their own digest."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from laconic.errors import CorruptArtifact
from laconic.files import read_json


def hash_of(*parts: Any) -> str:
    """Hex digest (SHA-256, first 32 digits) of JSON-ready values; the same values give the same digest."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def code_version() -> str:
    """Digest of Laconic's own sources, part of cache keys: results of other code are never taken from the cache."""
    home = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in ("laconic", "compress", "export"):
        for path in sorted((home / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


class FileDigest(BaseModel):
    """SHA-256 and size in bytes of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str
    size: int


def digest_file(path: Path) -> FileDigest:
    """Compute the digest of a file on disk."""
    with path.open("rb") as file:
        return FileDigest(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)


def check_digest(path: Path, expected: FileDigest) -> None:
    """Raise CorruptArtifact unless the file exists and has the expected digest."""
    if not path.is_file():
        raise CorruptArtifact(f"{path} is missing. Copy the artifact again, or compress the model again")
    found = digest_file(path)
    if found != expected:
        raise CorruptArtifact(
            f"{path} differs from the file that was written: {found.size} bytes with sha256 {found.sha256[:12]}..., "
            f"expected {expected.size} bytes with {expected.sha256[:12]}.... Copy the artifact again, or compress again"
        )


def seal(content: Mapping[str, Any]) -> bytes:
    """Serialize to JSON that contains the digest of its other keys, so that a single flipped byte is detected."""
    body = json.dumps(content, sort_keys=True, ensure_ascii=False)
    sealed = {"sha256": hashlib.sha256(body.encode()).hexdigest(), **content}
    return (json.dumps(sealed, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def unseal(path: Path) -> dict[str, Any]:
    """Read the content of a sealed file. Raises CorruptArtifact if it was changed after it was written."""
    try:
        content = read_json(path)
        expected = content.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptArtifact(
            f"{path} cannot be read ({type(error).__name__}: {error}). Copy the artifact again"
        ) from None
    body = json.dumps(content, sort_keys=True, ensure_ascii=False)
    if hashlib.sha256(body.encode()).hexdigest() != expected:
        raise CorruptArtifact(f"{path} was changed after it was written. Copy the artifact again, or compress again")
    return dict(content)
