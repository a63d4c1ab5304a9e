"""A document of YAML: read strictly, its paths counted from its folder, and what is wrong in it explained."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from laconic.errors import RecipeError

PATHS = ("calibrate", "train", "evaluate")
"""The keys of `data` that name files."""


class Loader(yaml.SafeLoader):
    """YAML without a key given twice, of which the last would quietly win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a recipe's file, its paths counted from its folder. Raises RecipeError."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)  # noqa: S506 - a safe loader
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} does not read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is not a recipe: expected keys and values, got {type(content).__name__}")
    return relocated(content, path.parent)


def relocated(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content with its paths counted from `folder`."""

    def moved(value: Any) -> Any:
        return str(folder / value) if isinstance(value, str) else value

    content = dict(content)
    if "source" in content:
        content["source"] = moved(content["source"])
    data = content.get("data")
    if isinstance(data, dict):
        content["data"] = data | {key: moved(data[key]) for key in PATHS if key in data}
    elif data is not None:
        content["data"] = moved(data)
    return content


def explain(error: ValidationError, where: str) -> str:
    """What a model of pydantic found wrong, in one sentence a fault: where, which key, what was expected."""
    faults = []
    for fault in error.errors():
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
        cause = fault.get("ctx", {}).get("error")
        got = "" if cause is not None or fault["type"] == "missing" else f", got {fault['input']!r}"
        message = (
            str(cause)
            if cause is not None
            else fault["msg"][:1].lower() + fault["msg"][1:].replace("valid tuple", "list")
        )
        faults.append(f"{key}: {message}{got}" if key else f"{message}{got}")
    return f"{where}: {'; '.join(faults)}"
