"""The interface of a callback of fine-tuning: settings, and the reports of the steps and the evaluations of a run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class RunDescription:
    """A run of fine-tuning. folder: for its logs. config: its settings, JSON-ready. key: the same when resumed."""

    folder: Path
    config: Mapping[str, Any]
    key: str


@dataclass(frozen=True)
class StepReport:
    """The report of one training step.

    step: steps done, from 1. loss: mean of the batch. lr: learning rate of the first parameter group. tokens: of the
    batch, without padding; at most the rows where these are not texts. rows: of the batch. seconds: of the step,
    waiting included. waited: seconds without a batch. norm: of the gradient before clipping; None without clipping.
    is_skipped: whether the batch had no loss term, and nothing was learned from it; its loss is NaN then.
    """

    step: int
    loss: float
    lr: float
    tokens: int
    rows: int
    seconds: float
    waited: float
    norm: float | None = None
    is_skipped: bool = False

    @property
    def unit(self) -> str:
        """Unit of throughput: tokens, or rows where they are not texts."""
        return "tokens" if self.tokens > self.rows else "rows"

    @property
    def count(self) -> int:
        """Tokens or rows that were learned from, in `unit`."""
        return 0 if self.is_skipped else max(self.tokens, self.rows)


class RunLog:
    """An observer of a training run; each method may be left out."""

    def step(self, report: StepReport) -> None:
        """Take note of a finished step."""

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Take note of an evaluation after a number of steps, 0 before training."""

    def close(self) -> None:
        """Finish, since the run is over for whatever reason."""


class Callback(BaseModel, ABC):
    """The settings of a callback."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def open(self, run: RunDescription) -> RunLog:
        """Begin with a run, or go on with one that is resumed. Raises MissingPackage."""


def step_figures(report: StepReport) -> dict[str, float]:
    """Return the figures of a step that trackers log, under the names that TensorBoard gets."""
    figures = {"train/loss": report.loss, "train/lr": report.lr, "train/gradient_norm": report.norm}
    figures[f"train/{report.unit}_per_second"] = report.count / max(report.seconds, 1e-9)
    if report.is_skipped:
        figures["train/loss"] = None
    return {name: float(value) for name, value in figures.items() if value is not None}
