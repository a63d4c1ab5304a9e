"""One step of a model's history, and the key that addresses its result."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """What was done, with which settings, and what it changed.

    key: hash of the parent's key, the stage, its config, the code's version, the data and the weights. figures: what
    was counted after the step. structure: what `rebuild` needs to do the same to an empty module, and whatever else
    later steps must know of this one, JSON-ready. Seconds are not in here: they differ from run to run, and live with
    what was timed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    config: dict[str, Any]
    key: str
    figures: dict[str, float] = {}
    structure: dict[str, Any] = {}


def hash_of(*parts: Any) -> str:
    """Hex digest (SHA-256, first 32 digits) of JSON-ready values; the same values give the same digest."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def code_version() -> str:
    """Digest of Laconic's own sources: a result of other code is never taken from the cache."""
    home = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for room in ("laconic", "compress", "export"):
        for path in sorted((home / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
