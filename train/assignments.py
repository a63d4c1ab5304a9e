"""Settings that the command line gives to a training recipe, put where a recipe's file has them."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from laconic.config import NamedSettings, UniqueKeyLoader
from laconic.errors import RecipeError


def assign_all(content: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the content of a recipe with each `key=value` assigned.

    A key may lead into a setting, as `data.limit` or `optimizer.adamw.lr`; a value is YAML. Raises RecipeError.
    """
    content = dict(content)
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        path = key.strip().split(".")
        if not separator or not all(path):
            raise RecipeError(f"--set {assignment}: expected key=value, as --set batch_size=32")
        place = content
        for name in path[:-1]:
            place[name] = place = open_setting(place.get(name), name)
        place[path[-1]] = parse_value(value, f"--set {key}")
    return content


def open_setting(value: Any, name: str) -> dict[str, Any]:
    """Copy a setting as keys and values: `data: d.jsonl` and `optimizer: adamw` are short for those."""
    if isinstance(value, Mapping):
        return dict(value)
    if value is None:
        return {}
    return {"train": value} if name == "data" else {str(value): {}}


def parse_value(text: str, where: str) -> Any:
    """Parse a value in YAML, such as a number, a name, or {key: value}. Raises RecipeError."""
    try:
        return yaml.load(text, UniqueKeyLoader)  # noqa: S506 - a safe loader
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise RecipeError(f"{where}: {text!r} is not valid YAML: {' '.join(str(error).split())}") from None


def set_learning_rate(optimizer: Any, rate: float) -> dict[str, Any]:
    """Return the optimizer of a recipe with this learning rate. Raises ValidationError for no optimizer."""
    named = NamedSettings.model_validate(optimizer)
    return {named.name: {**named.config, "lr": rate}}
