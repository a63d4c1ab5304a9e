"""Rounding the linear modules of one layer by the moments of their inputs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from compress.quantize.graph_moments import GraphMoments
from compress.quantize.plan_rounding import RoundingConfig, find_scales
from compress.quantize.rounding import round_weight
from laconic.arrays import Array
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Precision, QuantizedWeight
from laconic.quantization.qparams import expand_scales

LARGEST = 2**26
"""Numbers of a weight that are rounded at once, about: outputs are rounded independently of each other."""


@dataclass
class InputMoments:
    """Second moments of the inputs of linear modules, by path. Modules that read one tensor share them.

    readers: by path, the first of the modules that read the same tensor.
    """

    readers: dict[str, str] = field(default_factory=dict)
    sums: dict[str, GraphMoments] = field(default_factory=dict)
    _last: tuple[str, Tensor] | None = None

    def add(self, path: str, inputs: Tensor) -> None:
        """Add the inputs of a module, [1, tokens, in]."""
        if path not in self.readers:
            is_shared = self._last is not None and self._last[1].data_ptr() == inputs.data_ptr()
            first = self.readers[self._last[0]] if is_shared and self._last is not None else path
            self.readers[path] = first
            if first == path:
                self.sums[path] = GraphMoments.zeros(1, inputs.shape[-1])
        # Referenced until the next one, so that its memory is not used again for another tensor.
        self._last = path, inputs
        if self.readers[path] == path:
            self.sums[path].add_rows(inputs.reshape(1, -1, inputs.shape[-1]).numpy())

    def group_paths(self) -> list[list[str]]:
        """Group the modules by the input that they share."""
        firsts = dict.fromkeys(self.readers.values())
        return [[path for path, reader in self.readers.items() if reader == first] for first in firsts]

    def take_means(self) -> Iterator[tuple[list[str], Array]]:
        """Yield the modules that share their input, with the mean of x xT over the inputs x, [in, in] float64; the
        smallest first, each let go of when the next one is asked for."""
        self._last = None
        for first in sorted(self.sums, key=lambda path: self.sums[path].gram.size):
            moments = self.sums.pop(first)
            moments.add_waiting()
            moments.gram /= max(moments.sampled, 1)  # in place: it has 1.6 GB in a model of 8 billion parameters
            yield [path for path, reader in self.readers.items() if reader == first], moments.gram[0]


def round_linear(weight: Tensor, gram: Array | None, precision: Precision, config: RoundingConfig) -> QuantizedWeight:
    """Round a linear module's weight, [out, in] float32; to nearest without the mean of x xT over its inputs."""
    outputs, inputs = weight.shape
    rounded = []
    for part in torch.split(weight, max(1, min(outputs, LARGEST // inputs))):
        matrix = np.ascontiguousarray(part.numpy().T)
        layer = Layer("", "", "MatMul", "", "", "", matrix.shape, axis=1)
        scales, _, size = find_scales(layer, matrix, precision, config)
        steps = np.broadcast_to(expand_scales(scales, inputs, size), matrix.shape)
        method = "nearest" if gram is None else config.rounding
        integers = round_weight(
            matrix, steps, np.empty(0) if gram is None else gram, config.find_levels(precision), method,
            act_order=config.act_order,
        )  # fmt: skip
        rounded.append((integers, scales))
    integers, scales = (np.concatenate(parts, axis=1) for parts in zip(*rounded, strict=True))
    return QuantizedWeight(integers, scales, None, size)


def divide_outputs(weight: QuantizedWeight, divisors: Array) -> QuantizedWeight:
    """Divide the outputs of a quantized weight, [out] divisors: its integers stay as they are."""
    return replace(weight, scales=np.asarray(weight.scales / divisors, np.float32))


def restore_linear(module: nn.Linear, weight: QuantizedWeight) -> None:
    """Replace the weight of a module by what a quantized one stands for."""
    steps = expand_scales(weight.scales, len(weight.integers), weight.group_size)
    module.weight = nn.Parameter(torch.from_numpy((weight.integers * steps).T.astype(np.float32)), requires_grad=False)


def find_linear(layer: nn.Module) -> Mapping[str, nn.Linear]:
    """Find the linear modules of a layer, by path."""
    return {path: module for path, module in layer.named_modules() if isinstance(module, nn.Linear)}
