"""The interface of a technique, which replaces a part of the training step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from laconic.training.step.step_parts import StepParts

Slot = Literal["allocator", "batch", "weights", "attention", "loss", "precision", "activations", "compile", "optimizer"]
SLOTS: tuple[Slot, ...] = (
    "allocator",
    "batch",
    "weights",
    "attention",
    "loss",
    "precision",
    "activations",
    "compile",
    "optimizer",
)
"""The parts of a step that techniques replace, in the order in which techniques are applied."""


class Technique(BaseModel, ABC):
    """The settings of a technique, and the code that applies it to a training step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: ClassVar[Slot]
    exact: ClassVar[bool]
    """Whether losses equal those of plain FP32 training to 1e-5."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """What this technique cannot be combined with, and why: techniques by name, "max_grad_norm" (gradient clipping),
    "replicate" (data parallelism) or "shard" (fully sharded data parallelism)."""
    requires: ClassVar[Sequence[str]] = ()
    """Techniques by name, one of which must be used too."""
    requires_of_optimizer: ClassVar[Sequence[str]] = ()
    """"per-parameter": the optimizer must be able to step one parameter at a time. "stochastic-rounding": its setting
    of that name must be on."""

    loses_zeros: ClassVar[str] = ""
    """Why pruned weights would not stay zero with this technique; empty where they do."""

    places: ClassVar[bool] = False
    """Whether it places the weights itself; else they are moved to the device before it is applied."""

    simulated: ClassVar[bool] = True
    """Whether the memory that it saves can be predicted by simulating a step."""

    @property
    def is_linear(self) -> bool:
        """Whether the memory in each phase of a step grows linearly with the number of layers."""
        return True

    @abstractmethod
    def apply(self, parts: StepParts) -> None:
        """Replace parts of the step. Raises RecipeError where the technique does not apply to the model."""
