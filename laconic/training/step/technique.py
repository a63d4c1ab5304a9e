"""The interface of a memory technique."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from laconic.training.step.parts import Kit

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
"""The part of a step that a technique replaces, in the order in which techniques are applied."""


class Technique(BaseModel, ABC):
    """A memory technique: its settings, and the code that puts its part into a training step.

    Its fields are the settings that a recipe gives. What it is and what it can be combined with is declared in the
    class variables below; the planner and the check of combinations read nothing else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: ClassVar[Slot]
    """The part of a step that it replaces."""
    exact: ClassVar[bool]
    """Whether the losses are those of plain FP32 training to 1e-5."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """What it cannot be combined with, each with the reason in a few words: techniques by name, "clip" (gradient
    clipping), "replicate" and "shard" (data parallelism)."""
    requires: ClassVar[Sequence[str]] = ()
    """Techniques by name, one of which must be there too."""
    requires_of_optimizer: ClassVar[Sequence[str]] = ()
    """"per-parameter": the optimizer must be able to step one parameter at a time. "stochastic-rounding": its setting
    of that name must be on."""
    places_weights: ClassVar[bool] = False
    """Whether it decides itself where the weights lie; else they are moved to the device before it is applied."""
    is_simulated: ClassVar[bool] = True
    """Whether a simulated step shows what it saves."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Settings of earlier versions and their names of today: an old name is refused with the new one."""

    @property
    def is_linear_in_depth(self) -> bool:
        """Whether the memory in each phase of a step is a linear function of the number of layers."""
        return True

    @abstractmethod
    def apply(self, kit: Kit) -> None:
        """Put its part into the kit. Raises RecipeError if the model gives it nothing to work on."""
