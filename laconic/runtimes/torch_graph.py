"""An ONNX graph as a PyTorch module that torch.compile takes.

Names of the file never become code: the module's program is made of names of its own, and of numbers.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from laconic.arrays import Array
from laconic.errors import RuntimeFailure
from laconic.runtimes.onnx_graph import GraphNode, OnnxGraph
from laconic.runtimes.runtime import Kernel
from laconic.runtimes.torch_operators import OPERATORS, as_tensor
from laconic.runtimes.torch_products import (
    convolution,
    linear,
    multiply,
    pool_largest,
    pool_mean,
    transposed_convolution,
)

SPATIAL = {
    "Conv": convolution,
    "ConvTranspose": transposed_convolution,
    "MaxPool": pool_largest,
    "AveragePool": pool_mean,
}
"""Operators over windows of images or sequences."""
TAKEN = {
    "Conv": ("pads", "strides", "dilations", "group"),
    "ConvTranspose": ("pads", "strides", "dilations", "group", "output_padding"),
    "MaxPool": ("kernel_shape", "pads", "strides", "dilations", "ceil_mode"),
    "AveragePool": ("kernel_shape", "pads", "strides", "ceil_mode", "count_include_pad"),
}
"""The attributes that each takes."""
NUMBERS = 64
"""Integer constants of at most so many elements along at most one axis are Python's own: sizes and axes."""


class GraphTranslator:
    """Translates one graph.

    compute: the type that products and convolutions are computed in. typed: whether the graph says the type of each
    tensor, so that nothing is cast beside what it casts. kernels: the products, as they are asked for; names: of the
    node of each in the module's program.
    """

    def __init__(self, graph: OnnxGraph, compute: torch.dtype, *, typed: bool = False) -> None:
        self.graph = graph
        self.compute = compute
        self.typed = typed
        self.program = fx.Graph()
        self.module = nn.Module()
        self.values: dict[str, Any] = {
            name: to_constant(array, bfloat16=name in graph.bfloat16) for name, array in graph.weights.items()
        }
        self.producers = {name: node for node in graph.nodes for name in node.outputs}
        self.readers = Counter(name for node in graph.nodes for name in node.inputs) + Counter(graph.outputs)
        self.kernels: list[Kernel] = []
        self.names: list[str] = []

    def translate(self) -> fx.GraphModule:
        """The module: takes the graph's inputs in order, and returns a tuple of its outputs. Raises RuntimeFailure for
        an operator, or a use of one, that is not known here."""
        for number, name in enumerate(self.graph.inputs):
            self.values[name] = self.program.placeholder(f"input_{number}")
        for node in self.graph.nodes:
            if node.outputs[0] in self.values:
                continue  # computed with the node before it
            try:
                self._add(node)
            except (NotImplementedError, KeyError, TypeError, ValueError, RuntimeError) as error:
                reason = str(error) if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"
                raise RuntimeFailure(
                    f"torch does not take {node.kind} {node.name!r} ({reason}). Try another engine (--runtime)"
                ) from error
        outputs = [self._call(to_output, self.values[name]) for name in self.graph.outputs]
        self.program.output(tuple(outputs))
        self.program.eliminate_dead_code()
        return fx.GraphModule(self.module, self.program)

    def _add(self, node: GraphNode) -> None:
        if node.kind in ("MatMul", "Gemm"):
            self._add_product(node)
        elif node.kind in SPATIAL:
            self._add_spatial(node)
        elif node.kind in OPERATORS:
            given = [self.values[name] if name else None for name in node.inputs]
            found = self._call(OPERATORS[node.kind], *given, **make_attributes(node))
            self._keep(node, found)
        else:
            raise NotImplementedError("there is no such operator here")

    def _keep(self, node: GraphNode, found: Any) -> None:
        if len(node.outputs) == 1:
            self.values[node.outputs[0]] = found
            return
        for number, name in enumerate(node.outputs):
            self.values[name] = self._call(pick, found, number)

    def _call(self, function: Any, *given: Any, **attributes: Any) -> Any:
        """A call in the program; of constants alone its result, which is a constant too."""
        if not any(isinstance(each, fx.Node) for each in given):
            return function(*given, **attributes)
        return self.program.call_function(function, tuple(map(self._as_argument, given)), attributes)

    def _as_argument(self, value: Any) -> Any:
        """A value as an argument of a call; a tensor becomes a buffer of the module."""
        if not isinstance(value, Tensor):
            return value
        for name, buffer in self.module.named_buffers():
            if buffer is value:
                return self.program.get_attr(name)
        name = f"constant_{len(list(self.module.buffers()))}"
        self.module.register_buffer(name, value)
        return self.program.get_attr(name)

    def _add_product(self, node: GraphNode) -> None:
        left, right = node.inputs[:2]
        weight = self.values[right]
        if node.kind == "Gemm" or isinstance(weight, fx.Node) or weight.ndim != 2 or not weight.is_floating_point():
            if node.kind == "Gemm":
                raise NotImplementedError("a Gemm")
            dtype = None if self.typed else self.compute
            found = self._call(multiply, *(self.values[name] for name in (left, right)), dtype=dtype)
            self._keep(node, found)
            self._report(node, "matmul", found, self.compute)
            return
        output, bias = self._find_bias(node)
        lowered = self._lower(weight.T.contiguous())
        found = self._call(linear, self.values[left], lowered, None if bias is None else self._lower(bias))
        self._report(node, "linear", found, lowered.dtype)
        self.values[output] = found
        self.values.setdefault(node.outputs[0], found)

    def _add_spatial(self, node: GraphNode) -> None:
        attributes = make_spatial_attributes(node)
        if not node.kind.startswith("Conv"):
            self._keep(node, self._call(SPATIAL[node.kind], self.values[node.inputs[0]], **attributes))
            return
        left, right = node.inputs[:2]
        bias = self.values[node.inputs[2]] if len(node.inputs) > 2 and node.inputs[2] else None
        weight, lowered = self._lower(self.values[right]), None if bias is None else self._lower(bias)
        found = self._call(SPATIAL[node.kind], self.values[left], weight, lowered, **attributes)
        self._report(node, "convolution", found, weight.dtype)
        self._keep(node, found)

    def _lower(self, weight: Tensor) -> Tensor:
        return weight if self.typed else weight.to(self.compute)

    def _report(self, node: GraphNode, kind: str, found: Any, dtype: torch.dtype) -> None:
        self.kernels.append(Kernel(node.name, kind, str(dtype).removeprefix("torch.")))
        self.names.append(found.name if isinstance(found, fx.Node) else "")

    def _find_bias(self, node: GraphNode) -> tuple[str, Tensor | None]:
        """The name of the sum of a product and its bias, and the bias; the product's own name and None without one."""
        output = node.outputs[0]
        readers = [each for each in self.graph.nodes if output in each.inputs]
        if self.readers[output] == 1 and len(readers) == 1 and readers[0].kind == "Add":
            other = next(name for name in readers[0].inputs if name != output)
            bias = self.values.get(other)
            if isinstance(bias, Tensor) and bias.ndim == 1 and bias.is_floating_point() and other in self.graph.weights:
                return readers[0].outputs[0], bias
        return output, None


def to_constant(array: Array, *, bfloat16: bool = False) -> Any:
    """A constant: sizes and single numbers as Python's own, all else as a tensor. bfloat16: the type of the tensor,
    whose values are given in FP32."""
    if bfloat16:
        return torch.tensor(array).bfloat16()
    if (array.dtype in (np.int64, np.int32, np.bool_) and array.ndim < 2 and array.size <= NUMBERS) or (
        array.dtype == np.float32 and array.ndim == 0
    ):
        return array.tolist()
    return torch.tensor(array)


def make_attributes(node: GraphNode) -> dict[str, Any]:
    """The attributes of a node as Python numbers and tensors. Raises NotImplementedError for a text that is no word."""
    for name, value in node.attributes.items():
        if not name.isidentifier() or (isinstance(value, str) and value and not value.isidentifier()):
            raise NotImplementedError("an attribute that is no word")
    return {
        name: torch.tensor(value) if isinstance(value, np.ndarray) else value for name, value in node.attributes.items()
    }


def make_spatial_attributes(node: GraphNode) -> dict[str, Any]:
    """The attributes of an operator over windows, with the values that they have by default."""
    given = node.attributes
    if given.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise NotImplementedError("padding that follows the size")
    window = given.get("kernel_shape") or ()
    axes = len(window)  # type: ignore[arg-type]
    defaults: dict[str, Any] = {
        "kernel_shape": window,
        "pads": (0,) * (2 * axes),
        "strides": (1,) * axes,
        "dilations": (1,) * axes,
        "output_padding": (0,) * axes,
        "group": 1,
        "ceil_mode": 0,
        "count_include_pad": 0,
    }
    return {name: given.get(name, defaults[name]) for name in TAKEN[node.kind]}


def pick(parts: Any, number: int) -> Any:
    """One of several results."""
    return parts[number]


def to_output(value: Any) -> Tensor:
    """A result of the model: floats in FP32."""
    found = as_tensor(value)
    return found.float() if found.dtype == torch.bfloat16 else found
