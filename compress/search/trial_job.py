"""What a trial is run with: its job, and the source and the samples that all trials share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from laconic.hashing import hash_of
from laconic.recipes.splits import SampleSplits

if TYPE_CHECKING:
    from laconic.models.source import Source


@dataclass(frozen=True)
class TrialJob:
    """A trial to run in a worker. recipe: of the candidate, as JSON. cache: the cache's folder. threads: of torch."""

    recipe: str
    trust: bool
    cache: str
    threads: int


@dataclass(frozen=True)
class SearchContext:
    """The source and the samples, which all candidates of a search share."""

    source: "Source"
    samples: SampleSplits

    @property
    def key(self) -> str:
        """A digest of the source, the task and all samples."""
        parts = (self.samples.train, self.samples.calibrate, self.samples.choose, self.samples.judge)
        return hash_of(self.source.key, self.source.task.name, [part.fingerprint for part in parts])
