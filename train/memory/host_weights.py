"""Weights, gradients and optimizer state on the host; the device holds the weights of the layer that runs."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from laconic.models.repeated_layers import find_layers
from train.memory.chunked_cross_entropy import DEFERRED
from train.offload.host_memory import HostMemory, account_steps_on_host
from train.offload.memory_accounting import account_as
from train.offload.streamed_weights import ResidentCopies, StreamedWeights, may_compute_in_16_bits
from train.step.cast_inputs import cast_inputs_to_bf16
from train.step.step_parts import StepParts
from train.step.technique import Proposal, Technique

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class HostWeights(Technique):
    """Keeps FP32 master weights, gradients and optimizer state on the host, where the optimizer steps. The weights of
    the repeated layers are streamed to the device one layer at a time; the device holds a copy of all others (Ren et
    al., ZeRO-Offload, arXiv 2101.06840).

    dtype: of the computation on the device. fp32 is exact; bf16 is mixed precision with FP32 master weights
    (Micikevicius et al., arXiv 1710.03740), and halves the traffic. Afterwards the model stays on the host.
    """

    slot = "weights"
    exact = False
    places_weights = True
    loses_zeros = "keeps copies of the weights on the device"
    requires = ("layerwise",)
    excludes: ClassVar[Mapping[str, str]] = {
        "fp16": "its gradient scaler looks for the gradients on the device. bf16 layers need none",
        "optimizer-in-backward": "the gradient of an embedding that is also the head arrives in two parts",
        "pure-bf16": "the weights on the host are float32",
        "zero": "both decide where weights are",
    }

    dtype: Literal["bf16", "fp32"] = "bf16"

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return [
            Proposal("lean", {"dtype": dtype}, before=({"layerwise": {"rows": 1, "snapshots_on": "host"}}, DEFERRED))
            for dtype in ("fp32", "bf16")
        ]

    @property
    def multiplies_in_bf16(self) -> bool:
        return self.dtype == "bf16"

    def apply(self, parts: StepParts) -> None:
        for parameter in parts.module.parameters():
            parameter.data = move_to_host(parts.host, parameter, is_streamed=self.dtype == "fp32")
        for owner in parts.module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(parts.device))
        if self.dtype == "bf16":
            for part in parts.module.modules():
                if may_compute_in_16_bits(part):
                    parts.on_restore(part.register_forward_pre_hook(cast_inputs_like_weights, with_kwargs=True).remove)
        layers = find_layers(parts.module)
        provider = StreamedWeights(parts.host, DTYPES[self.dtype])
        for layer in layers:
            provider.add_layer(layer)
        provider.refresh()
        streamed = {parameter for layer in layers for parameter in layer.parameters()}
        copies = ResidentCopies(parts.module, streamed, provider)

        def refresh() -> None:
            provider.refresh()
            copies.refresh()

        parts.wrap_optimizer(lambda make, groups: account_steps_on_host(make(groups), refresh))
        parts.on_load(refresh)
        parts.provide_weights(provider)
        parts.add_forward_context(copies.substitute)
        parts.on_restore(lambda: move_module_to_host(parts.module))


def cast_inputs_like_weights(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast a module's FP32 inputs to BF16, as a forward pre-hook, if a weight of its own is BF16 at present."""
    is_bf16 = any(weight.dtype is torch.bfloat16 for weight in part.parameters(recurse=False))
    return cast_inputs_to_bf16(part, args, kwargs) if is_bf16 else None


def move_to_host(host: HostMemory, parameter: nn.Parameter, *, is_streamed: bool) -> Tensor:
    """Copy a parameter's values to the host, floating-point ones as FP32; to pinned memory if they are streamed."""
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    with account_as("host", "parameters"):
        if is_streamed:
            values = host.empty_like(parameter, dtype)
        else:
            values = torch.empty(parameter.shape, dtype=dtype, device="cpu")
        return values.copy_(parameter.data)


def move_module_to_host(module: nn.Module) -> None:
    """Move all parameters and buffers to the host."""
    module.to("cpu")
