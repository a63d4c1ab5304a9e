"""A ready recipe on a model of its kind: what it gained and cost, on samples that nothing has seen.

python benchmarks/ready.py image-classification
python benchmarks/ready.py text-classification
"""

from pathlib import Path
from typing import Any

from classifier import classifier
from results import Results, make_parser
from search import digits

from compress.pipeline import compress
from laconic import registry
from laconic.artifacts.gain import list_gains
from laconic.cache import Cache
from laconic.config import read_yaml
from laconic.recipes.ready import find_recipe
from laconic.recipes.recipe import Recipe

DROP = "1%"
"""The drop of the metric that the verdict asks about: with it a result is judged by up to ten times as many samples,
since it takes thousands to know accuracy to a point."""
MODELS = {"image-classification": digits, "text-classification": classifier}


def main() -> None:
    """Compress, and print the figures that `laconic compress` prints."""
    parser = make_parser(__doc__)
    parser.add_argument("recipe", choices=sorted(MODELS))
    parser.add_argument("--folder", type=Path, default=Path("ready-benchmark"))
    given = parser.parse_args()
    results = Results("ready", publish=given.publish)
    given.folder.mkdir(parents=True, exist_ok=True)
    model: dict[str, Any] = MODELS[given.recipe](given.folder)
    model.pop("heal", None)  # the recipe says how it heals
    ready = read_yaml(find_recipe(Path(given.recipe)))
    goal = {**ready.get("goal", {}), "max_drop": DROP}
    recipe = Recipe.parse({**ready, **model, "goal": goal})
    made = compress(recipe, given.folder / f"{given.recipe}.laconic", cache=Cache(given.folder / "cache"))
    manifest = made.artifact.manifest
    gains = list_gains(manifest, made.artifact.measured, registry.resolve("task", manifest.task).metric)
    rows = [[gain.figure, gain.original, gain.artifact, gain.change] for gain in gains]
    results.table(given.recipe, ["", "original", "artifact", ""], rows)


if __name__ == "__main__":
    main()
