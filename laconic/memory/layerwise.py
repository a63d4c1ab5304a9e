"""Layers run one by one, and what each has between its input and its output lives only while it runs."""

from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from laconic.errors import RecipeError
from laconic.layerwise.layer_stack import Way, stack
from laconic.layerwise.layerwise_pass import Means
from laconic.models.repeated_layers import find_layer_lists, find_layers
from laconic.training.step.step_parts import StepParts
from laconic.training.step.technique import Slot, Technique


class Layerwise(Technique):
    """Checkpointing in two directions: of the inputs of layers only `snapshots` are kept, and a layer that is run again
    for its gradient takes `rows` rows of the batch at a time.

    Every layer runs forward twice, and where fewer snapshots are kept than there are layers, some run more often: for n
    layers and s snapshots, `revolve.advances(n, s) - (n - 1)` runs more. keep: where the snapshots lie. A layer's
    gradients are handed over once, when they are whole, for an optimizer in the backward pass to use and free.
    """

    slot: ClassVar[Slot] = "activations"
    exact: ClassVar[bool] = True
    excludes: ClassVar[dict[str, str]] = {
        "checkpoint": "both decide what is kept of a layer",
        "offload": "it keeps nothing of a layer that could be moved; keep: host moves its snapshots",
        "compile": "a compiled model has no loop over its layers",
        "replicate": "gradients that are handed over layer by layer are none that ranks could wait for",
        "shard": "gradients that are handed over layer by layer are none that ranks could wait for",
    }

    rows: int | None = Field(default=None, ge=1)
    snapshots: int | None = Field(default=None, ge=1)
    keep: Literal["device", "host"] = "device"

    @property
    def is_linear(self) -> bool:
        return self.snapshots is None

    def apply(self, parts: StepParts) -> None:
        lists = find_layer_lists(parts.module)
        if not lists:
            raise RecipeError(
                "layerwise: the model has no list of repeated layers; expected a ModuleList or Sequential of two or "
                "more modules of one class. Take accumulate, or checkpoint by module names, in its place"
            )
        every = [parameter for layer in find_layers(parts.module) for parameter in layer.parameters()]
        if len(every) != len(set(every)):
            raise RecipeError(
                "layerwise: layers share weights, whose gradients are whole only when all of them have run. Take "
                "checkpoint in its place"
            )
        if any(getattr(part, "running_mean", None) is not None for layer in lists for part in layer.modules()):
            raise RecipeError(
                "layerwise: a batch normalisation within the layers would count a batch twice, and sees only a part of "
                "it. Take offload in its place"
            )
        way = Way(Means(parts.weight_provider, parts.host, parts.device, self.rows, self.snapshots, self.keep))
        for layers in lists:
            parts.on_restore(stack(layers, way))
        parts.add_forward_context(way.open)
        for part in parts.module.modules():
            config: Any = getattr(part, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False
                parts.on_restore(partial(setattr, config, "use_cache", True))
