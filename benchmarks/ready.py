"""A ready recipe on a model of its kind: what it gained and cost, on samples that nothing has seen.

python benchmarks/ready.py image-classification
python benchmarks/ready.py text-classification
"""

import argparse
from pathlib import Path
from typing import Any

from classifier import classifier
from search import digits

from compress.pipeline import compress
from laconic.cache import Cache
from laconic.commands.tables import print_compressed
from laconic.config import read_yaml
from laconic.recipes.ready import find_recipe
from laconic.recipes.recipe import Recipe

DROP = "1%"
"""The drop of the metric that the verdict asks about: with it a result is judged by up to ten times as many samples,
since it takes thousands to know accuracy to a point."""
MODELS = {"image-classification": digits, "text-classification": classifier}


def main() -> None:
    """Compress, and print the table that `laconic compress` prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=sorted(MODELS))
    parser.add_argument("--folder", type=Path, default=Path("ready-benchmark"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    model: dict[str, Any] = MODELS[given.recipe](given.folder)
    model.pop("heal", None)  # the recipe says how it heals
    ready = read_yaml(find_recipe(Path(given.recipe)))
    goal = {**ready.get("goal", {}), "max_drop": DROP}
    recipe = Recipe.parse({**ready, **model, "goal": goal})
    made = compress(recipe, given.folder / f"{given.recipe}.laconic", cache=Cache(given.folder / "cache"))
    print_compressed(made.artifact)


if __name__ == "__main__":
    main()
