"""A search for a goal: a network that reads digits, or a classifier of docstrings, with a drop of at most one point.

python benchmarks/search.py digits --budget 4m
python benchmarks/search.py text --budget 30m
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from classifier import classifier
from digit_images import GIVEN, SEEN, read_digits, trained
from safetensors.torch import save_file

from compress.search.search import search
from laconic.cache import Cache
from laconic.recipes.recipe import Recipe
from laconic.timing.measurements import ORIGINAL
from laconic.units import parse_budget


def digits(folder: Path, salt: int = 0) -> dict[str, Any]:
    """A network that was trained on digits, and three sets of them: it has seen the first, nothing but the verdict sees
    the last. salt: chooses which they are."""
    images, labels = read_digits(salt)
    weights = folder / "digits.safetensors"
    parts = {"train": slice(SEEN), "calibrate": slice(SEEN, SEEN + GIVEN), "evaluate": slice(SEEN + GIVEN, None)}
    if not weights.exists():
        save_file(trained(images[:SEEN], labels[:SEEN]).state_dict(), weights)
        for name, part in parts.items():
            np.savez(folder / f"{name}.npz", image=images[part], label=labels[part])
    return {
        "source": str(weights),
        "builder": "digit_images:build",
        "task": "image-classification",
        "data": {name: str(folder / f"{name}.npz") for name in parts},
    }


MODELS = {"digits": digits, "text": classifier}
TARGETS = {"digits": 3.0, "text": 5.0}
"""Times as fast as the original in FP32, eager, that are asked for."""


def main() -> None:
    """Search, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--budget", default="15m")
    parser.add_argument("--drop", default="1%")
    parser.add_argument("--executor", default="local")
    parser.add_argument("--folder", type=Path, default=Path("search-benchmark"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe.parse({**MODELS[given.model](given.folder), "goal": {"max_drop": given.drop}})
    cache = Cache(given.folder / "cache")
    made = search(
        recipe,
        given.folder / f"{given.model}.laconic",
        budget=parse_budget(given.budget),
        executor=given.executor,
        cache=cache,
    )
    verdict = made.artifact.manifest.verdict
    assert verdict is not None
    (drift,) = verdict.drift
    speedups = {time.batch: time.speedup for time in made.artifact.measured.timings if time.engine != ORIGINAL}
    summary = {
        "missed": made.missed,
        "seconds": [round(made.spent, 1), round(made.overrun, 1)],
        "samples": drift.samples,
        "metric": [drift.figures["metric_original"], drift.figures["metric"]],
        "change": [drift.figures["metric_change"], *drift.intervals["metric_change"]],
        "speedup": {batch: round(value, 2) for batch, value in speedups.items()},
        "asked": TARGETS[given.model],
        "MB": [made.artifact.measured.original_size / 1e6, made.artifact.size / 1e6],
        "history": [record.stage for record in made.artifact.manifest.history],
    }
    print(json.dumps(summary, indent=1))
    for trial in made.artifact.measured.search:
        mark = "front" if trial.front else "built" if trial.measured else ""
        drop = "" if trial.drop is None else f"{100 * trial.drop:+.2f}"
        print(f"{trial.name:48} {drop:>6} {trial.speedup:6.2f} x {trial.size / 1e6:6.2f} MB {mark:6} {trial.reason}")


if __name__ == "__main__":
    main()
