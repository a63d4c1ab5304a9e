"""What is installed here, and what comes with it."""

from laconic import registry
from laconic.commands.options import Json
from laconic.commands.output import print_json


def doctor(as_json: Json = False) -> None:
    """Which engines work here, and for each thing that does not, why."""
    findings = registry.load("laconic.commands.doctor:examine")()
    if as_json:
        print_json([finding.model_dump(by_alias=True) for finding in findings])
        return
    registry.load("laconic.commands.tables:examined")(findings)


def recipes(as_json: Json = False) -> None:
    """The ready recipes, for --recipe NAME."""
    found = registry.load("laconic.recipes.ready:ready")()
    if as_json:
        print_json(found)
        return
    registry.load("laconic.commands.tables:offered")(found)


def schema() -> None:
    """The JSON Schema of a recipe, for editors to complete it by."""
    print_json(registry.load("laconic.recipes.schema:json_schema")())
