"""AWQ checkpoints in the layout "gemm": integers packed along the outputs, in the order of AWQ's kernels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from laconic.errors import FormatRefused
from laconic.weight_formats.packed_integers import unpack
from laconic.weight_formats.weight_format import WeightFormat, dequantize, group_inputs

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs."""
BITS = 4


@dataclass(frozen=True)
class AwqFormat(WeightFormat):
    """group_size: -1 for all inputs."""

    group_size: int

    parts: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales"})

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        bits = settings.get("bits", settings.get("w_bit", BITS))
        version = str(settings.get("version", settings.get("format", "gemm"))).lower()
        if bits != BITS or version != "gemm":
            raise FormatRefused(
                f"integers of {bits} bits in the layout {version!r} are not read, of 4 bits in 'gemm' are"
            )
        return cls(int(settings.get("group_size", settings.get("q_group_size", -1))))

    def restore(self, parts: Mapping[str, Tensor]) -> Tensor:
        integers = unpack(parts["qweight"], BITS, PLACES).T
        scales = parts["scales"].T
        zeros = unpack(parts["qzeros"], BITS, PLACES).T
        return dequantize(integers, zeros, scales, group_inputs(integers.shape[1], scales.shape[1], self.group_size))
