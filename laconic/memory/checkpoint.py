"""Activations that are computed twice in the place of being kept."""

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from laconic.errors import RecipeError
from laconic.memory.technique import Slot, Technique, replace_forward
from laconic.training.kit import Kit, blocks

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
    Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174). Dropout draws the same numbers again.

    policy: full keeps nothing else; selective keeps what is dear to compute: products with weights, and attention in
    one kernel (Korthikanti et al., arXiv 2205.05198). every: of how many layers one is treated so.
    """

    slot: ClassVar[Slot] = "activations"
    exact: ClassVar[bool] = True

    policy: Literal["full", "selective"] = "full"
    every: int = Field(default=1, ge=1)

    @property
    def linear(self) -> bool:
        """Only where all layers are alike."""
        return self.every == 1

    def apply(self, kit: Kit) -> None:
        layers = blocks(kit.module)
        if not layers:
            raise RecipeError(
                "checkpoint: the model has no repeated layers (a ModuleList or Sequential of modules of one class), "
                "and to compute it again as a whole saves nothing. Try accumulate"
            )
        kept: dict[str, Any] = {}
        if self.policy == "selective":
            dear = [overload for name in DEAR for overload in overloads(name)]
            kept["context_fn"] = partial(create_selective_checkpoint_contexts, dear)
        for layer in layers[:: self.every]:
            replace_forward(kit, layer, partial(checkpoint, layer.forward, use_reentrant=False, **kept))


def overloads(name: str) -> list[Any]:
    """What an operation of torch is called by, whatever it is called with; none where this torch does not have it."""
    packet = getattr(torch.ops.aten, name, None)
    return [getattr(packet, overload) for overload in packet.overloads() if overload != "out"] if packet else []
