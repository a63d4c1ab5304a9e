"""Commands about the installation: `doctor`, `recipes`, `schema`."""

from laconic.commands.options import Json, print_json


def doctor(as_json: Json = False) -> None:
    """Check the installation: engines, packages, processor, memory and cache, with a remedy for whatever fails."""
    from laconic.commands.doctor import examine
    from laconic.commands.tables import print_findings

    findings = examine()
    print_json([each.model_dump(by_alias=True) for each in findings]) if as_json else print_findings(findings)


def recipes(as_json: Json = False) -> None:
    """List the ready recipes, for --recipe NAME."""
    from laconic.commands.tables import print_recipes
    from laconic.recipes.ready import list_recipes

    ready = list_recipes()
    print_json(ready) if as_json else print_recipes(ready)


def schema() -> None:
    """Print the JSON Schema of a recipe, for completion in editors."""
    from laconic.recipes.recipe import make_json_schema

    print_json(make_json_schema())
