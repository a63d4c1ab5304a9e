"""Settings as users write them: strict pydantic models, names with settings, and YAML files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from laconic import registry
from laconic.errors import MissingPackage, RecipeError, UntrustedCode, UsageError, did_you_mean
from laconic.files import read_bounded

PATHS = ("calibrate", "train", "evaluate")
"""The keys of `data` that name files of samples."""
TEMPLATE = "chat_template"
"""The key of `data` that names a file with a template."""

RECIPE_BYTES = 2**18
"""The most bytes of a recipe. PyYAML takes a kilobyte of memory for each of its values."""


FAULTS = 8
"""The most faults of a file that a message names."""
MAX_FAULTS = 1000
"""The most faults that are looked at: to list a million takes three seconds."""
SHOWN = 200
"""The most characters of a value or a key in a message."""


class UniqueKeyLoader(yaml.SafeLoader):
    """A safe YAML loader that refuses duplicate keys, of which the last would silently win, and aliases, with which a
    few lines can stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_mark()
            raise yaml.composer.ComposerError(problem="aliases are not supported", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(problem=f"{name!r} is given twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the keys and values of a recipe file, its relative paths resolved against its folder. Raises RecipeError."""
    return resolve_paths(read_mapping(path, "recipe", RecipeError), path.parent)


def read_mapping(path: Path, what: str, error_type: type[UsageError] = UsageError) -> dict[str, Any]:
    """Read the keys and values of a YAML file. what: its kind, in messages. Raises the given error."""
    try:
        content = yaml.load(read_bounded(path, RECIPE_BYTES).decode("utf-8"), UniqueKeyLoader)  # noqa: S506 - a safe loader
    except FileNotFoundError:
        raise error_type(f"there is no {what} {path}") from None
    except RecursionError:
        raise error_type(f"{path} is not valid YAML: it is nested too deeply") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise error_type(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise error_type(f"{path} is not a {what}: expected keys and values, got {type(content).__name__}")
    return content


def resolve_paths(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the relative paths in a recipe's content against `folder`."""

    def resolve(value: Any) -> Any:
        return str(folder / value) if isinstance(value, str) else value

    content = dict(content)
    if "source" in content:
        content["source"] = resolve(content["source"])
    data = content.get("data")
    if isinstance(data, dict):
        content["data"] = data | {key: resolve(data[key]) for key in (*PATHS, TEMPLATE) if key in data}
    elif data is not None:
        content["data"] = resolve(data)
    return content


def explain(error: ValidationError, where: str) -> str:
    """Format a pydantic validation error in one line: where, and for each of the first faults what was expected."""
    if error.error_count() > MAX_FAULTS:
        return f"{where}: {error.error_count():,} of its values are not what they should be"
    # Defaults that are computed from other settings are no faults of their own where one of those is wrong.
    faults = [fault for fault in error.errors(include_url=False) if fault["type"] != "default_factory_not_called"]
    sentences = [explain_fault(dict(fault)) for fault in faults[:FAULTS]]
    rest = [f"and {len(faults) - FAULTS} more"] if len(faults) > FAULTS else []
    return f"{where}: {'; '.join([*sentences, *rest])}"


def explain_fault(fault: Mapping[str, Any]) -> str:
    """Format one fault: its key, and what was expected in the place of what."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).strip(".")
    cause = fault.get("ctx", {}).get("error")
    if cause is not None:
        message = str(cause)
    else:
        message = fault["msg"][:1].lower() + fault["msg"][1:].replace("valid tuple", "list")
        message += "" if fault["type"] == "missing" else f", got {shorten(fault['input'])}"
    return f"{shorten_text(key)}: {message}" if key else message


def shorten(value: Any) -> str:
    """Format a value for a message: cut off where it is long."""
    return shorten_text(repr(value))


def shorten_text(text: str) -> str:
    """Cut a text off where it is long."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class Strict(BaseModel):
    """Base of the models that make up a recipe: frozen, and an unknown key is refused with the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions and today's: an old key is refused with the new one."""
    missing: ClassVar[Mapping[str, str]] = {}
    """Keys that people try, and a sentence that says what to do instead."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key not in cls.model_fields:
                    raise ValueError(explain_unknown_key(str(key), cls))
        return values


def explain_unknown_key(key: str, model: type[BaseModel]) -> str:
    """Describe why a key is unknown to a settings model: its new name, or the nearest known key."""
    renamed: Mapping[str, str] = getattr(model, "renamed", {})
    if key in renamed:
        return f"key {key!r} is now called {renamed[key]!r}"
    missing: Mapping[str, str] = getattr(model, "missing", {})
    return f"unknown key {key!r}. {missing.get(key) or did_you_mean(key, model.model_fields)}"


class NamedSettings(Strict):
    """The name of a registered class with its settings. In YAML: `name`, or `name: {setting: value}`."""

    name: str
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, str):
            return {"name": values}
        if isinstance(values, Mapping) and len(values) == 1 and "name" not in values:
            name, config = next(iter(values.items()))
            return {"name": name, "config": {} if config is None else config}
        if isinstance(values, Mapping) and "name" in values:
            return values
        raise ValueError(f"expected a name, or {{name: {{setting: value}}}}, got {values!r}")

    def configure(self, kind: str, base: type[BaseModel] = BaseModel) -> Any:
        """Resolve the name in the registry of this kind, and instantiate the class with these settings.

        base: the class that it must derive from. Raises RecipeError, UntrustedCode for an address that nobody trusts,
        MissingPackage for a package that it needs.
        """
        try:
            model = registry.resolve(kind, self.name)
        except (MissingPackage, UntrustedCode):
            raise
        except UsageError as error:
            raise RecipeError(str(error)) from None
        if not (isinstance(model, type) and issubclass(model, base)):
            article = "an" if kind[0] in "aeiou" else "a"
            raise RecipeError(f"{self.name} is not {article} {kind}")
        for key in self.config:
            if key not in model.model_fields:
                raise RecipeError(f"{self.name}: {explain_unknown_key(key, model)}")
        try:
            return model.model_validate(self.config)
        except ValidationError as error:
            raise RecipeError(explain(error, self.name)) from None
        except RecipeError as error:  # from settings that name registered classes in turn
            raise RecipeError(f"{self.name}: {error}") from None

    def to_yaml_value(self) -> Any:
        """Return the value as it is written in YAML."""
        return {self.name: self.config} if self.config else self.name
