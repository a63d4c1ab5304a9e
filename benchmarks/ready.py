"""A ready recipe on a model of its kind: what it gained and cost, on samples that nothing has seen.

    python benchmarks/ready.py image-classification|text-classification [--test-set]

The samples are a development set, by which the recipes were chosen. `--test-set` judges by the labelled test set of the
same kind (`labelled_test_sets.py`), once: the look is in the ledger (`looks.py`).
"""

from pathlib import Path
from typing import Any

from classifier import classifier
from labelled_test_sets import DIGITS_SALT, digest_digits, write_docstrings
from looks import take_look
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
DEPENDS = (
    "benchmarks/ready.py",
    "benchmarks/labelled_test_sets.py",
    "compress",
    "export",
    "laconic/recipes",
    "constraints.txt",
)
"""What decides the figures; when it changes, those that stand on a test set count as older."""


def main() -> None:
    """Compress, and print the figures that `laconic compress` prints."""
    parser = make_parser(__doc__)
    parser.add_argument("recipe", choices=sorted(MODELS))
    parser.add_argument("--folder", type=Path, default=Path(".cache/ready"))
    parser.add_argument("--test-set", action="store_true", help="judge by the labelled test set: a look")
    given = parser.parse_args()
    results = Results(publish=given.publish)
    folder = given.folder / "test-set" if given.test_set else given.folder
    folder.mkdir(parents=True, exist_ok=True)
    if given.test_set:
        digest = write_docstrings(folder) if given.recipe == "text-classification" else train_on_digits(folder)
        with take_look(f"labelled test set, {given.recipe}", digest, DEPENDS) as figures:
            figures |= judge(given.recipe, folder, results)
    else:
        judge(given.recipe, folder, results)


def train_on_digits(folder: Path) -> str:
    """Train the network with the digits that the test set leaves; return the digest of those that judge."""
    digits(folder, DIGITS_SALT)
    return digest_digits()


def judge(name: str, folder: Path, results: Results) -> dict[str, str]:
    """Compress by a ready recipe, print, and return the figures."""
    model: dict[str, Any] = MODELS[name](folder)
    model.pop("heal", None)  # the recipe says how it heals
    ready = read_yaml(find_recipe(Path(name)))
    goal = {**ready.get("goal", {}), "max_drop": DROP}
    recipe = Recipe.parse({**ready, **model, "goal": goal})
    made = compress(recipe, folder / f"{name}.laconic", cache=Cache(folder / "cache"))
    manifest = made.artifact.manifest
    gains = list_gains(manifest, made.artifact.measured, registry.resolve("task", manifest.task).metric)
    rows = [[gain.figure, gain.original, gain.artifact, gain.change] for gain in gains]
    results.table(name, ["", "original", "artifact", ""], rows)
    return {row[0]: ", ".join(row[1:]) for row in rows}


if __name__ == "__main__":
    main()
