"""The captured float graph and its layers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from laconic.tensor import TensorSpec

EXACTNESS = 1 - 1e-4
"""1 minus the largest error that a captured graph may have, relative to the largest output. FP32 sums in another order
differ by 1e-6."""


@dataclass(frozen=True)
class StoredWeight:
    """A float32 initializer that may be stored in fewer bits, and is read in float.

    shape: its shape. axes: those along which all numbers share a scale.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """A node of the graph that has a weight.

    node: its unique name in the ONNX graph. module: dotted path of the source module; the node's name where that is not
    known. kind: the operator. input, weight, output: names of the tensors; the weight is a float32 initializer. shape:
    of the weight. axis: the weight's axis of output channels (for Gather, the rows). stored: the weights of a node
    whose arithmetic stays in float: a recurrent layer, a transposed convolution, and control flow with all that its
    bodies read. `weight` is then the first of them.
    """

    node: str
    module: str
    kind: Literal["MatMul", "Gemm", "Conv", "Gather", "ConvTranspose", "LSTM", "GRU", "RNN", "If", "Loop", "Scan"]
    input: str
    weight: str
    output: str
    shape: tuple[int, ...]
    axis: int
    stored: tuple[StoredWeight, ...] = ()

    @property
    def parameters(self) -> int:
        """Numbers in the weights."""
        return sum(math.prod(weight.shape) for weight in self.stored) if self.stored else math.prod(self.shape)


@dataclass(frozen=True)
class Graph:
    """A float32 ONNX file, its inputs and outputs, and its layers in the order in which they run.

    key: digest of the file.
    """

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: tuple[Layer, ...]
    key: str
