"""Rewrites of an ONNX graph: Q/DQ nodes inserted before others, and initializers replaced."""

from collections.abc import Collection, Iterator, Sequence

import ml_dtypes
import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.passes.half import HalfType, to_half
from laconic.arrays import Array
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Precision, QuantizedWeight, Range
from laconic.quantization.qparams import ActivationType, activation_qparams, quantize_weight

STORAGE: dict[ActivationType, np.dtype[np.generic]] = {
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "float8": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""The NumPy types of quantized activations."""
HALF_TYPES: dict[Precision, HalfType] = {"float16-weight": "float16", "bfloat16-weight": "bfloat16"}
"""The types of weights in 16 bits."""
SHARED_BYTES = 1024
"""The least bytes of weights that are compared for equality."""


class GraphRewriter:
    """Rewrites a model in place; `finish` returns it with its nodes in order and without unused initializers."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self._initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self._added: dict[str, TensorProto] = {}
        self._before: dict[str, list[NodeProto]] = {}
        self._after: dict[str, list[NodeProto]] = {}
        self.nodes: dict[str, NodeProto] = {node.name: node for node in model.graph.node}
        self.outputs = {value.name for value in model.graph.output}
        self._readers: dict[str, list[str]] = {}
        self._producers = {tensor: node for node in self.nodes.values() for tensor in node.output}
        self._stored: dict[str, tuple[str, str, list[int]]] = {}
        self._place = {name: place for place, name in enumerate(self.nodes)}
        for name, node in self.nodes.items():
            for tensor in read_tensors(node):
                self._readers.setdefault(tensor, []).append(name)

    def readers(self, tensor: str) -> list[str]:
        """List the nodes of the original graph that read a tensor."""
        return self._readers.get(tensor, [])

    def producer(self, tensor: str) -> NodeProto | None:
        """Return the node that computes a tensor; None for inputs and initializers."""
        return self._producers.get(tensor)

    def is_initializer(self, tensor: str) -> bool:
        """Return whether the tensor is a constant of the graph."""
        return tensor in self._initializers

    def array(self, name: str) -> Array:
        """Return the values of an initializer."""
        return numpy_helper.to_array(self._initializers[name])

    def set_initializer(self, name: str, array: Array) -> str:
        """Add an initializer, or replace its values; returns its name."""
        return self.set_tensor(numpy_helper.from_array(np.asarray(array, order="C"), name))

    def set_tensor(self, tensor: TensorProto) -> str:
        """Add an initializer of any type, or replace it; returns its name."""
        self._added[tensor.name] = self._initializers[tensor.name] = tensor
        return str(tensor.name)

    def quantize_activation(
        self, tensor: str, limits: Range, readers: list[str], dtype: ActivationType = "uint8"
    ) -> None:
        """Insert a Q/DQ pair between `tensor` and these readers, which share it."""
        scale, zero = activation_qparams(limits, dtype)
        stem = f"{tensor}/{dtype}"
        scale_name = self.set_initializer(f"{stem}/scale", np.array(scale, np.float32))
        zero_name = self.set_initializer(f"{stem}/zero", np.array(zero, STORAGE[dtype]))
        nodes = [
            helper.make_node("QuantizeLinear", [tensor, scale_name, zero_name], [stem], f"{stem}/Q"),
            helper.make_node("DequantizeLinear", [stem, scale_name, zero_name], [f"{stem}/float"], f"{stem}/DQ"),
        ]
        self.insert_between(tensor, nodes, f"{stem}/float", readers)

    def insert_between(self, tensor: str, nodes: list[NodeProto], result: str, readers: Sequence[str]) -> None:
        """Insert nodes that compute `result`, which these readers read in place of `tensor`."""
        self.insert_before(min(readers, key=self._place.__getitem__), nodes)
        for reader in readers:
            self.redirect(self.nodes[reader], tensor, result)

    def write_weight(
        self,
        layer: Layer,
        precision: Precision,
        *,
        form: str = "dequantize",
        factors: Array | None = None,
        rounded: QuantizedWeight | None = None,
    ) -> None:
        """Write a layer's weight in a precision of 8 bits or more.

        form: how 8 bits are dequantized for float arithmetic, "dequantize" or "cast". factors: [in], by which the
        layer's input is divided (SmoothQuant). rounded: the integers to write; None: round to nearest.
        """
        if precision == "float32":
            return
        if precision in HALF_TYPES:
            self._write_half(layer, precision)
        elif precision == "int8-dynamic":
            self._write_dynamic(layer)
        elif layer.kind == "Gather":
            self._write_embedding(layer)
        elif precision == "int8-weight" and form == "cast":
            self._write_cast(layer, rounded)
        else:
            self._write_dequantized(layer, factors, rounded)

    def replace_weight(self, layer: Layer, nodes: list[NodeProto], result: str) -> None:
        """Insert nodes before a layer that compute `result`, which the layer reads in place of its weight."""
        self.insert_before(layer.node, nodes)
        self.redirect(self.nodes[layer.node], layer.weight, result)

    def insert_before(self, node: str, nodes: list[NodeProto]) -> None:
        """Insert nodes before a node. One that computes a tensor of an initializer's name takes its place."""
        self._before.setdefault(node, []).extend(nodes)

    def replace_nodes(self, names: Collection[str], nodes: list[NodeProto]) -> None:
        """Remove the nodes of these names, around which nothing was inserted, and put others in the place of the last
        one."""
        last = max(names, key=self._place.__getitem__)
        *before, self.nodes[last] = nodes
        self._before[last] = before
        for name in names:
            if name != last:
                del self.nodes[name]

    def append_nodes(self, layer: Layer, nodes: list[NodeProto]) -> None:
        """Insert nodes after a layer."""
        self._after.setdefault(layer.node, []).extend(nodes)

    def add_to_bias(self, layer: Layer, values: Array) -> None:
        """Add values [out] to a layer's bias; a linear layer without a bias is left as it is."""
        node = self.nodes[layer.node]
        if layer.kind == "Conv":
            old = self.array(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros_like(values)
            bias = self.set_initializer(f"{layer.node}/bias", old + values)
            del node.input[2:]
            node.input.append(bias)
            return
        readers = [self.nodes[name] for name in self.readers(layer.output)]
        if len(readers) == 1 and readers[0].op_type == "Add" and layer.output not in self.outputs:
            for name in readers[0].input:
                if self.is_initializer(name) and self.array(name).shape == values.shape:
                    bias = self.set_initializer(f"{layer.node}/bias", self.array(name) + values)
                    self.redirect(readers[0], name, bias)
                    return

    def _write_half(self, layer: Layer, precision: Precision) -> None:
        half = self.set_initializer(f"{layer.weight}/half", to_half(self.array(layer.weight), HALF_TYPES[precision]))
        if layer.kind == "Gather":  # cast the few rows that were looked up, not the table
            node = self.nodes[layer.node]
            looked_up, node.output[0] = node.output[0], f"{layer.output}/half"
            self.redirect(node, layer.weight, half)
            cast = helper.make_node("Cast", [node.output[0]], [looked_up], f"{layer.node}/widen", to=TensorProto.FLOAT)
            self.append_nodes(layer, [cast])
            return
        wide = f"{layer.node}/weight"
        self.replace_weight(
            layer, [helper.make_node("Cast", [half], [wide], f"{wide}/widen", to=TensorProto.FLOAT)], wide
        )

    def _write_cast(self, layer: Layer, rounded: QuantizedWeight | None) -> None:
        """Write a cast by way of INT32: OpenVINO folds this and multiplies in BF16; it would not fold a cast from
        INT8."""
        weight, scale = self._write_int8(layer, rounded=rounded)
        stem = f"{layer.node}/weight"
        shape = [-1 if axis == layer.axis else 1 for axis in range(len(layer.shape))]
        self.set_initializer(scale, self.array(scale).reshape(shape))
        self.replace_weight(layer, make_cast(weight, scale, stem), stem)

    def _write_dequantized(self, layer: Layer, factors: Array | None, rounded: QuantizedWeight | None) -> None:
        weight, scale = self._write_int8(layer, factors=factors, rounded=rounded)
        result = f"{layer.node}/weight"
        if factors is None:
            shape = [-1 if axis == layer.axis else 1 for axis in range(len(layer.shape))]
            self._stored[layer.weight] = weight, scale, shape
        node = helper.make_node("DequantizeLinear", [weight, scale], [result], f"{result}/DQ", axis=layer.axis)
        self.replace_weight(layer, [node], result)

    def _write_embedding(self, layer: Layer) -> None:
        weight, scale = self._write_int8(layer, column=True)
        node = self.nodes[layer.node]
        name, rows = layer.node, node.output[0]
        self.redirect(node, layer.weight, weight)
        node.output[0] = f"{name}/integers"
        nodes = [
            helper.make_node("Cast", [f"{name}/integers"], [f"{name}/floats"], f"{name}/cast", to=TensorProto.FLOAT),
            helper.make_node("Gather", [scale, node.input[1]], [f"{name}/scales"], f"{name}/scale", axis=0),
            helper.make_node("Mul", [f"{name}/floats", f"{name}/scales"], [rows], f"{name}/dequantize"),
        ]
        self.append_nodes(layer, nodes)

    def _write_dynamic(self, layer: Layer) -> None:
        """Write DynamicQuantizeLinear, MatMulInteger, and a multiplication with the scales."""
        weight, scale = self._write_int8(layer)
        name, source, node = layer.node, layer.input, self.nodes[layer.node]
        integers, step, zero = (f"{source}/dynamic/{part}" for part in ("integers", "scale", "zero"))
        steps = (
            []
            if any(integers in made.output for nodes in self._before.values() for made in nodes)
            else [helper.make_node("DynamicQuantizeLinear", [source], [integers, step, zero], f"{source}/dynamic/Q")]
        )
        steps += [
            helper.make_node("MatMulInteger", [integers, weight, zero], [f"{name}/sums"], f"{name}/integer"),
            helper.make_node("Cast", [f"{name}/sums"], [f"{name}/floats"], f"{name}/cast", to=TensorProto.FLOAT),
            helper.make_node("Mul", [step, scale], [f"{name}/scales"], f"{name}/scale"),
        ]
        self._before.setdefault(name, []).extend(steps)
        node.CopyFrom(helper.make_node("Mul", [f"{name}/floats", f"{name}/scales"], [layer.output], name))

    def _write_int8(
        self,
        layer: Layer,
        *,
        column: bool = False,
        factors: Array | None = None,
        rounded: QuantizedWeight | None = None,
    ) -> tuple[str, str]:
        if rounded is not None:
            stem = f"{layer.node}/weight"
            scales = self.set_initializer(f"{stem}/scale", rounded.scales[0])
            return self.set_initializer(f"{stem}/int8", rounded.integers), scales
        weight = self.array(layer.weight)
        stem = layer.weight
        if factors is not None:
            weight, stem = weight * factors[:, None], f"{layer.weight}/smooth"
        integers, scale = quantize_weight(weight, layer.axis)
        return (
            self.set_initializer(f"{stem}/int8", integers),
            self.set_initializer(f"{stem}/scale", scale[:, None] if column else scale),
        )

    @staticmethod
    def redirect(node: NodeProto, old: str, new: str) -> None:
        """Let a node read another tensor in place of one."""
        for slot, name in enumerate(node.input):
            if name == old:
                node.input[slot] = new

    def finish(self) -> onnx.ModelProto:
        """Return the model with its nodes in order, and without unused initializers."""
        graph = self.model.graph
        nodes = []
        for name, node in self.nodes.items():
            for each in (*self._before.get(name, ()), node, *self._after.get(name, ())):
                copy = NodeProto()
                copy.CopyFrom(each)
                nodes.append(copy)
        self._share_equal(nodes)
        nodes = [*self._dequantize_for_subgraphs(nodes), *nodes]
        read = {tensor for node in nodes for tensor in read_tensors(node)} | self.outputs
        computed = {tensor for node in nodes for tensor in node.output}
        for index in reversed(range(len(graph.initializer))):
            if (name := graph.initializer[index].name) not in read or name in self._added or name in computed:
                del graph.initializer[index]
        graph.initializer.extend(tensor for name, tensor in self._added.items() if name in read)
        del graph.node[:]
        graph.node.extend(nodes)
        return self.model

    def _share_equal(self, nodes: Sequence[NodeProto]) -> None:
        """Let nodes read one of several equal weights: layers that share a weight share its integers."""
        firsts: dict[tuple[int, tuple[int, ...], bytes], str] = {}
        equal: dict[str, str] = {}
        for name, tensor in self._added.items():
            if len(tensor.raw_data) >= SHARED_BYTES:
                equal[name] = firsts.setdefault((tensor.data_type, tuple(tensor.dims), tensor.raw_data), name)
        for node in nodes if equal else ():
            for name in set(node.input) & equal.keys():
                self.redirect(node, name, equal[name])

    def _dequantize_for_subgraphs(self, nodes: Sequence[NodeProto]) -> list[NodeProto]:
        """Make nodes that compute from integers what subgraphs alone still read in float. Engines fold these when they
        load the graph; a DequantizeLinear they run anew each time."""
        direct = {tensor for node in nodes for tensor in node.input} | self.outputs
        inner = {tensor for node in nodes for tensor in read_tensors(node)} - direct
        made: list[NodeProto] = []
        for name in sorted(self._stored.keys() & inner):
            weight, scale, shape = self._stored[name]
            column = self.set_initializer(f"{name}/column", self.array(scale).reshape(shape))
            made += make_cast(weight, column, name)
        return made


def make_cast(weight: str, scale: str, result: str) -> list[NodeProto]:
    """Make the nodes that compute a float weight of integers and scales by casts."""
    return [
        helper.make_node("Cast", [weight], [f"{result}/int32"], f"{result}/int32", to=TensorProto.INT32),
        helper.make_node("Cast", [f"{result}/int32"], [f"{result}/floats"], f"{result}/floats", to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{result}/floats", scale], [result], f"{result}/multiply"),
    ]


def read_tensors(node: NodeProto) -> Iterator[str]:
    """Yield the names of the tensors that a node reads, or any node in the bodies of If, Loop and Scan, which see all
    tensors of the graph around them."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from read_tensors(inner)
