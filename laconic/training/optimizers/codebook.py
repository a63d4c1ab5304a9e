"""torchao's codes for the moments of Adam in 8 or 4 bits."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic import registry


class Codebook:
    """Codes for values from -1 to 1, or from 0 to 1, scaled by the largest value of their block.

    8 bits: dynamic tree quantization, blocks of 256 (Dettmers et al., arXiv 2110.02861). 4 bits: blocks of 128, the
    second moment linear and without a zero (Li et al., arXiv 2309.01507).
    """

    def __init__(self, bits: int, *, signed: bool) -> None:
        states = library(f"torchao.optim.subclass_{bits}bit")
        self.ops = library("torchao.optim.quant_utils")
        self.bits = bits
        self.block = {8: 256, 4: 128}[bits]
        self.values: tuple[float, ...] = states.get_qmap_signed() if signed else states.get_qmap_unsigned()
        self.search: Callable[[Tensor, Tensor], Tensor] = getattr(self.ops, f"quantize_{bits}bit_with_qmap")

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Values [n] float32 from codes uint8, [n] or in 4 bits [n / 2], and scales [n / block] float32."""
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).view(-1)
        values: Tensor = self.ops.dequant_with_qmap(codes, self._table(scale), scale)
        return values

    def encode(self, values: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Write the codes and the scales of values [n] float32."""
        scaled, largest = self.ops.scale_tensor(values, self.block)
        found = self.search(scaled, self._table(scale))
        codes.copy_((found[::2] << 4) | found[1::2] if self.bits == 4 else found)
        scale.copy_(largest)

    def _table(self, like: Tensor) -> Tensor:
        return torch.tensor(self.values, device=like.device)


def library(name: str) -> Any:
    """A module of torchao. Raises MissingPackage where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise registry.missing("torchao") from error
