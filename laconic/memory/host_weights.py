"""Weights, gradients and the optimizer's state on the host; on the device what the layer under way computes with."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.memory.chunked_cross_entropy import DEFERRED
from laconic.memory.pure_bf16 import in_bf16
from laconic.offload.host import Host
from laconic.offload.memory_accounting import accounted
from laconic.offload.streamed_weights import Doubles, Streamed, narrowed
from laconic.training.step.parts import Groups, Kit, blocks
from laconic.training.step.technique import Proposal, Slot, Technique

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
    requires: ClassVar[Sequence[str]] = ("layerwise",)
    excludes: ClassVar[Mapping[str, str]] = {
        "fp16": "its scaler looks for the gradients on the device. bf16 layers need none",
        "in-backward": "the gradient of an embedding that is also the head arrives in two parts",
        "pure-bf16": "the weights on the host are float32",
    }

    dtype: Literal["bf16", "fp32"] = "bf16"

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return [
            Proposal("lean", {"dtype": dtype}, before=({"layerwise": {"rows": 1, "keep": "host"}}, DEFERRED))
            for dtype in ("fp32", "bf16")
        ]

    def apply(self, kit: Kit) -> None:
        for parameter in kit.module.parameters():
            parameter.data = hosted(kit.host, parameter, travels=self.dtype == "fp32")
        for owner in kit.module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(kit.device))
        if self.dtype == "bf16":
            for part in kit.module.modules():
                if narrowed(part):
                    kit.undo.append(part.register_forward_pre_hook(like_weights, with_kwargs=True).remove)
        layers = blocks(kit.module)
        supply = Streamed(kit.host, DTYPES[self.dtype])
        for layer in layers:
            supply.hold(layer)
        supply.refresh()
        doubles = Doubles(kit.module, {parameter for layer in layers for parameter in layer.parameters()}, supply)

        def refresh() -> None:
            supply.refresh()
            doubles.refresh()

        make = kit.make_optimizer
        kit.make_optimizer = lambda groups: on_host(make, groups, refresh)
        kit.supply = supply
        kit.forward.append(doubles.swapped)
        kit.undo.append(lambda: restore(kit.module))


def like_weights(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer with weights of its own is given, in BF16 where they are: FP32 comes from images and buffers."""
    lowers = any(weight.dtype is torch.bfloat16 for weight in part.parameters(recurse=False))
    return in_bf16(part, args, kwargs) if lowers else None


def hosted(host: Host, parameter: nn.Parameter, *, travels: bool) -> Tensor:
    """The parameter's values on the host, float32 where they are floating-point; in pinned memory if they travel."""
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    with accounted("host", "parameters"):
        room = host.empty(parameter, dtype) if travels else torch.empty(parameter.shape, dtype=dtype, device="cpu")
        return room.copy_(parameter.data)


def on_host(make: Callable[[Groups], Optimizer], groups: Groups, after: Callable[[], None]) -> Optimizer:
    """The optimizer, whose bytes count as the host's; `after` follows each of its steps."""
    optimizer = make(groups)
    stack = ExitStack()

    def before(*_: Any) -> None:
        stack.enter_context(accounted("host"))

    def behind(*_: Any) -> None:
        after()
        stack.close()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(behind)
    return optimizer


def restore(module: nn.Module) -> None:
    """Everything on the host."""
    module.to("cpu")
