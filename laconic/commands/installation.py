"""What is installed here, and what comes with it."""

from laconic.commands.options import Json
from laconic.commands.output import print_json


def doctor(as_json: Json = False) -> None:
    """Which engines work here, and for each thing that does not, why."""
    from laconic.commands.doctor import examine
    from laconic.commands.tables import print_findings

    findings = examine()
    print_json([each.model_dump(by_alias=True) for each in findings]) if as_json else print_findings(findings)


def recipes(as_json: Json = False) -> None:
    """The ready recipes, for --recipe NAME."""
    from laconic.commands.tables import print_recipes
    from laconic.recipes.ready import list_recipes

    found = list_recipes()
    print_json(found) if as_json else print_recipes(found)


def schema() -> None:
    """The JSON Schema of a recipe, for editors to complete it by."""
    from laconic.recipes.recipe import make_json_schema

    print_json(make_json_schema())
