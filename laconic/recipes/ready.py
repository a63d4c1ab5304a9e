"""Ready recipes: what is done to a model of a kind, without its source and its data."""

from itertools import takewhile
from pathlib import Path
from typing import Any

from laconic import registry
from laconic.config import read_yaml
from laconic.errors import RecipeError

HOME = Path(__file__).parent


def find_recipe(recipe: Path) -> Path:
    """The file of a recipe: the path itself, or the ready one of that name. Raises RecipeError for neither."""
    if recipe.suffix or recipe.is_file():
        return recipe
    known = {path.stem: path for path in sorted(HOME.glob("*.yaml"))}
    if str(recipe) in known:
        return known[str(recipe)]
    raise RecipeError(
        f"there is no recipe {recipe}, neither a file nor a ready one. {registry.did_you_mean(str(recipe), known)}"
    )


def list_recipes() -> list[dict[str, Any]]:
    """The ready recipes, JSON-ready: name, what it is for, its stages as they are written."""
    found = []
    for path in sorted(HOME.glob("*.yaml"), key=lambda path: path.stem):
        lines = path.read_text(encoding="utf-8").splitlines()
        says = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
        found.append({"name": path.stem, "says": says, "stages": read_yaml(path).get("stages", [])})
    return found
