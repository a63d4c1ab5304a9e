"""Weights, gradients and the optimizer's state on the host; on the device what the layer under way computes with."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from laconic.models.repeated_layers import find_layers
from laconic.offload.host import Host
from laconic.offload.memory_accounting import accounted
from laconic.offload.streamed_weights import Doubles, Streamed, narrowed
from laconic.training.optimizers.host_optimizer import make_host_optimizer
from laconic.training.step.cast_inputs import cast_inputs_to_bf16
from laconic.training.step.step_parts import StepParts
from laconic.training.step.technique import Slot, Technique

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class HostWeights(Technique):
    """The model's parameters are float32 and stay on the host, where the optimizer steps. Layers are streamed to the
    device one by one, a copy of the rest stays there.

    dtype: of what the device computes with. fp32 is exact; bf16 is mixed precision with float32 masters (Micikevicius
    et al., arXiv 1710.03740), with half of the traffic. Undone, the model is left on the host.
    """

    slot: ClassVar[Slot] = "weights"
    exact: ClassVar[bool] = False
    places: ClassVar[bool] = True
    loses_zeros: ClassVar[str] = "keeps copies of the weights on the device"
    requires: ClassVar[Sequence[str]] = ("layerwise",)
    excludes: ClassVar[Mapping[str, str]] = {
        "fp16": "its scaler looks for the gradients on the device. bf16 layers need none",
        "in-backward": "the gradient of an embedding that is also the head arrives in two parts",
        "pure-bf16": "the weights on the host are float32",
    }

    dtype: Literal["bf16", "fp32"] = "bf16"

    def apply(self, parts: StepParts) -> None:
        for parameter in parts.module.parameters():
            parameter.data = hosted(parts.host, parameter, travels=self.dtype == "fp32")
        for owner in parts.module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(parts.device))
        if self.dtype == "bf16":
            for part in parts.module.modules():
                if narrowed(part):
                    parts.on_restore(part.register_forward_pre_hook(like_weights, with_kwargs=True).remove)
        layers = find_layers(parts.module)
        supply = Streamed(parts.host, DTYPES[self.dtype])
        for layer in layers:
            supply.hold(layer)
        supply.refresh()
        doubles = Doubles(parts.module, {parameter for layer in layers for parameter in layer.parameters()}, supply)

        def refresh() -> None:
            supply.refresh()
            doubles.refresh()

        parts.wrap_optimizer(partial(make_host_optimizer, after=refresh))
        parts.provide_weights(supply)
        parts.add_forward_context(doubles.swapped)
        parts.on_restore(lambda: restore(parts.module))


def like_weights(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer with weights of its own is given, in BF16 where they are: FP32 comes from images and buffers."""
    lowers = any(weight.dtype is torch.bfloat16 for weight in part.parameters(recurse=False))
    return cast_inputs_to_bf16(part, args, kwargs) if lowers else None


def hosted(host: Host, parameter: nn.Parameter, *, travels: bool) -> Tensor:
    """The parameter's values on the host, float32 where they are floating-point; in pinned memory if they travel."""
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    with accounted("host", "parameters"):
        room = host.empty(parameter, dtype) if travels else torch.empty(parameter.shape, dtype=dtype, device="cpu")
        return room.copy_(parameter.data)


def restore(module: nn.Module) -> None:
    """Everything on the host."""
    module.to("cpu")
