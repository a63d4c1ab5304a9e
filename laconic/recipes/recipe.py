"""The recipe of a compression: source, data, stages, target and goal. Read from YAML."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from laconic import registry
from laconic.config import NamedSettings, Strict, explain, read_yaml
from laconic.errors import RecipeError, UntrustedCode, did_you_mean
from laconic.recipes.goal import Goal
from laconic.recipes.ready import find_recipe
from laconic.recipes.stage import PlanStage, Stage, TorchStage
from laconic.recipes.stage_order import check_order, find_stages_to_heal
from laconic.tensor import TensorSpec

DEFAULT_STAGES = {"cpu": ("quantize.static",), "cuda": (), "tensorrt": ("quantize.static",)}
"""The stages of a recipe that names none, by target, where the task has no default recipe. ONNX Runtime has no INT8
kernels on GPUs: there it is FP16."""

HEAL = "distill.heal"
"""The stage that is inserted after lossy ones: a short training of the compressed model against the original."""


class Data(Strict):
    """Files or folders of samples, in one of the formats of laconic/data/formats.py.

    calibrate: calibration samples, for the stages. train: training samples for the stages that train, with or without
    labels; default: the calibration samples. evaluate: test samples, for the verdict; default: a part of `calibrate`
    that is held out before any stage runs. limit: the most samples of each that are used. columns: by the task's name
    of a column, as `text` or `label`, the name that the files have for it.
    """

    calibrate: Path | None = None
    train: Path | None = None
    evaluate: Path | None = None
    limit: int | None = Field(default=None, ge=3)
    columns: dict[str, str] = Field(default_factory=dict)


class NamedStage(NamedSettings):
    """The name of a stage, with its settings."""

    def make_stage(self) -> Stage:
        """Make the stage with these settings. Raises RecipeError, or MissingPackage for a package that it needs."""
        stage: Stage = self.configure("stage", Stage)
        return stage


class Origin(Strict):
    """The source of a model.

    source: a checkpoint's folder or file. task: its registered name; inferred from the source if not given.
    builder, arguments: the "package.module:factory" that builds the module, and its arguments. weights_key: under
    which key a file of weights has them, where it has several. inputs: the input signature, if the source does not
    define one; of an ONNX file, those inputs whose axes it leaves in doubt.
    """

    source: str
    task: str | None = None
    builder: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    weights_key: str | None = None
    inputs: tuple[TensorSpec, ...] = ()

    @field_validator("task")
    @classmethod
    def _known_task(cls, task: str | None) -> str | None:
        if task is not None and task not in registry.TASKS:
            raise ValueError(registry.describe_unknown("task", task))
        return task

    @field_validator("builder")
    @classmethod
    def _address(cls, builder: str | None) -> str | None:
        if builder is not None and not all(builder.partition(":")):
            raise ValueError(f"expected 'package.module:factory', got {builder!r}")
        return builder


class Recipe(Origin):
    """The whole recipe.

    constants: values of inputs of an ONNX file that are the same for all samples. stages: default: those of the task's
    default recipe, else of the target. heal: whether healing is inserted after lossy stages, or the settings of that
    healing. to: what is written; quantization needs an artifact. runtimes: the engines to try, the preferred first;
    default: all engines of the target. engine_only: the one engine to build for, in float32 where not quantized, so
    that nothing is chosen by its speed. int8_activations: whether products with weights that are stored in 4 or 8 bits
    may round their inputs to INT8 (dynamic quantization), which is faster and less exact: where the engine has that,
    and the goal is met with it. int8_kv_cache: whether a language model keeps keys and values in 8 bits, where the goal
    is met with them; int4_value_cache: keys in 8 and values in 4. portable: whether the artifact is placed for the
    other engines as well, and the fastest one is found on each machine where it is opened. keep_graph: whether the
    artifact holds the float graph, so that `laconic build` needs no source.
    """

    missing: ClassVar[Mapping[str, str]] = {
        "int4_kv_cache": "Keys in 4 bits cost a small model 5 % of perplexity, and values 0.1 %. Set "
        "int4_value_cache: true, which keeps keys in 8 bits",
        "state": "A state is an input like others here: give the values that it has in use with the samples, without "
        "this key; a client sends what the model returns for it with its next request",
    }

    constants: dict[str, Any] = Field(default_factory=dict)
    data: Data = Data()
    stages: tuple[NamedStage, ...]
    heal: bool | dict[str, Any] = True
    to: Literal["artifact", "checkpoint"] = "artifact"
    target: str = "cpu"
    runtimes: tuple[str, ...] = ()
    engine_only: str | None = None
    int8_activations: bool = False
    int8_kv_cache: bool = False
    int4_value_cache: bool = False
    portable: bool = False
    keep_graph: bool = False
    goal: Goal = Goal()
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _default_stages(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("stages") is None:
            stated = {key: value for key, value in values.items() if key != "stages"}
            return find_defaults(stated) | stated
        return values

    @field_validator("data", mode="before")
    @classmethod
    def _one_file(cls, data: Any) -> Any:
        return {"calibrate": data} if isinstance(data, (str, Path)) else data

    @field_validator("target")
    @classmethod
    def _known_target(cls, target: str) -> str:
        if target not in registry.TARGETS:
            raise ValueError(f"unknown target {target!r}. {did_you_mean(target, registry.TARGETS)}")
        return target

    @model_validator(mode="after")
    def _target_has_runtimes(self) -> Self:
        named = [("runtimes", name) for name in self.runtimes]
        if self.engine_only is not None:
            named.append(("engine_only", self.engine_only))
            if self.portable:
                raise ValueError("portable places the model for several engines, engine_only for one. Leave one out")
        for key, name in named:
            engines = registry.list_engines(self.target)
            if name not in engines:
                raise ValueError(
                    f"{key}: {name!r} is not an engine of target {self.target!r}. {did_you_mean(name, engines)}"
                )
        return self

    @classmethod
    def load(cls, path: Path, *, trust: bool = False, **overrides: Any) -> "Recipe":
        """Read a recipe, validate it including the settings of its stages, and complete it: healing is inserted, and
        stages that a checkpoint cannot hold are removed.

        trust: whether the file may name code by its address. overrides: keys from the command line, which replace the
        file's, key by key. Relative paths in the file are resolved against the file's folder. Raises RecipeError with
        the file, the key and what was expected; UntrustedCode for an address in a file that nobody trusts;
        MissingPackage for a stage's packages.
        """
        content = read_yaml(path)
        check_builder(content, path, trust=trust or overrides.get("builder") is not None)
        if isinstance(content.get("data"), str):
            content = {**content, "data": {"calibrate": content["data"]}}
        if isinstance(content.get("data"), dict) and isinstance(overrides.get("data"), (str, Path, dict)):
            data = overrides["data"] if isinstance(overrides["data"], dict) else {"calibrate": overrides["data"]}
            overrides = overrides | {"data": content["data"] | data}
        if isinstance(content.get("goal"), dict) and isinstance(overrides.get("goal"), dict):
            overrides = overrides | {"goal": content["goal"] | overrides["goal"]}
        return cls.parse(content | overrides, where=str(path), trust=trust)

    @classmethod
    def parse(cls, content: Mapping[str, Any], *, where: str = "recipe", trust: bool = False) -> "Recipe":
        """Make a recipe of keys and values, validated and completed as by `load`. where: its name in error messages.
        trust: whether stages and their parts may be given by the address of their code."""
        try:
            with registry.trust_addresses(trust):
                recipe = cls.model_validate(content).complete()
                recipe.make_stages()
        except ValidationError as error:
            raise RecipeError(explain(error, where)) from None
        except (RecipeError, UntrustedCode) as error:
            raise type(error)(f"{where}: {error}") from None
        return recipe

    @classmethod
    def default(cls, source: str, **settings: Any) -> "Recipe":
        """Make the default recipe for a source. settings: any other key."""
        return cls.parse({"source": source, **settings})

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines to try, the preferred first."""
        return (self.engine_only,) if self.engine_only else self.runtimes or registry.TARGETS[self.target]

    def complete(self) -> Self:
        """Return the recipe with healing inserted among its stages, and without the stages that a checkpoint cannot
        hold if it writes one.

        Completing a recipe again changes nothing. Raises RecipeError if no stage would be left.
        """
        built = [(step, step.make_stage()) for step in self.stages]
        if self.to == "checkpoint":
            for key in ("max_latency", "int8_share", "max_first_token", "min_tokens_per_second"):
                if getattr(self.goal, key) is not None:
                    raise RecipeError(
                        f"goal.{key} is for artifacts, which run on an engine. Leave it out for a checkpoint"
                    )
            if rounds_layers([stage for _, stage in built]):
                return self
            built = [(step, stage) for step, stage in built if stage.kind == "torch"]
            if not built:
                raise RecipeError(
                    "the checkpoint would be unchanged: no stage changes the module, and a checkpoint is quantized by "
                    "quantize.gptq, quantize.awq or quantize.weights alone. Name one of them, or stages that prune, "
                    "factorize or train"
                )
        steps = [step for step, _ in built]
        lossy = any(isinstance(stage, TorchStage) and stage.lossy for _, stage in built)
        if self.heal and HEAL in registry.STAGES and (lossy or isinstance(self.heal, dict)):
            heal = NamedStage(name=HEAL, config=self.heal if isinstance(self.heal, dict) else {})
            for number in reversed(find_stages_to_heal([stage for _, stage in built], heal.make_stage())):
                steps.insert(number + 1, heal.model_copy(deep=True))  # YAML would write one twice as an alias
        return self.model_copy(update={"stages": tuple(steps)})

    @property
    def quantizes_checkpoint(self) -> bool:
        """Whether a checkpoint with quantized weights is written, a layer at a time."""
        return self.to == "checkpoint" and rounds_layers(self.make_stages())

    def make_stages(self) -> tuple[Stage, ...]:
        """Make the stages with their settings. Raises RecipeError for an invalid one, or an invalid order."""
        stages = tuple(step.make_stage() for step in self.stages)
        check_order([step.name for step in self.stages], stages, onnx=self.source.endswith(".onnx"))
        return stages

    def to_yaml(self) -> str:
        """Serialize to YAML; reading it back gives the same recipe."""
        content = self.model_dump(mode="json", exclude_defaults=True, exclude={"stages"})
        content["stages"] = [step.to_yaml_value() for step in self.stages]
        content["target"] = self.target
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def rounds_layers(stages: Sequence[Stage]) -> bool:
    """Return whether the only stage of a recipe rounds weights a layer at a time."""
    return len(stages) == 1 and isinstance(stages[0], PlanStage) and stages[0].rounds_layers


def find_defaults(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Find the stages of a recipe that names none, and what goes with them. stated: the keys that it has."""
    target, task = stated.get("target", "cpu"), str(stated.get("task"))
    if stated.get("to") == "checkpoint":
        return {"stages": ()}
    name = registry.resolve("task", task).default_recipe if target == "cpu" and task in registry.TASKS else ""
    if not name:
        return {"stages": DEFAULT_STAGES.get(target, ())}
    ready = read_yaml(find_recipe(Path(name)))
    if stated.get("runtimes") or stated.get("portable"):
        ready.pop("engine_only", None)
    return ready


def check_builder(content: Mapping[str, Any], path: Path, *, trust: bool) -> None:
    """Raise UntrustedCode where a recipe's file names a builder, unless it is trusted."""
    if content.get("builder") is not None and not trust:
        raise UntrustedCode(
            f"{path} names a builder, {content['builder']!r}, which would be imported and called. Read that code "
            f"first, then give --trust, or give --builder yourself"
        )


def make_json_schema() -> dict[str, Any]:
    """Make the JSON Schema of a recipe, for completion in editors."""
    schema = Recipe.model_json_schema()
    names = sorted(registry.STAGES)
    schema["$defs"]["NamedStage"] = {
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
    schema["properties"]["target"]["enum"] = list(registry.TARGETS)
    schema["properties"]["task"]["examples"] = sorted(registry.TASKS)
    return schema
