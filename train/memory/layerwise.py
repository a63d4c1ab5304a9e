"""Layerwise training: layers run one at a time, and what a layer saves lives only while it runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layer_lists, find_layers
from train.layerwise.layer_stack import LayerStack, StackState, mix_into
from train.layerwise.layerwise_pass import PassConfig
from train.memory.chunked_cross_entropy import DEFERRED
from train.step.step_parts import StepParts
from train.step.technique import Proposal, Technique


class Layerwise(Technique):
    """Activation checkpointing over layers and over rows: at most `snapshots` inputs of layers are stored, and a layer
    is recomputed for its gradient on micro-batches of `rows` rows.

    Every layer runs forward twice; with fewer snapshots than layers some run more often (binomial checkpointing:
    Griewank and Walther, revolve, ACM TOMS 26, 2000): for n layers and s snapshots,
    `revolve.count_advances(n, s) - (n - 1)` additional runs. snapshots_on: where the snapshots are stored. A layer's
    gradients are passed on once, when they are complete, so an optimizer in the backward pass can use and free them.
    """

    slot = "activations"
    exact = True
    excludes: ClassVar[Mapping[str, str]] = {
        "gradient-checkpointing": "both decide what is saved of a layer",
        "activation-offload": "no activation within a layer is saved; snapshots_on: host moves the snapshots",
        "compile": "a compiled model has no loop over its layers",
        "replicate": "ranks could not average gradients that are passed on layer by layer",
        "shard": "ranks could not average gradients that are passed on layer by layer",
    }
    renamed: ClassVar[Mapping[str, str]] = {"keep": "snapshots_on"}

    rows: int | None = Field(default=None, ge=1)
    snapshots: int | None = Field(default=None, ge=1)
    snapshots_on: Literal["device", "host"] = "device"

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return (
            Proposal("lean", {"rows": 1, "snapshots": 4}, after=(DEFERRED, "optimizer-in-backward")),
            Proposal("lean", {"rows": 1}, after=("bf16", "optimizer-in-backward")),
        )

    @property
    def redraws_dropout(self) -> bool:
        return self.rows is not None

    @property
    def is_linear_in_depth(self) -> bool:
        return self.snapshots is None

    def apply(self, parts: StepParts) -> None:
        lists = find_layer_lists(parts.module)
        if not lists:
            raise RecipeError(
                "layerwise: the model has no list of repeated layers; expected a ModuleList or Sequential of two or "
                "more modules of one class. Use gradient-accumulation instead"
            )
        parameters = [parameter for layer in find_layers(parts.module) for parameter in layer.parameters()]
        if len(parameters) != len(set(parameters)):
            raise RecipeError(
                "layerwise: layers share weights, whose gradients are complete only when all of them have run. Use "
                "gradient-checkpointing instead"
            )
        if any(getattr(part, "running_mean", None) is not None for layer in lists for part in layer.modules()):
            raise RecipeError(
                "layerwise: a batch normalization within the layers would count a batch twice, and sees only a "
                "micro-batch of it. Use activation-offload instead"
            )
        pass_config = PassConfig(
            parts.weight_provider, parts.host, parts.device, self.rows, self.snapshots, self.snapshots_on
        )
        state = StackState(pass_config)
        for layers in lists:
            parts.on_restore(mix_into(layers, LayerStack, stack_state=state))
        parts.add_forward_context(state.forward_pass)
        for part in parts.module.modules():
            config: Any = getattr(part, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False
                parts.on_restore(partial(setattr, config, "use_cache", True))
