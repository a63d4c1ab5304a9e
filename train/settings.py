"""The settings of training, which fine-tuning, distillation and healing share, and the recipe of fine-tuning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from laconic.config import NamedSettings, Strict, explain, read_yaml
from laconic.errors import RecipeError, UntrustedCode
from laconic.recipes.recipe import Origin, check_builder
from laconic.registry import trust_addresses
from laconic.units import Bytes
from train.assignments import assign_all, set_learning_rate
from train.data.loader_settings import LoaderSettings
from train.optimizers.optimizer import Optimizer
from train.optimizers.schedule import Schedule
from train.parallel.mesh import Mesh
from train.step.compatibility import find_conflict
from train.step.parameter_settings import ParameterSettings
from train.step.technique import Technique

BF16_PADDING = 8
"""On a processor oneDNN compiles a product in BF16 for each shape, and keeps it: 40 steps of a GPT-2 of 4 layers on
texts of up to 64 tokens took 175 MiB with lengths in multiples of 8, else 384, and 0.92 times as long. Tensor Cores
like multiples of 8, too."""


@dataclass(frozen=True)
class TrainingComponents:
    """What the names in the settings of training refer to."""

    optimizer: Optimizer
    schedule: Schedule
    techniques: Mapping[str, Technique]
    parameters: ParameterSettings = field(default_factory=ParameterSettings)
    ema: float | None = None

    @property
    def multiplies_in_bf16(self) -> bool:
        """Whether matrix products are computed in BF16."""
        return any(technique.multiplies_in_bf16 for technique in self.techniques.values())

    @property
    def micro_batch(self) -> int | None:
        """Rows of a micro-batch, where the batch is split; None where the model sees the whole batch."""
        return next(filter(None, (technique.micro_batch for technique in self.techniques.values())), None)

    @property
    def padding_multiple(self) -> int:
        """Texts of a batch are padded to a multiple of so many tokens."""
        return BF16_PADDING if self.multiplies_in_bf16 else 1


class Training(Strict):
    """How a model is trained.

    batch_size: rows of a step, over all devices. max_length: tokens at which texts are truncated; the model's own limit
    by default. steps: of the whole run; overrides epochs. max_grad_norm: of gradient clipping; None does not clip.
    precision: of matrix products, unless a technique sets it; "auto" takes the faster of fp32 and bf16 on the device
    (`train.precision`), and "bf16" is the technique of that name.
    loader: how batches are loaded. group_by_length: whether rows of similar length share a batch, which saves padding
    and makes batches less alike. mesh: how the model is distributed over ranks. snapshot_every: steps between two
    snapshots. freeze: patterns of the parameters that are not trained. layer_decay: factor of the learning rate from a
    repeated layer to the one before it. ema: decay of the moving average of the weights, which is what is evaluated and
    kept; None keeps the weights themselves.
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "batch": "batch_size",
        "length": "max_length",
        "clip": "max_grad_norm",
        "feed": "loader",
        "every": "snapshot_every",
    }

    batch_size: int = Field(default=16, ge=1)
    max_length: int | None = Field(default=None, ge=1)
    epochs: float = Field(default=3.0, gt=0)
    steps: int | None = Field(default=None, ge=1)
    optimizer: NamedSettings = NamedSettings(name="adamw", config={"lr": 5e-5, "weight_decay": 0.01})
    schedule: NamedSettings = NamedSettings(name="linear")
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    freeze: tuple[str, ...] = ()
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    ema: float | None = Field(default=None, gt=0, lt=1)
    techniques: tuple[NamedSettings, ...] = ()
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    loader: LoaderSettings = LoaderSettings()
    mesh: Mesh = Mesh()
    group_by_length: bool = False
    snapshot_every: int = Field(default=200, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _name_bf16(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("precision") != "bf16":
            return values
        techniques = values.get("techniques") or ()
        if not isinstance(techniques, (list, tuple)) or any(name_of(technique) == "bf16" for technique in techniques):
            return values
        return {**values, "techniques": [*techniques, "bf16"]}

    @field_validator("techniques")
    @classmethod
    def _unique(cls, techniques: tuple[NamedSettings, ...]) -> tuple[NamedSettings, ...]:
        names = [technique.name for technique in techniques]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is given twice; give each technique once, with all its settings")
        return techniques

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        # Wrong settings of a stage are found before anything runs, not after an hour of the stages before it.
        self.components()
        return self

    def components(self) -> TrainingComponents:
        """Resolve the optimizer, the schedule and the techniques. Raises RecipeError where one is unknown, has wrong
        settings, or cannot be combined with another."""
        techniques = {named.name: named.configure("technique", Technique) for named in self.techniques}
        optimizer = self.optimizer.configure("optimizer", Optimizer)
        parallelism = self.mesh.parallelism if self.mesh.zero is not None else ()
        clip = self.max_grad_norm
        if conflict := find_conflict(techniques, optimizer, max_grad_norm=clip, parallelism=parallelism, ema=self.ema):
            raise RecipeError(conflict)
        adapters = [name for name, technique in techniques.items() if technique.trains_adapters]
        if self.freeze and adapters:
            raise RecipeError(
                f"freeze and {adapters[0]} cannot be combined: {adapters[0]} freezes all weights of the model already. "
                f"Choose where adapters go with its targets"
            )
        schedule = self.schedule.configure("schedule", Schedule)
        parameters = ParameterSettings(self.freeze, self.layer_decay)
        return TrainingComponents(optimizer, schedule, techniques, parameters, self.ema)

    def with_techniques(self, techniques: tuple[NamedSettings, ...], **changed: Any) -> Self:
        """Return the same settings with other techniques."""
        return self.model_copy(update={"techniques": techniques, **changed})

    def count_steps(self, rows: int) -> int:
        """Count the steps of the whole run on so many rows of data. The last batch of an epoch may be smaller."""
        return self.steps or max(1, round(self.epochs * ceil(rows / self.batch_size)))


def name_of(technique: Any) -> Any:
    """Return the name of a technique as a recipe writes it, or as settings hold it."""
    if isinstance(technique, Mapping):
        return technique.get("name", next(iter(technique), None))
    return getattr(technique, "name", technique)


NAMED = ("techniques", "optimizer", "schedule", "metrics", "callbacks", "objective")
"""The keys of a recipe whose values name registered classes."""


class TrainingData(Strict):
    """train: the training set, with labels. evaluate: the validation set; by default a tenth of `train` is held out.
    limit: at most so many samples of each. columns: by the task's name of a column, as `text` or `label`, the name that
    the files have for it. chat_template: a file with a template of chats in Jinja, in place of the model's own."""

    train: Path
    evaluate: Path | None = None
    limit: int | None = Field(default=None, ge=3)
    columns: dict[str, str] = Field(default_factory=dict)
    chat_template: Path | None = None


class TrainingRecipe(Training, Origin):
    """A recipe of fine-tuning: a source, its data, and how it is trained.

    objective: the loss of rows with a preferred answer, "dpo" or "orpo"; None takes the objective of the task.
    memory: bytes that the device may hold; the planner keeps within them. eval_every: steps between two evaluations; an
    epoch by default. best_by: the figure of the evaluations by which the best weights are kept; None keeps the last.
    patience: evaluations without a better figure after which the run ends; without `best_by` it is that of the loss.
    class_weights: of a classifier's loss, by class, or "balanced" by the inverse of their number. label_smoothing: the
    share of each label that all classes get alike.
    metrics: further figures of the evaluations. callbacks: what is told of the steps and evaluations, as trackers.
    generate: rows of the validation set whose answers a language model generates at each evaluation.
    """

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    data: TrainingData
    objective: NamedSettings | None = None
    memory: Bytes | None = None
    eval_every: int | None = Field(default=None, ge=1)
    best_by: str | None = None
    patience: int | None = Field(default=None, ge=1)
    generate: int = Field(default=0, ge=0)
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(gt=0)]] | None = None
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    metrics: tuple[NamedSettings, ...] = ()
    callbacks: tuple[NamedSettings, ...] = ()

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        for metric in self.metrics:
            metric.configure("metric")
        for callback in self.callbacks:
            callback.configure("callback")
        if self.objective is not None:
            self.objective.configure("preference loss")
        return self

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        changes: dict[str, Any] = {}
        if values.get("patience") is not None and values.get("best_by") is None:
            changes["best_by"] = "loss"
        if isinstance(values.get("data"), (str, Path)):
            changes["data"] = {"train": values["data"]}
        return {**values, **changes}

    @classmethod
    def load(
        cls,
        path: Path | None,
        *,
        trust: bool = False,
        learning_rate: float | None = None,
        assignments: Sequence[str] = (),
        **options: Any,
    ) -> "TrainingRecipe":
        """Read a recipe of fine-tuning, and check it down to the settings of its techniques.

        path: a YAML file; None takes `options` alone. trust: whether the file may name code by its address. options:
        those of the command line, which override the file. assignments: as "key=value", which override both.
        learning_rate: of whichever optimizer that gives. Raises RecipeError with the file, the key and what was
        expected, UntrustedCode for an address in a file that nobody trusts.
        """
        where = str(path) if path else "command line"
        content = read_yaml(path) if path else {}
        if path is not None:
            check_builder(content, path, trust=trust or options.get("builder") is not None)
        data = content.get("data")
        if isinstance(data, str):
            data = {"train": data}
        if isinstance(data, dict) and isinstance(options.get("data"), dict):
            options = options | {"data": data | options["data"]}
        try:
            content = assign_all(content | options, assignments)
            if learning_rate is not None:
                optimizer = content.get("optimizer", cls.model_fields["optimizer"].default)
                content["optimizer"] = set_learning_rate(optimizer, learning_rate)
            with trust_addresses(trust):
                return cls.model_validate(content)
        except ValidationError as error:
            raise RecipeError(explain(error, where)) from None
        except (RecipeError, UntrustedCode) as error:
            raise type(error)(f"{where}: {error}") from None

    def to_yaml(self) -> str:
        """Format the recipe as YAML; reading it gives the same recipe."""
        content = self.model_dump(mode="json", exclude_defaults=True, exclude=set(NAMED))
        content |= {"optimizer": self.optimizer.to_yaml_value(), "schedule": self.schedule.to_yaml_value()}
        content["techniques"] = [technique.to_yaml_value() for technique in self.techniques]
        for name in ("metrics", "callbacks"):
            if named := getattr(self, name):
                content[name] = [setting.to_yaml_value() for setting in named]
        if self.objective is not None:
            content["objective"] = self.objective.to_yaml_value()
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
