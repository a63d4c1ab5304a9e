"""The file of a draft model, as an engine that writes opens it."""

from dataclasses import dataclass
from pathlib import Path

from laconic.runtimes.runtime import Compute


@dataclass(frozen=True)
class DraftFile:
    """The file of a draft model, a decoder with a cache. compute: the arithmetic that it runs in. beats_paged: whether
    texts that are written alone come faster with it than from paged attention."""

    model: Path
    compute: Compute
    beats_paged: bool
