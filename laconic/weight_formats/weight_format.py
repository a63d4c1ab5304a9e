"""The interface of a format of quantized weights, and what the formats share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from laconic.errors import FormatRefused
from laconic.quantization.plan import QuantizedWeight


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """The quantized weight of a linear layer, to be written.

    weight: its integers are [in, out]. bits: of an integer. has_integer_inputs: whether the layer multiplies in INT8,
    with a range of each token's activations.
    """

    weight: QuantizedWeight
    bits: int
    has_integer_inputs: bool = False

    @property
    def group_size(self) -> int | None:
        """The inputs that share a scale; None where all do."""
        return None if len(self.weight.scales) == 1 else self.weight.group_size

    @property
    def integers(self) -> Tensor:
        """The integers without a sign, [out, in] int32."""
        return torch.tensor(self.weight.integers).T.to(torch.int32) + (1 << (self.bits - 1))


class WeightFormat(ABC):
    """The weights of a folder of transformers, as one library quantized them.

    parts: the last parts of the names of the tensors in the place of one weight.
    """

    parts: ClassVar[frozenset[str]]

    @classmethod
    @abstractmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Read the `quantization_config` of a folder. Raises FormatRefused for settings that are not read."""

    @abstractmethod
    def restore(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Compute a weight from its parts: [out, in] float32. Raises FormatRefused for parts that do not fit."""


class WritableFormat(WeightFormat):
    """A format that artifacts are written in, too. holds_head: whether the head may be quantized."""

    holds_head: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def describe(cls, layers: Mapping[str, LinearWeight], others: list[str]) -> dict[str, Any]:
        """Make the `quantization_config` of layers, by the path of their module. others: paths of linear layers in
        float. Raises FormatRefused for a layer that the format cannot hold."""

    @classmethod
    @abstractmethod
    def store(cls, layer: LinearWeight) -> dict[str, Tensor]:
        """Write a layer's weight as its parts."""


def dequantize(integers: Tensor, zeros: Tensor | int, scales: Tensor, groups: Tensor) -> Tensor:
    """Compute (integer - zero) times scale in float32. integers: [out, in]. zeros, scales: [out, groups]. groups: the
    group of each input."""
    steps = scales.to(torch.float32)[:, groups]
    shifts = zeros if isinstance(zeros, int) else zeros[:, groups].to(torch.float32)
    return ((integers.to(torch.float32) - shifts) * steps).contiguous()


def group_inputs(inputs: int, groups: int, group_size: int) -> Tensor:
    """Return the group of each input. group_size: as the settings name it, 0 or less for all inputs. Raises
    FormatRefused where there are more inputs than the groups hold."""
    size = group_size if group_size > 0 else inputs
    if -(-inputs // size) != groups:
        raise FormatRefused(f"{inputs} inputs in groups of {size} need other than {groups} scales")
    return torch.arange(inputs) // size
