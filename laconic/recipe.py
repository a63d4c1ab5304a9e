"""What is to be done with a model: its source, the data, the stages, the target and the goal. Read from YAML."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from laconic import registry
from laconic.errors import MissingPackage, RecipeError, UsageError
from laconic.stage import Stage
from laconic.tensor import TensorSpec
from laconic.units import Bytes, Seconds, Share

DEFAULT_STAGES = {"cpu": ("quantize.static",)}
"""What is done where the recipe names no stages, by target."""


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


class Strict(BaseModel):
    """A part of a recipe. A key that it does not know is refused, with the one that was probably meant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}. {registry.did_you_mean(str(key), cls.model_fields)}")
        return values


class Data(Strict):
    """Files or folders of samples; laconic/data.py says which formats.

    calibrate: what the stages may look at. train: what those that train learn from, without labels or with them;
    without it, the same as they look at. evaluate: what the result is judged by; without it, a part of `calibrate` is
    set aside for that before anything looks at it. limit: at most so many samples of each are used.
    """

    calibrate: Path | None = None
    train: Path | None = None
    evaluate: Path | None = None
    limit: int | None = Field(default=None, ge=3)


class Named(Strict):
    """Something that a registry knows, by name, with its settings. In YAML: `name`, or `name: {setting: value}`."""

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
        """The thing of this kind, derived from `base`, with these settings.

        Raises RecipeError, or MissingPackage for a package that it needs.
        """
        try:
            model = registry.resolve(kind, self.name)
        except MissingPackage:
            raise
        except UsageError as error:
            raise RecipeError(str(error)) from None
        if not (isinstance(model, type) and issubclass(model, base)):
            raise RecipeError(f"{self.name} is not a {kind}")
        for key in self.config:
            if key not in model.model_fields:
                raise RecipeError(f"{self.name}: unknown key {key!r}. {registry.did_you_mean(key, model.model_fields)}")
        try:
            return model.model_validate(self.config)
        except ValidationError as error:
            raise RecipeError(explain(error, self.name)) from None

    def plain(self) -> Any:
        """As it would be written in YAML."""
        return {self.name: self.config} if self.config else self.name


class Step(Named):
    """A stage by name, with its settings."""

    def stage(self) -> Stage:
        """The stage with these settings. Raises RecipeError, or MissingPackage for a package that it needs."""
        stage: Stage = self.configure("stage", Stage)
        return stage


class Goal(Strict):
    """What the result must reach. What is not given is not asked; without a fidelity the task's own tolerance counts.

    fidelity, worst: the mean and the worst of the samples, in the task's fidelity (1 = the same answers). max_drop: of
    the task's metric against labels, from the original's. max_latency: seconds for one sample. max_size: bytes.
    """

    fidelity: Share | None = None
    worst: Share | None = None
    max_drop: Share | None = None
    max_latency: Seconds | None = None
    max_size: Bytes | None = None


class Origin(Strict):
    """Where a model comes from.

    source: a checkpoint's folder or file. task: as registered; guessed from the source where it is not given.
    builder, arguments: "package.module:factory" that builds the module, and what it is called with. inputs: the
    signature, where the source does not tell.
    """

    source: str
    task: str | None = None
    builder: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    inputs: tuple[TensorSpec, ...] = ()

    @field_validator("task")
    @classmethod
    def _known_task(cls, task: str | None) -> str | None:
        if task is not None and task not in registry.TASKS and ":" not in task:
            raise ValueError(f"unknown task {task!r}. {registry.did_you_mean(task, registry.TASKS)}")
        return task

    @field_validator("builder")
    @classmethod
    def _address(cls, builder: str | None) -> str | None:
        if builder is not None and not all(builder.partition(":")):
            raise ValueError(f"expected 'package.module:factory', got {builder!r}")
        return builder


class Recipe(Origin):
    """The whole recipe. stages: the target's own where none are given. runtimes: the engines to try, best first; all of
    the target's where none are given."""

    data: Data = Data()
    stages: tuple[Step, ...]
    target: str = "cpu"
    runtimes: tuple[str, ...] = ()
    goal: Goal = Goal()
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _default_stages(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("stages") is None:
            return {**values, "stages": DEFAULT_STAGES.get(values.get("target", "cpu"), ())}
        return values

    @field_validator("data", mode="before")
    @classmethod
    def _one_file(cls, data: Any) -> Any:
        return {"calibrate": data} if isinstance(data, (str, Path)) else data

    @field_validator("target")
    @classmethod
    def _built_target(cls, target: str) -> str:
        if target not in registry.TARGETS:
            raise ValueError(f"unknown target {target!r}. {registry.did_you_mean(target, registry.TARGETS)}")
        if not registry.TARGETS[target]:
            built = [name for name, engines in registry.TARGETS.items() if engines]
            raise ValueError(f"target {target!r} is not built yet. Try {' or '.join(map(repr, built))}")
        return target

    @model_validator(mode="after")
    def _target_has_runtimes(self) -> Self:
        for name in self.runtimes:
            if name not in registry.TARGETS[self.target]:
                raise ValueError(
                    f"runtimes: {name!r} is no engine of target {self.target!r}. "
                    f"{registry.did_you_mean(name, registry.TARGETS[self.target])}"
                )
        return self

    @classmethod
    def load(cls, path: Path, **given: Any) -> "Recipe":
        """Read a recipe, and check it down to the settings of its stages.

        given: what the command line says; it stands above the file, key by key. Paths in the file count from the
        file's folder.
        Raises RecipeError with the file, the key and what was expected; MissingPackage for a stage's packages.
        """
        content = read_yaml(path)
        if isinstance(content.get("data"), dict) and isinstance(given.get("data"), (str, Path, dict)):
            data = given["data"] if isinstance(given["data"], dict) else {"calibrate": given["data"]}
            given = given | {"data": content["data"] | data}
        return cls.parse(content | given, where=str(path))

    @classmethod
    def parse(cls, content: Mapping[str, Any], *, where: str = "recipe") -> "Recipe":
        """From keys and values, checked as `load` does. where: what to call it in an error."""
        try:
            recipe = cls.model_validate(content)
            recipe.build()
        except ValidationError as error:
            raise RecipeError(explain(error, where)) from None
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from None
        return recipe

    @classmethod
    def default(cls, source: str, **given: Any) -> "Recipe":
        """What is done without a recipe. given: any other key."""
        return cls.parse({"source": source, **given})

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines to try, best first."""
        return self.runtimes or registry.TARGETS[self.target]

    def build(self) -> tuple[Stage, ...]:
        """The stages with their settings. Raises RecipeError for one that is wrong, or out of order."""
        stages = tuple(step.stage() for step in self.stages)
        check_order(self.stages, stages, onnx=self.source.endswith(".onnx"))
        return stages

    def to_yaml(self) -> str:
        """As it would be written; reading it gives the same recipe."""
        content = self.model_dump(mode="json", exclude_defaults=True, exclude={"stages"})
        content["stages"] = [step.plain() for step in self.stages]
        content["target"] = self.target
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def check_order(steps: tuple[Step, ...], stages: tuple[Stage, ...], *, onnx: bool) -> None:
    """Raise RecipeError unless every torch stage comes before quantization, which is done at most once.

    onnx: the source is a graph already, so no torch stage can work on it.
    """
    planned = ""
    for number, (step, stage) in enumerate(zip(steps, stages, strict=True)):
        where = f"stages[{number}] ({step.name})"
        if stage.kind == "torch" and onnx:
            raise RecipeError(f"{where} changes a torch module, and the source is an ONNX file. Remove the stage")
        if stage.kind == "torch" and planned:
            raise RecipeError(f"{where} must come before {planned}, which needs the finished model")
        if stage.kind == "plan" and planned:
            raise RecipeError(f"{where} comes after {planned}: a model is quantized once. Remove one of them")
        planned = step.name if stage.kind == "plan" else planned


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
