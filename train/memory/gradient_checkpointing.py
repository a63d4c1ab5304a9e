"""Gradient (activation) checkpointing: activations of layers are recomputed in the backward pass."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layers
from laconic.models.signature import replace_forward
from train.step.step_parts import StepParts
from train.step.technique import Proposal, Technique

EXPENSIVE = (
    "mm",
    "addmm",
    "linear",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operators that take most of the time and have outputs of the size of their input: products with weights, and fused
attention. Unfused attention is left out: its matrices are of the sequence length squared."""

Context = AbstractContextManager[Any]


class GradientCheckpointing(Technique):
    """Saves only the inputs of the repeated layers, and recomputes the rest in the backward pass (Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174). Recomputed dropout draws the same numbers, and
    batch normalization counts a batch once.

    policy: full saves nothing else; selective saves the outputs of expensive operators, which are products with weights
    and fused attention (Korthikanti et al., arXiv 2205.05198). every: checkpoint one layer of so many.
    """

    slot = "activations"
    exact = True
    takes_parts_of_layers = True

    policy: Literal["full", "selective"] = "full"
    every: int = Field(default=1, ge=1)

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return Proposal("grid", {"policy": "selective"}), Proposal("grid")

    @property
    def is_linear_in_depth(self) -> bool:
        return self.every == 1

    def apply(self, parts: StepParts) -> None:
        layers = find_layers(parts.module)
        if not layers:
            raise RecipeError(
                "gradient-checkpointing: the model has no repeated layers (a ModuleList or Sequential of modules of "
                "one class), and recomputing the whole model saves nothing. Try gradient-accumulation"
            )
        operators = EXPENSIVE if self.policy == "selective" else ()
        saved = [overload for name in operators for overload in find_overloads(name)]
        for layer in layers[:: self.every]:
            norms = find_batch_norms(layer)
            settings: dict[str, Any] = {"context_fn": partial(make_contexts, norms, saved)} if saved or norms else {}
            parts.on_restore(
                replace_forward(layer, partial(checkpoint, layer.forward, use_reentrant=False, **settings))
            )


def make_contexts(norms: list[Any], saved: list[Any]) -> tuple[Context, Context]:
    """Make the contexts of a layer's forward pass and its recomputation. saved: operators whose outputs are saved."""
    selective: Any = create_selective_checkpoint_contexts
    forward, recomputation = selective(saved) if saved else (nullcontext(), nullcontext())
    return forward, freeze_statistics(norms, recomputation) if norms else recomputation


def find_batch_norms(layer: nn.Module) -> list[Any]:
    """Find the modules in a layer that keep running statistics of the batches."""
    return [part for part in layer.modules() if getattr(part, "running_mean", None) is not None]


@contextmanager
def freeze_statistics(norms: list[Any], within: Context) -> Iterator[None]:
    """Leave running statistics as they are in the body, by a momentum of 0: they contain the batch already."""
    before = [(part.momentum, part.num_batches_tracked) for part in norms]
    for part in norms:
        part.momentum, part.num_batches_tracked = 0.0, None
    try:
        with within:
            yield
    finally:
        for part, (momentum, batches) in zip(norms, before, strict=True):
            part.momentum, part.num_batches_tracked = momentum, batches


def find_overloads(name: str) -> list[Any]:
    """Find the overloads of an ATen operator; none if this version of torch does not have it."""
    packet = getattr(torch.ops.aten, name, None)
    return [getattr(packet, overload) for overload in packet.overloads() if overload != "out"] if packet else []
