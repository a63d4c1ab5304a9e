"""The interface of a memory technique."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict

from train.step.compatibility import Slot

if TYPE_CHECKING:
    from train.step.step_parts import StepParts


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
    """A memory technique: its settings, and the code that puts its part into a training step.

    Its fields are the settings that a recipe gives. What it is and what it can be combined with is declared in the
    class variables below; the planner and the check of combinations read nothing else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: ClassVar[Slot]
    """The part of a step that it replaces."""
    exact: ClassVar[bool]
    """Whether losses equal those of plain FP32 training to 1e-5; where `redraws_dropout`, those of a model without
    dropout."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """What it cannot be combined with, each with the reason in a few words: techniques by name,
    "max_grad_norm" (gradient clipping), "ema" (the average of the weights), "replicate" (data parallelism), "shard"
    (fully sharded data parallelism), "zero" (that by DeepSpeed), "context" (context parallelism)."""
    requires: ClassVar[Sequence[str]] = ()
    """Techniques by name, one of which must be used too."""
    requires_of_optimizer: ClassVar[Sequence[str]] = ()
    """"per-parameter": the optimizer must be able to step one parameter at a time. "stochastic-rounding": its setting
    of that name must be on."""
    loses_zeros: ClassVar[str] = ""
    """Why pruned weights would not stay zero with this technique; empty where they do."""
    places_weights: ClassVar[bool] = False
    """Whether it decides itself where the weights lie; else they are moved to the device before it is applied."""
    is_simulated: ClassVar[bool] = True
    """Whether a simulated step shows what it saves."""
    takes_parts_of_layers: ClassVar[bool] = False
    """Whether it works where each rank computes a part of every layer (tensor parallelism), or has some of the layers
    (pipeline parallelism)."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Settings of earlier versions and their names of today: an old name is refused with the new one."""

    trains_adapters: ClassVar[bool] = False
    """Whether adapters are trained, and not the weights themselves."""

    optional: ClassVar[bool] = False
    """Whether the planner drops it from a combination that the model does not support it in."""

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        """List the settings that the memory planner tries, for batches of so many rows on a device."""
        return ()

    @property
    def fallback(self) -> Mapping[str, Any] | None:
        """Settings that the planner takes in a model that does not support these; None without any."""
        return None

    @property
    def multiplies_in_bf16(self) -> bool:
        """Whether matrix products are computed in BF16."""
        return False

    @property
    def redraws_dropout(self) -> bool:
        """Whether dropout draws other masks than in plain training, since the batch is computed in other pieces."""
        return False

    @property
    def micro_batch(self) -> int | None:
        """Rows of a micro-batch, where the batch is split; None where the model sees the whole batch."""
        return None

    @property
    def keeps_adapter(self) -> bool:
        """Whether what it trains is kept apart from the weights, and not merged into them."""
        return False

    @property
    def is_linear_in_depth(self) -> bool:
        """Whether the memory in each phase of a step is a linear function of the number of layers."""
        return True

    @abstractmethod
    def apply(self, parts: "StepParts") -> None:
        """Replace parts of the step. Raises RecipeError if the model gives it nothing to work on."""
