"""What the steps of one run share."""

from dataclasses import dataclass
from pathlib import Path

from laconic.cache import Cache
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import SampleSplits


@dataclass(frozen=True)
class Job:
    """What all steps of a run share. folder: scratch, removed when the run ends."""

    recipe: Recipe
    samples: SampleSplits
    folder: Path
    steps: Steps
    cache: Cache
