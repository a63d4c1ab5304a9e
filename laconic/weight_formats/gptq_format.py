"""GPTQ checkpoints, of AutoGPTQ and GPTQModel: integers packed along the inputs, zeros along the outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from laconic.errors import FormatRefused
from laconic.weight_formats.packed_integers import WORD, pack, unpack
from laconic.weight_formats.weight_format import LinearWeight, WritableFormat, dequantize, group_inputs

HEAD = "lm_head"
BITS = (2, 4, 8)
EARLIER = 1
"""What the first version of the format, "gptq", takes from a zero before it is stored."""


@dataclass(frozen=True)
class GptqFormat(WritableFormat):
    """group_size: -1 for all inputs. earlier: what was taken from the zeros that are stored."""

    bits: int
    group_size: int
    earlier: int = EARLIER

    parts: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    holds_head: ClassVar[bool] = False

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        bits, version = int(settings.get("bits", 0)), settings.get("checkpoint_format") or "gptq"
        if bits not in BITS or version not in ("gptq", "gptq_v2"):
            raise FormatRefused(
                f"integers of {bits} bits in the layout {version!r} are not read, of 2, 4 and 8 bits are"
            )
        return cls(bits, int(settings.get("group_size", -1)), EARLIER if version == "gptq" else 0)

    def restore(self, parts: Mapping[str, Tensor]) -> Tensor:
        integers = unpack(parts["qweight"].T.contiguous(), self.bits)
        scales = parts["scales"].T
        zeros = unpack(parts["qzeros"], self.bits).T[: len(scales)] + self.earlier
        groups = parts.get("g_idx")
        if groups is None:
            groups = group_inputs(integers.shape[1], scales.shape[1], self.group_size)
        return dequantize(integers[:, : len(groups)], zeros, scales, groups.long())

    @classmethod
    def describe(cls, layers: Mapping[str, LinearWeight], others: list[str]) -> dict[str, Any]:
        others = [name for name in others if name != HEAD]  # which stays in float
        forms = {(layer.bits, layer.group_size, layer.has_integer_inputs) for layer in layers.values()}
        if others or len(forms) != 1:
            odd = others[0] if others else list(layers)[-1]
            raise FormatRefused(
                f"{odd} is stored in another way than others, and a GPTQ checkpoint has one for all linear layers. "
                f"Compress without mixed_precision and keep, or write compressed-tensors"
            )
        ((bits, group_size, is_integer),) = forms
        for name, layer in layers.items():
            check(name, layer)
        if is_integer:
            raise FormatRefused(
                "the layers multiply in INT8, and a GPTQ checkpoint stores weights alone. Write compressed-tensors"
            )
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size or -1,
            "sym": all(layer.weight.zeros is None for layer in layers.values()),
            "desc_act": False,
            "checkpoint_format": "gptq",
            "lm_head": False,
        }

    @classmethod
    def store(cls, layer: LinearWeight) -> dict[str, Tensor]:
        weight, half = layer.weight, 1 << (layer.bits - 1)
        inputs, size = len(weight.integers), layer.group_size or len(weight.integers)
        zeros = np.zeros_like(weight.scales) if weight.zeros is None else weight.zeros
        return {
            "qweight": pack(layer.integers, layer.bits).T.contiguous(),
            "qzeros": pack(torch.tensor(zeros).to(torch.int32) + half - EARLIER, layer.bits),
            "scales": torch.tensor(weight.scales).to(torch.float16),
            "g_idx": (torch.arange(inputs) // size).to(torch.int32),
        }


def check(name: str, layer: LinearWeight) -> None:
    """Raise FormatRefused for a layer that a GPTQ checkpoint cannot hold exactly."""
    weight, half, word = layer.weight, 1 << (layer.bits - 1), WORD // layer.bits
    if any(size % word for size in weight.integers.shape):
        raise FormatRefused(f"{name} has {weight.integers.shape} numbers, which GPTQ's words of {word} do not divide")
    zeros = np.zeros(1) if weight.zeros is None else weight.zeros
    if not np.array_equal(zeros, np.rint(zeros)) or (zeros <= -half).any() or (zeros > half).any():
        raise FormatRefused(
            f"{name} has zeros between integers, and those of a GPTQ checkpoint are integers. Compress with symmetric: "
            f"true, or write GGUF"
        )
    if not np.array_equal(weight.scales.astype(np.float16).astype(np.float32), weight.scales):
        raise FormatRefused(
            f"{name} has scales that FP16 does not represent, as a GPTQ checkpoint stores them. Compress with a "
            f"group_size, as 128"
        )
