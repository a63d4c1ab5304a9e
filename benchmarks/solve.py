"""A search for a goal: a network that reads digits, or a classifier of docstrings, with a drop of at most one point.

python benchmarks/solve.py digits --budget 15m
python benchmarks/solve.py text --source tuned --data docstrings.jsonl --budget 30m
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from digits import GIVEN, SEEN, trained
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from compress.solve.solver import solve
from laconic.cache import Cache
from laconic.measured import ORIGINAL
from laconic.recipe import Recipe
from laconic.units import parse_budget

TARGETS = {"digits": 3.0, "text": 5.0}
"""Times as fast as the original in FP32, eager, that are asked for."""


def digits(folder: Path) -> dict[str, Any]:
    """A network that was trained on digits, and three sets of them: it has seen the first, nothing but the verdict sees
    the last."""
    found = load_digits()
    images = np.kron(found.images, np.ones((1, 2, 2)))[:, None].astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], found.target.astype(np.int64)[order]
    weights = folder / "digits.safetensors"
    parts = {"train": slice(SEEN), "calibrate": slice(SEEN, SEEN + GIVEN), "evaluate": slice(SEEN + GIVEN, None)}
    if not weights.exists():
        save_file(trained(images[:SEEN], labels[:SEEN]).state_dict(), weights)
        for name, part in parts.items():
            np.savez(folder / f"{name}.npz", image=images[part], label=labels[part])
    return {
        "source": str(weights),
        "builder": "digits:build",
        "task": "image-classification",
        "data": {name: str(folder / f"{name}.npz") for name in parts},
    }


def main() -> None:
    """Search, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(TARGETS))
    parser.add_argument("--source", help="for text: a checkpoint that was fine-tuned, or a folder of transformers")
    parser.add_argument("--data", help="for text: rows with a text and a label")
    parser.add_argument("--train", help="for text: rows to heal with; without it, a part of --data")
    parser.add_argument("--length", type=int, default=64, help="for text: tokens to heal with")
    parser.add_argument("--budget", default="15m")
    parser.add_argument("--drop", default="1%")
    parser.add_argument("--engine", default="local")
    parser.add_argument("--folder", type=Path, default=Path("solve-benchmark"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.model == "digits":
        content = digits(given.folder)
    else:
        files = {"calibrate": given.data, "train": given.train}
        content = {
            "source": given.source,
            "data": {name: path for name, path in files.items() if path},
            "heal": {"length": given.length},
        }
    recipe = Recipe.parse({**content, "goal": {"max_drop": given.drop}})
    cache = Cache(given.folder / "cache")
    made = solve(
        recipe,
        given.folder / f"{given.model}.laconic",
        budget=parse_budget(given.budget),
        engine=given.engine,
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
