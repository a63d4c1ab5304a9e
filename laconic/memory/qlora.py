"""Adapters beside weights of four bits."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.memory.lora import Lora
from laconic.offload.memory_accounting import accounted, alike
from laconic.training.step.step_parts import StepParts

BLOCK = 64
"""Weights that have one scale."""
GROUP = 256
"""Scales that have one scale of their own, where they are quantized in their turn."""
PIECE = 2**22
"""Weights that are encoded or decoded at a time, so that what is needed on the way stays small. A multiple of BLOCK."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of NormalFloat: of a normal distribution, each stands for as many weights (Dettmers et al. 2023,
appendix E)."""


class Qlora(Lora):
    """LoRA whose frozen weights lie on the device as NF4, in blocks of 64 along their rows (Dettmers et al. 2023,
    arXiv:2305.14314): 4.5 bits a weight, 4.13 with `double`. A layer's weights are decoded when it computes, in the
    forward and again in the backward pass, and freed. The full weights are read from where the module lies, one layer
    at a time, so the device never holds them.

    When it is taken off, the adapters are merged into the DECODED weights, not into those that the model came with:
    the training has seen the decoded ones, so only with them the answers stay those of the trained model. What four
    bits lose is lost for good, even where nothing was learned.
    """

    excludes: ClassVar[Mapping[str, str]] = {
        "host-weights": "the frozen weights lie on the device in four bits, and have nothing for the host to hold",
        "pure-bf16": "adapters learn in float32, and the frozen weights are in four bits already",
    }

    base: Literal["float32", "bfloat16"] = "bfloat16"
    double: bool = True
    """Whether the blocks' scales are quantized too, to 8 bits with a scale for each 256."""

    def _keep(self, parts: StepParts, layers: Mapping[str, Any]) -> None:
        values = torch.tensor(NF4, device=parts.device)
        pairs = torch.cartesian_prod(values, values)
        for layer in layers.values():
            original = layer.get_base_layer()
            weight = parts.host.get(original.weight.data, category="temporaries")
            parts.host.wait()
            layer.base_layer = FourBit(original, weight, values, pairs, double=self.double)

    def _restore(self, layer: Any) -> None:
        layer.base_layer = layer.base_layer.restored()


class FourBit(nn.Module):
    """A linear layer, or transformers' Conv1D, whose weights are frozen and coded as NF4.

    original: the layer, which gives up its weights until `restored`. weight: them, on the device, float32.
    values: NF4, [16] float32. pairs: what a byte stands for, [256, 2] float32.
    Buffers: codes [weights / 2] uint8, two to a byte, the first in the upper half; scales [blocks], float32 or, with
    `double`, int8 in units of `units` [groups] from `mean` [].
    """

    codes: Tensor
    scales: Tensor
    units: Tensor | None
    mean: Tensor | None
    pairs: Tensor

    bias: nn.Parameter | None

    def __init__(self, original: Any, weight: Tensor, values: Tensor, pairs: Tensor, *, double: bool) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple it is no part of this module
        self._home = original.weight.device
        self.shape = weight.shape
        self.transposed = not isinstance(original, nn.Linear)
        self.bias = original.bias
        with accounted(category="parameters"):
            codes, scales = encode(weight, values)
            self.register_buffer("codes", codes)
            small, units, mean = shrink(scales) if double else (scales, None, None)
            self.register_buffer("scales", small)
            self.register_buffer("units", units)
            self.register_buffer("mean", mean)
        self.register_buffer("pairs", pairs, persistent=False)
        original.weight.data = torch.empty(0, device=self._home)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], in the dtype of `x` or of autocast."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        answer: Tensor = Product.apply(x, self)  # type: ignore[no-untyped-call]
        return answer

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights, [out, in]."""
        scales = self.scales if self.units is None or self.mean is None else grow(self.scales, self.units, self.mean)
        weight = decode(self.codes, scales, self.pairs, self.shape, dtype)
        return weight.t() if self.transposed else weight

    def restored(self) -> Any:
        """The original layer, with the decoded weights, float32, where they were."""
        original = self._original[0]
        weight = self.dense(torch.float32)
        original.weight.data = (weight.t() if self.transposed else weight).contiguous().to(self._home)
        original.bias = self.bias
        return original


class Product(torch.autograd.Function):
    """x W^T + bias for frozen weights, which are decoded for each pass, and never kept for the backward one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBit) -> Tensor:
        """The layer itself is remembered, not its tensors: hooks that move saved tensors have nothing to move here."""
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return functional.linear(x, layer.dense(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of x; that of the weights nobody wants."""
        return gradient @ ctx.layer.dense(gradient.dtype), None


def encode(weight: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [weights / 2] uint8 and the largest magnitude of each block [blocks] float32. The last block is filled up
    with zeros."""
    flat = functional.pad(weight.reshape(-1), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    codes = torch.empty(flat.numel() // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(flat), dtype=torch.float32, device=weight.device)
    between = (values[1:] + values[:-1]) / 2
    with accounted(category="temporaries"):
        for start in alike(range(0, len(flat), PIECE // BLOCK)):
            piece = flat[start : start + PIECE // BLOCK].float()
            scale = scales[start : start + len(piece)].copy_(piece.abs().amax(1))
            piece = piece / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
            nearest = torch.bucketize(piece, between, out_int32=True).view(-1, 2)
            part = codes[start * BLOCK // 2 : start * BLOCK // 2 + len(nearest)]
            part.copy_(nearest[:, 0] * len(NF4) + nearest[:, 1])
    return codes, scales


def decode(codes: Tensor, scales: Tensor, pairs: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The weights that codes stand for."""
    flat = torch.empty(len(scales), BLOCK, dtype=dtype, device=codes.device)
    for start in alike(range(0, len(scales), PIECE // BLOCK)):
        part = flat[start : start + PIECE // BLOCK]
        first = start * BLOCK // 2
        index = codes[first : first + part.numel() // 2].int()
        values = pairs.index_select(0, index).view(-1, BLOCK)
        part.copy_(values.mul_(scales[start : start + len(part), None]))  # `out=part` would take as much again
    return flat.view(-1)[: shape.numel()].view(shape)


def shrink(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales as whole numbers [blocks] int8 of units [groups] from their mean []. (The paper has 8-bit floats here;
    evenly spaced ones are nearer to values that lie close together.)"""
    mean = scales.mean()
    groups = functional.pad(scales - mean, (0, -len(scales) % GROUP)).view(-1, GROUP)
    units = groups.abs().amax(1) / 127
    small = (groups / units.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return small.view(-1)[: len(scales)].clone(), units, mean


def grow(small: Tensor, units: Tensor, mean: Tensor) -> Tensor:
    """The scales, [blocks] float32."""
    return small * units.repeat_interleave(GROUP)[: len(small)] + mean
