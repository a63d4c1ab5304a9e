"""torchao's codes for the moments of Adam in 8 or 4 bits."""

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from laconic import registry
from laconic.arrays import Array

UPPER = 1 << 16
"""Patterns of the upper 16 bits of a float32, by which codes are looked up."""


@dataclass(frozen=True)
class Lookup:
    """values: of the codes, [codes] float32. borders: from where on it is the next code, [codes] float32, the last one
    infinite. least: [65536] uint8, the code of the least number that has these upper 16 bits: between it and the
    greatest there is one border at most, since codes lie further apart than numbers of 16 bits."""

    values: Tensor
    borders: Tensor
    least: Tensor

    @classmethod
    def of(cls, bits: int, device: torch.device, *, signed: bool) -> Self:
        """Make the tables of the codes of so many bits."""
        parts = (values(bits, signed=signed), borders(bits, signed=signed), least(bits, signed=signed))
        return cls(*(torch.tensor(part, device=device) for part in parts))

    def codes(self, scaled: Tensor) -> Tensor:
        """Find the nearest code, uint8, of each value float32; the higher one of two that are as near."""
        codes = self.least.index_select(0, (scaled.view(torch.int32) >> 16).bitwise_and_(UPPER - 1))
        return codes.add_(scaled >= self.borders.index_select(0, codes.int()))


class Codebook:
    """Codes for values from -1 to 1, or from 0 to 1, scaled by the largest value of their block.

    8 bits: dynamic tree quantization, blocks of 256 (Dettmers et al., arXiv 2110.02861). 4 bits: blocks of 128, the
    second moment linear and without a zero (Li et al., arXiv 2309.01507).
    """

    def __init__(self, bits: int, *, signed: bool) -> None:
        self.ops = library("torchao.optim.quant_utils")
        self.bits = bits
        self.block = {8: 256, 4: 128}[bits]
        self.signed = signed
        self._lookups: dict[torch.device, Lookup] = {}

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Decode values [n] float32 from codes uint8, [n] or in 4 bits [n / 2], and scales [n / block] float32."""
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).view(-1)
        # Indexing takes 6 to 8 times as long on a processor as index_select.
        decoded = self.lookup(scale.device).values.index_select(0, codes.int())
        decoded.view(-1, self.block).mul_(scale[:, None])
        return decoded

    def encode(self, values: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Write the codes and the scales of values [n] float32.

        torchao's own search gives the same codes. A million values take 6 ms on one core of a Xeon by looking them up,
        and 63 ms by torch.bucketize.
        """
        scaled, largest = self.ops.scale_tensor(values, self.block)
        nearest = self.lookup(values.device).codes(scaled)
        codes.copy_((nearest[::2] << 4) | nearest[1::2] if self.bits == 4 else nearest)
        scale.copy_(largest)

    def lookup(self, device: torch.device) -> Lookup:
        """Return the tables on a device, 68 kB at most."""
        if device not in self._lookups:
            self._lookups[device] = Lookup.of(self.bits, device, signed=self.signed)
        return self._lookups[device]


@cache
def values(bits: int, *, signed: bool) -> tuple[float, ...]:
    """List the values of the codes, from the least to the greatest.

    torchao works them out with tensors, which cannot be read in a simulation: there they must be known already.
    """
    states = library(f"torchao.optim.subclass_{bits}bit")
    table: tuple[float, ...] = states.get_qmap_signed() if signed else states.get_qmap_unsigned()
    return table


@cache
def borders(bits: int, *, signed: bool) -> Array:
    """Compute where the next code begins: half way to its value."""
    middles = [(low + high) / 2 for low, high in pairwise(values(bits, signed=signed))]
    return np.array([*middles, np.inf], np.float32)


@cache
def least(bits: int, *, signed: bool) -> Array:
    """Tabulate, by the upper 16 bits of a number, the code of the least number that has them."""
    first = np.arange(UPPER, dtype=np.uint32) << 16
    ends = [pattern.view(np.float32) for pattern in (first, first | 0xFFFF)]
    return np.minimum(*(np.searchsorted(borders(bits, signed=signed)[:-1], end, "right") for end in ends)).astype(
        np.uint8
    )


def library(name: str) -> Any:
    """Import a module of torchao. Raises MissingPackage where it is not installed."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it tells of kernels that it could not load, and that are not used here
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise registry.missing_package("torchao") from error
    finally:
        logging.disable(level)
