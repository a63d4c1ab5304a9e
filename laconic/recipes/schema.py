"""The JSON Schema of a recipe."""

from typing import Any

from laconic import registry
from laconic.recipes.recipe import Recipe


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors to complete it by."""
    schema = Recipe.model_json_schema()
    names = sorted(registry.STAGES)
    schema["$defs"]["Step"] = {
        "description": "A stage by name, or {name: {setting: value}}.",
        "oneOf": [
            {"type": "string", "examples": names},
            {
                "type": "object",
                "properties": {name: {"type": ["object", "null"]} for name in names},
                "minProperties": 1,
                "maxProperties": 1,
            },
        ],
    }
    schema["properties"]["data"] = {"anyOf": [{"$ref": "#/$defs/Data"}, {"type": "string"}]}
    schema["properties"]["target"]["enum"] = [name for name, engines in registry.TARGETS.items() if engines]
    schema["properties"]["task"]["examples"] = sorted(registry.TASKS)
    return schema
