"""Engines and timing caches on disk: each file begins with its digest and what it was made for.

A file that was cut off, changed, or made for something else is removed with a warning, and made again.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.cache import Cache

log = logging.getLogger("laconic.tensorrt")

FOLDER = "tensorrt"
ENGINE, TIMING = ".engine", ".timing"


class EngineStore:
    """The folder `tensorrt` of a cache."""

    def __init__(self, cache: Cache) -> None:
        self.folder = cache.folder / FOLDER

    def read(self, name: str, made_for: Mapping[str, Any]) -> bytes | None:
        """Read what was stored under a name; None if there is nothing, or nothing that can be used.

        made_for: what it must have been stored for, ready for JSON.
        """
        try:
            content = (self.folder / name).read_bytes()
        except OSError:
            return None
        head, _, payload = content.partition(b"\n")
        if head == make_head(payload, made_for):
            return payload
        self.drop(name, "it was cut off, changed, or made for another model or GPU")
        return None

    def write(self, name: str, payload: bytes, made_for: Mapping[str, Any]) -> None:
        """Store bytes under a name; a reader never sees a part of them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f"{name}.{os.getpid()}.partial"
        try:
            temporary.write_bytes(make_head(payload, made_for) + b"\n" + payload)
            temporary.replace(self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)

    def drop(self, name: str, reason: str) -> None:
        """Remove what is stored under a name, with a warning."""
        path: Path = self.folder / name
        log.warning("%s cannot be used (%s); it is made again", path, reason)
        path.unlink(missing_ok=True)


def make_head(payload: bytes, made_for: Mapping[str, Any]) -> bytes:
    """Make the first line of a stored file."""
    head = {"sha256": hashlib.sha256(payload).hexdigest(), "made_for": made_for}
    return json.dumps(head, sort_keys=True).encode()
