"""The interface of a technique, and which may be combined."""

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
    """A frozen config beside the code that puts it to work. Its fields are the knobs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: ClassVar[Slot]
    exact: ClassVar[bool]
    """Whether the losses are those of plain FP32 training to 1e-5."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """Techniques by name, or "clip", that this one cannot be combined with, each with the reason, in a few words."""
    requires: ClassVar[Sequence[str]] = ()
    """Techniques by name, one of which must be there too."""
    requires_of_optimizer: ClassVar[Sequence[str]] = ()
    """"per-parameter": the optimizer must be able to step one parameter at a time. "stochastic-rounding": its setting
    of that name must be on."""

    places: ClassVar[bool] = False
    """Whether it decides itself where the weights lie; else they are moved to the device before it is applied."""

    simulated: ClassVar[bool] = True
    """Whether a simulated step tells what it saves."""

    @property
    def linear(self) -> bool:
        """Whether the memory in each part of a step grows in a straight line with the number of layers."""
        return True

    @abstractmethod
    def apply(self, kit: Kit) -> None:
        """Put its part into the kit. Raises RecipeError where the model gives it nothing to work on."""
