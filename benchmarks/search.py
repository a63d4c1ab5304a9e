"""A search for a goal: a network that reads digits, or a classifier of docstrings, with a drop of at most one point.

python benchmarks/search.py digits --budget 4m
python benchmarks/search.py text --budget 30m
"""

from pathlib import Path
from typing import Any

import numpy as np
from classifier import classifier
from digit_images import GIVEN, SEEN, read_digits, trained
from results import Results, make_parser
from safetensors.torch import save_file

from compress.search.search import SearchResult, search
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


def main() -> None:
    """Search, and say what came of it."""
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--budget", default="15m")
    parser.add_argument("--drop", default="1%")
    parser.add_argument("--executor", default="local")
    parser.add_argument("--folder", type=Path, default=Path(".cache/search"))
    given = parser.parse_args()
    results = Results(publish=given.publish)
    given.folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe.parse({**MODELS[given.model](given.folder), "goal": {"max_drop": given.drop}})
    made = search(
        recipe,
        given.folder / f"{given.model}.laconic",
        budget=parse_budget(given.budget),
        executor=given.executor,
        cache=Cache(given.folder / "cache"),
    )
    show_chosen(made, f"{given.model}: chosen", results)
    show_trials(made, f"{given.model}: candidates", results)


def show_chosen(made: SearchResult, title: str, results: Results) -> None:
    """The table of what the search wrote, beside the original."""
    verdict = made.artifact.manifest.verdict
    assert verdict is not None
    (drift,) = verdict.drift
    change = (drift.figures["metric_change"], *drift.intervals["metric_change"])
    timings = [time for time in made.artifact.measured.timings if time.engine != ORIGINAL]
    results.table(title, ("", "original", "chosen"), [
        ("MB", f"{made.artifact.measured.original_size / 1e6:.2f}", f"{made.artifact.size / 1e6:.2f}"),
        *((f"speed, batch {time.batch}", "1", f"{time.speedup:.2f} x") for time in timings),
        (
            f"accuracy, {drift.samples} unseen samples", f"{drift.figures['metric_original']:.4f}",
            f"{drift.figures['metric']:.4f} ({change[0]:+.4f}, 95 %: {change[1]:+.4f} to {change[2]:+.4f})",
        ),
        ("seconds, beyond the budget", "", f"{made.spent:.0f}, {made.overrun:.0f}"),
        ("stages", "", ", ".join(record.stage for record in made.artifact.manifest.history)),
        ("missed", "", ", ".join(made.missed) or "nothing"),
    ])  # fmt: skip


def show_trials(made: SearchResult, title: str, results: Results) -> None:
    """The table of all candidates: in bold what was built, with a star what is on the Pareto front."""
    head = ("candidate", "healing, steps", "drop, points", "speed-up", "MB", "result")
    rows = []
    for trial in made.artifact.measured.search:
        name = f"**{trial.name}**" if trial.measured else trial.name
        drop = "" if trial.drop is None else f"{100 * trial.drop:+.2f}"
        found = (f"{trial.speedup:.2f} x", f"{trial.size / 1e6:.2f}", trial.reason)
        rows.append((f"{name} *" if trial.front else name, str(trial.heal or "-"), drop, *found))
    results.table(title, head, rows)


if __name__ == "__main__":
    main()
