"""Activations that are computed twice in the place of being kept."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layers
from laconic.models.signature import replace_forward
from laconic.training.step.step_parts import StepParts
from laconic.training.step.technique import Slot, Technique

DEAR = (
    "mm",
    "addmm",
    "linear",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operations that take most of the time and give tensors of the size of their input: products with weights, and
attention in one kernel. Attention in several is left out: its matrices are of the length squared."""


class Checkpointing(Technique):
    """Of each repeated layer only the input is kept; the rest is computed again in the backward pass (Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174). Dropout draws the same numbers again, and a batch
    normalisation counts a batch once.

    policy: full keeps nothing else; selective keeps what is dear to compute: products with weights, and attention in
    one kernel (Korthikanti et al., arXiv 2205.05198). every: of how many layers one is treated so.
    """

    slot: ClassVar[Slot] = "activations"
    exact: ClassVar[bool] = True

    policy: Literal["full", "selective"] = "full"
    every: int = Field(default=1, ge=1)

    @property
    def is_linear(self) -> bool:
        """Only where all layers are alike."""
        return self.every == 1

    def apply(self, parts: StepParts) -> None:
        layers = find_layers(parts.module)
        if not layers:
            raise RecipeError(
                "checkpoint: the model has no repeated layers (a ModuleList or Sequential of modules of one class), "
                "and to compute it again as a whole saves nothing. Try accumulate"
            )
        dear = [overload for name in DEAR for overload in overloads(name)] if self.policy == "selective" else []
        for layer in layers[:: self.every]:
            again = partial(contexts, normalisations(layer), dear)
            kept: dict[str, Any] = {"context_fn": again} if dear or normalisations(layer) else {}
            parts.on_restore(replace_forward(layer, partial(checkpoint, layer.forward, use_reentrant=False, **kept)))


Context = AbstractContextManager[Any]


def contexts(counting: list[Any], dear: list[Any]) -> tuple[Context, Context]:
    """Round the first run of a layer, and round the second."""
    selective: Any = create_selective_checkpoint_contexts
    first, second = selective(dear) if dear else (nullcontext(), nullcontext())
    return first, counted(counting, second) if counting else second


def normalisations(layer: nn.Module) -> list[Any]:
    """What in a layer keeps statistics of the batches that it has seen."""
    return [part for part in layer.modules() if getattr(part, "running_mean", None) is not None]


@contextmanager
def counted(counting: list[Any], within: Context) -> Iterator[None]:
    """The batch is in the statistics already: with a momentum of 0 they stay as they are."""
    before = [(part.momentum, part.num_batches_tracked) for part in counting]
    for part in counting:
        part.momentum, part.num_batches_tracked = 0.0, None
    try:
        with within:
            yield
    finally:
        for part, (momentum, batches) in zip(counting, before, strict=True):
            part.momentum, part.num_batches_tracked = momentum, batches


def overloads(name: str) -> list[Any]:
    """What an operation of torch is called by, whatever it is called with; none where this torch does not have it."""
    packet = getattr(torch.ops.aten, name, None)
    return [getattr(packet, overload) for overload in packet.overloads() if overload != "out"] if packet else []
