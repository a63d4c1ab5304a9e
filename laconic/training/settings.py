"""How a model is trained: the part of a recipe that fine-tuning, distillation and healing share."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from laconic.config import NamedSettings, Strict, explain, read_yaml
from laconic.errors import RecipeError
from laconic.recipes.recipe import Origin
from laconic.training.data.batch_loader import FeedSettings
from laconic.training.optimizers import Optimizer
from laconic.training.optimizers.schedule import Schedule
from laconic.training.parallel.mesh import Mesh
from laconic.training.step.legality import check
from laconic.training.step.technique import Technique
from laconic.units import Bytes


@dataclass(frozen=True)
class Parts:
    """What the names in the settings stand for."""

    optimizer: Optimizer
    schedule: Schedule
    techniques: Mapping[str, Technique]


class Training(Strict):
    """batch: rows per step, over all devices. length: tokens at which texts are cut; the model's own limit where it is
    not given. steps stands above epochs. clip: the largest norm of the gradient. every: steps between two snapshots.
    mesh: how it is spread over the ranks that were started.
    """

    batch: int = Field(default=16, ge=1)
    length: int | None = Field(default=None, ge=1)
    epochs: float = Field(default=3.0, gt=0)
    steps: int | None = Field(default=None, ge=1)
    optimizer: NamedSettings = NamedSettings(name="adamw", config={"lr": 5e-5, "weight_decay": 0.01})
    schedule: NamedSettings = NamedSettings(name="linear")
    clip: float | None = Field(default=1.0, gt=0)
    techniques: tuple[NamedSettings, ...] = ()
    feed: FeedSettings = FeedSettings()
    mesh: Mesh = Mesh()
    every: int = Field(default=200, ge=1)
    seed: int = Field(default=0, ge=0)

    @field_validator("techniques")
    @classmethod
    def _once(cls, techniques: tuple[NamedSettings, ...]) -> tuple[NamedSettings, ...]:
        names = [technique.name for technique in techniques]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is given twice; give each technique once, with all its settings")
        return techniques

    @model_validator(mode="after")
    def _sound(self) -> Self:
        # A stage that is wrongly set is found before anything runs, and not after an hour of the stages before it.
        self.parts()
        return self

    def parts(self) -> Parts:
        """The optimizer, the schedule and the techniques. Raises RecipeError where one is unknown, wrongly set, or
        cannot be combined with another."""
        techniques = {named.name: named.configure("technique", Technique) for named in self.techniques}
        optimizer = self.optimizer.configure("optimizer", Optimizer)
        check(techniques, optimizer, clip=self.clip)
        return Parts(optimizer, self.schedule.configure("schedule", Schedule), techniques)

    def with_techniques(self, techniques: tuple[NamedSettings, ...], **changed: Any) -> Self:
        """The same settings with other techniques."""
        return self.model_copy(update={"techniques": techniques, **changed})

    def count(self, rows: int) -> int:
        """Steps of the whole run, for so many rows of data, of which the last batch of an epoch may have fewer."""
        return self.steps or max(1, round(self.epochs * ceil(rows / self.batch)))


class TrainingData(Strict):
    """train: the samples with their labels. evaluate: what the result is judged by; without it, a tenth of `train` is
    set aside. limit: at most so many samples of each."""

    train: Path
    evaluate: Path | None = None
    limit: int | None = Field(default=None, ge=3)


class TrainingRecipe(Training, Origin):
    """A source, its data, and how it is trained. memory: what the device may hold; the planner keeps within it."""

    data: TrainingData
    memory: Bytes | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_file(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and isinstance(values.get("data"), (str, Path)):
            return {**values, "data": {"train": values["data"]}}
        return values

    @classmethod
    def load(cls, path: Path | None, **given: Any) -> "TrainingRecipe":
        """Read a recipe of training, and check it down to the settings of its techniques.

        path: a YAML file; None takes what is given alone. given: what the command line says; it stands above the file.
        Raises RecipeError with the file, the key and what was expected.
        """
        where = str(path) if path else "command line"
        content = read_yaml(path) if path else {}
        data = content.get("data")
        if isinstance(data, str):
            data = {"train": data}
        if isinstance(data, dict) and isinstance(given.get("data"), dict):
            given = given | {"data": data | given["data"]}
        try:
            return cls.model_validate(content | given)
        except ValidationError as error:
            raise RecipeError(explain(error, where)) from None
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from None

    def to_yaml(self) -> str:
        """As it would be written; reading it gives the same recipe."""
        content = self.model_dump(mode="json", exclude_defaults=True, exclude={"techniques", "optimizer", "schedule"})
        content |= {"optimizer": self.optimizer.to_yaml_value(), "schedule": self.schedule.to_yaml_value()}
        content["techniques"] = [technique.to_yaml_value() for technique in self.techniques]
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
