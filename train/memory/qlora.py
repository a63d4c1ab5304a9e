"""QLoRA: low-rank adapters beside frozen weights quantized to 4 bits (Dettmers et al. 2023, arXiv 2305.14314)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.memory.lora import Lora
from train.offload.chunked_loops import chunks
from train.offload.memory_accounting import account_as
from train.step.step_parts import StepParts
from train.step.technique import Proposal

BLOCK = 64
"""The number of weights that share a scale."""
GROUP = 256
"""The number of scales that share a scale of their own under double quantization."""
CHUNK = 2**22
"""Weights that are quantized or dequantized at a time, so that temporaries stay small. A multiple of BLOCK."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of NormalFloat4: quantiles of a normal distribution (Dettmers et al. 2023, appendix E)."""


class Qlora(Lora):
    """LoRA whose frozen weights are kept on the device as NF4, in blocks of 64 along their rows (Dettmers et al. 2023,
    arXiv 2305.14314): 4.5 bits a weight, 4.13 with double quantization. A layer's weights are dequantized when it
    computes, in the forward and again in the backward pass, and freed. The full weights are read from where the module
    lies, one layer at a time, so the device never holds them.

    Afterwards the adapters are merged into the DEQUANTIZED weights, not into the original ones: training has seen the
    dequantized ones, so only with them the outputs stay those of the trained model. The loss of 4-bit quantization is
    permanent, even where nothing was trained.
    """

    excludes: ClassVar[Mapping[str, str]] = {
        "host-weights": "the frozen weights lie on the device in four bits, and have nothing for the host to hold",
        "pure-bf16": "adapters are trained in float32, and the frozen weights are in four bits already",
        "zero": "DeepSpeed takes float32 weights",
    }
    renamed: ClassVar[Mapping[str, str]] = {**Lora.renamed, "double": "double_quantization"}

    takes_parts_of_layers = False

    base_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    double_quantization: bool = True
    """Whether the scales of blocks are quantized too, to 8 bits with a scale for each 256."""

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return (
            Proposal(
                "lean",
                after=(
                    "bf16",
                    "gradient-checkpointing",
                    "gradient-accumulation",
                    {"chunked-cross-entropy": {"chunk": 128}},
                ),
            ),
        )

    def _encode_frozen(self, parts: StepParts, layers: Mapping[str, Any]) -> None:
        values = torch.tensor(NF4, device=parts.device)
        pairs = torch.cartesian_prod(values, values)
        for layer in layers.values():
            original = layer.get_base_layer()
            weight = parts.host.copy_to_device(original.weight.data, category="temporaries")
            parts.host.wait()
            layer.base_layer = Nf4Linear(original, weight, values, pairs, double=self.double_quantization)

    def _read_frozen(self, layer: Any) -> Tensor:
        frozen: Nf4Linear = layer.get_base_layer()
        weight = frozen.dequantize(torch.float32)
        return weight.t() if frozen.transposed else weight

    def _decode_frozen(self, layer: Any) -> None:
        layer.base_layer = layer.base_layer.restore()


class Nf4Linear(nn.Module):
    """A linear layer, or transformers' Conv1D, with frozen weights quantized to NF4.

    original: the layer, which holds no weights until `restore`. weight: its weights on the device, float32.
    values: NF4, [16] float32. pairs: the two values of each byte, [256, 2] float32. double: quantize the scales too.
    Buffers: codes [weights / 2] uint8, two to a byte, the first in the upper half; scales [blocks], float32 or, with
    `double`, int8 in units of `units` [groups] from `mean` [].
    """

    codes: Tensor
    scales: Tensor
    units: Tensor | None
    mean: Tensor | None
    pairs: Tensor

    weight: ClassVar[None] = None
    """There is none in a dtype that hidden states could be cast to, as T5's layers do before they call this one."""
    bias: nn.Parameter | None

    def __init__(self, original: Any, weight: Tensor, values: Tensor, pairs: Tensor, *, double: bool) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple it is not registered as a submodule
        self._home = original.weight.device
        self.shape = weight.shape
        self.transposed = not isinstance(original, nn.Linear)
        self.bias = original.bias
        with account_as(category="parameters"):
            codes, scales = quantize_nf4(weight, values)
            self.register_buffer("codes", codes)
            small, units, mean = quantize_scales(scales) if double else (scales, None, None)
            self.register_buffer("scales", small)
            self.register_buffer("units", units)
            self.register_buffer("mean", mean)
        self.register_buffer("pairs", pairs, persistent=False)
        original.weight.data = torch.empty(0, device=self._home)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out], in the dtype of `x` or of autocast."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        output: Tensor = Nf4LinearFunction.apply(x, self)  # type: ignore[no-untyped-call]
        return output

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Dequantize the weights, [out, in]."""
        scales = self.scales
        if self.units is not None and self.mean is not None:
            scales = dequantize_scales(scales, self.units, self.mean)
        weight = dequantize_nf4(self.codes, scales, self.pairs, self.shape, dtype)
        return weight.t() if self.transposed else weight

    def restore(self) -> Any:
        """Restore the original layer, with the dequantized weights in float32, on its original device."""
        original = self._original[0]
        weight = self.dequantize(torch.float32)
        original.weight.data = (weight.t() if self.transposed else weight).contiguous().to(self._home)
        original.bias = self.bias
        return original


class Nf4LinearFunction(torch.autograd.Function):
    """x W^T + bias for frozen weights, which are dequantized in each pass and never saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        """Keep the layer itself in the context, not its tensors: hooks on saved tensors have nothing to offload."""
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return functional.linear(x, layer.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x; the frozen weights need none."""
        return gradient @ ctx.layer.dequantize(gradient.dtype), None


def quantize_nf4(weight: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weights to codes [weights / 2] uint8, with the largest magnitude of each block as its scale, [blocks]
    float32.

    The last block is padded with zeros.
    """
    flat = functional.pad(weight.reshape(-1), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    codes = torch.empty(flat.numel() // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(flat), dtype=torch.float32, device=weight.device)
    between = (values[1:] + values[:-1]) / 2
    with account_as(category="temporaries"):
        for rows in chunks(len(flat), CHUNK // BLOCK):
            part = flat[rows].float()
            scale = scales[rows].copy_(part.abs().amax(1))
            part = part / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
            nearest = torch.bucketize(part, between, out_int32=True).view(-1, 2)
            codes[bytes_of(rows)].copy_(nearest[:, 0] * len(NF4) + nearest[:, 1])
            del part, nearest
    return codes, scales


def dequantize_nf4(codes: Tensor, scales: Tensor, pairs: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Look up the weights that codes stand for, of this shape and dtype."""
    flat = torch.empty(len(scales), BLOCK, dtype=dtype, device=codes.device)
    for rows in chunks(len(scales), CHUNK // BLOCK):
        index = codes[bytes_of(rows)].int()
        values = pairs.index_select(0, index).view(-1, BLOCK)
        flat[rows].copy_(values.mul_(scales[rows, None]))  # `out=` would take as much again
        del index, values
    return flat.view(-1)[: shape.numel()].view(shape)


def bytes_of(blocks: slice) -> slice:
    """Return the range of codes of a range of blocks."""
    return slice(blocks.start * BLOCK // 2, blocks.stop * BLOCK // 2)


def quantize_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize scales to integers [blocks] int8 in units [groups] from their mean [].

    The paper has 8-bit floats here; evenly spaced integers are nearer to values that lie close together.
    """
    mean = scales.mean()
    groups = functional.pad(scales - mean, (0, -len(scales) % GROUP)).view(-1, GROUP)
    units = groups.abs().amax(1) / 127
    small = (groups / units.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return small.view(-1)[: len(scales)].clone(), units, mean


def dequantize_scales(small: Tensor, units: Tensor, mean: Tensor) -> Tensor:
    """Dequantize the scales, [blocks] float32."""
    return small * units.repeat_interleave(GROUP)[: len(small)] + mean
