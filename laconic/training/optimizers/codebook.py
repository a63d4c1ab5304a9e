"""torchao's codes for the moments of Adam in 8 or 4 bits."""

import importlib
import logging
from functools import cache
from itertools import pairwise
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
        self.ops = library("torchao.optim.quant_utils")
        self.bits = bits
        self.block = {8: 256, 4: 128}[bits]
        self.values = values(bits, signed=signed)
        self.middles = tuple((low + high) / 2 for low, high in pairwise(self.values))

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Values [n] float32 from codes uint8, [n] or in 4 bits [n / 2], and scales [n / block] float32."""
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).view(-1)
        values: Tensor = self.ops.dequant_with_qmap(codes, torch.tensor(self.values, device=scale.device), scale)
        return values

    def encode(self, values: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Write the codes and the scales of values [n] float32.

        torchao's own search gives the same codes, in twice the time and with three times the scratch.
        """
        scaled, largest = self.ops.scale_tensor(values, self.block)
        middles = torch.tensor(self.middles, device=values.device)
        found = torch.bucketize(scaled, middles, right=True, out_int32=True)
        codes.copy_((found[::2] << 4) | found[1::2] if self.bits == 4 else found)
        scale.copy_(largest)


@cache
def values(bits: int, *, signed: bool) -> tuple[float, ...]:
    """The values of the codes, from the least to the greatest.

    torchao works them out with tensors, which cannot be read in a simulation: there they must be known already.
    """
    states = library(f"torchao.optim.subclass_{bits}bit")
    found: tuple[float, ...] = states.get_qmap_signed() if signed else states.get_qmap_unsigned()
    return found


def library(name: str) -> Any:
    """A module of torchao. Raises MissingPackage where it is not installed."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it tells of kernels that it could not load, and that are not used here
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise registry.missing("torchao") from error
    finally:
        logging.disable(level)
