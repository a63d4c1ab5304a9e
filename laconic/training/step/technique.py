"""The interface of a technique, and which may be combined."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
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


@dataclass(frozen=True)
class Proposal:
    """Settings of a technique that the memory planner tries.

    tier: "free" costs neither exactness nor time, and is part of every combination but plain training; "grid" is
    combined with the proposals of the other slots; "lean" is a combination of its own, which gives up more time or
    exactness for memory. config: the settings. before, after: the other techniques of a lean combination as a recipe
    writes them, in the order in which they are listed.
    """

    tier: Literal["free", "grid", "lean"]
    config: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[str | Mapping[str, Any], ...] = ()
    after: tuple[str | Mapping[str, Any], ...] = ()


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

    trains_adapters: ClassVar[bool] = False
    """Whether adapters are trained, and not the weights themselves."""

    optional: ClassVar[bool] = False
    """Whether the planner drops it from a combination that the model does not support it in."""

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        """The settings that the memory planner tries, for batches of so many rows on a device."""
        return ()

    @property
    def fallback(self) -> Mapping[str, Any] | None:
        """The settings that the planner takes in a model that does not support these; None without any."""
        return None

    @property
    def micro_batch(self) -> int | None:
        """Rows of a micro-batch, where the batch is split; None where the model sees the whole batch."""
        return None

    @property
    def linear(self) -> bool:
        """Whether the memory in each part of a step grows in a straight line with the number of layers."""
        return True

    @abstractmethod
    def apply(self, kit: Kit) -> None:
        """Put its part into the kit. Raises RecipeError where the model gives it nothing to work on."""
