"""Schedules: how the learning rate rises and falls over a run."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class Schedule(BaseModel, ABC):
    """The settings of a schedule. warmup: share of the steps in which the rate rises from near zero."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    warmup: float = Field(default=0.0, ge=0, lt=1)

    @abstractmethod
    def fall(self, progress: float) -> float:
        """Return the factor of the learning rate after the warm-up; progress from 0 to 1."""

    def factor(self, step: float, steps: int) -> float:
        """Return the factor of the learning rate in a step, counted from 0, of a run of `steps`."""
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        return self.fall(min(1.0, (step - rising) / max(1, steps - rising)))

    def build(self, optimizer: Optimizer, steps: int) -> "Scheduler":
        """Make the scheduler of a run of `steps`, to be stepped after each step of the optimizer.

        It touches nothing but the `lr` of each group, as a factor of the one that the group began with.
        """
        return Scheduler(optimizer, lambda step: self.factor(step, steps), steps)


class Scheduler(LambdaLR):
    """torch's, which also puts the learning rate back when its state is loaded, and can be made to hurry."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[float], float], steps: int) -> None:
        """factor: of the learning rate, by the step. steps: of the whole run."""
        self.steps = steps
        self.since, self.place, self.pace = 0, 0.0, 1.0
        super().__init__(optimizer, lambda step: factor(self.reached(step)))

    def step(self, epoch: int | None = None) -> None:
        """Step as torch does, without its warning where the optimizer has not stepped yet: a batch that was skipped is
        a step of the schedule, too, be it the first."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
            super().step(epoch)

    def reached(self, step: int) -> float:
        """Return the place of a step in the schedule: its own number, unless the schedule was hurried."""
        return self.place + (step - self.since) * self.pace

    @property
    def ended(self) -> bool:
        """Whether nothing is left of the schedule."""
        return self.reached(self.last_epoch) > self.steps - 0.5

    def halved(self, step: int) -> bool:
        """Return whether half of the schedule is behind after a step."""
        return self.reached(step) >= self.steps / 2

    def hurry(self, left: float) -> None:
        """Let the rest of the schedule take `left` steps from now on."""
        self.place, self.since = self.reached(self.last_epoch), self.last_epoch
        self.pace = (self.steps - self.place) / max(left, 1.0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = rate


class Constant(Schedule):
    """The rate as it is, after the warm-up."""

    def fall(self, progress: float) -> float:
        return 1.0


class Linear(Schedule):
    """Down to `floor` times the rate in a straight line."""

    warmup: float = Field(default=0.1, ge=0, lt=1)
    floor: float = Field(default=0.0, ge=0, le=1)

    def fall(self, progress: float) -> float:
        return 1 - (1 - self.floor) * progress


class Cosine(Schedule):
    """Down to `floor` times the rate along half a cosine (Loshchilov and Hutter, arXiv 1608.03983)."""

    warmup: float = Field(default=0.1, ge=0, lt=1)
    floor: float = Field(default=0.0, ge=0, le=1)

    def fall(self, progress: float) -> float:
        return between(1.0, self.floor, progress)


class OneCycle(Schedule):
    """Up along half a cosine from `start` times the rate, and down to `end` times it (Smith, arXiv 1708.07120)."""

    warmup: float = Field(default=0.3, gt=0, lt=1)
    start: float = Field(default=1 / 25, gt=0, le=1)
    end: float = Field(default=1 / 250_000, ge=0, le=1)

    def factor(self, step: float, steps: int) -> float:
        top = max(0.0, self.warmup * steps - 1)
        if step < top:
            return between(self.start, 1.0, step / top)
        return self.fall(min(1.0, (step - top) / max(1.0, steps - 1 - top)))

    def fall(self, progress: float) -> float:
        return between(1.0, self.end, progress)


def between(first: float, last: float, progress: float) -> float:
    """Interpolate from first to last along half a cosine."""
    return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2
