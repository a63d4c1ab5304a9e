"""Ready recipes: stages and goals for a kind of model, without a source and data."""

from itertools import takewhile
from pathlib import Path
from typing import Any

from laconic.config import read_yaml
from laconic.errors import RecipeError, did_you_mean

HOME = Path(__file__).parent


def find_recipe(recipe: Path) -> Path:
    """Find the file of a recipe: the path itself, or the ready recipe of that name. Raises RecipeError for neither."""
    if recipe.suffix or recipe.is_file():
        return recipe
    known = {path.stem: path for path in sorted(HOME.glob("*.yaml"))}
    if str(recipe) in known:
        return known[str(recipe)]
    raise RecipeError(
        f"there is no recipe {recipe}, neither a file nor a ready recipe. {did_you_mean(str(recipe), known)}"
    )


def list_recipes() -> list[dict[str, Any]]:
    """List the ready recipes, JSON-ready: name, purpose (`says`: the comment at the top of the file), stages."""
    recipes = []
    for path in sorted(HOME.glob("*.yaml"), key=lambda path: path.stem):
        lines = path.read_text(encoding="utf-8").splitlines()
        says = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
        recipes.append({"name": path.stem, "says": says, "stages": read_yaml(path).get("stages", [])})
    return recipes
