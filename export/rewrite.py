"""A graph under change: nodes put in front of others, initializers exchanged."""

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.weights import quantize_weight
from laconic.graph import Layer
from laconic.plan import Precision, Range
from laconic.tensor import Array


class Rewrite:
    """Changes a model in place; `finish` gives it back in order, without what nothing reads any more."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self._added: dict[str, TensorProto] = {}
        self._before: dict[str, list[NodeProto]] = {}
        self._after: dict[str, list[NodeProto]] = {}
        self.nodes: dict[str, NodeProto] = {node.name: node for node in model.graph.node}
        self.outputs = {value.name for value in model.graph.output}
        self._readers: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            for tensor in node.input:
                self._readers.setdefault(tensor, []).append(name)

    def readers(self, tensor: str) -> list[str]:
        """The nodes of the graph, as it was, that read a tensor."""
        return self._readers.get(tensor, [])

    def is_initializer(self, tensor: str) -> bool:
        """Whether the tensor is a constant of the graph."""
        return tensor in self._initializers

    def array(self, name: str) -> Array:
        """The values of an initializer."""
        return numpy_helper.to_array(self._initializers[name])

    def set_initializer(self, name: str, array: Array) -> str:
        """Add an initializer, or exchange its values; gives its name."""
        self._added[name] = self._initializers[name] = numpy_helper.from_array(np.asarray(array, order="C"), name)
        return name

    def quantize_activation(self, tensor: str, limits: Range, readers: list[str], *, symmetric: bool) -> None:
        """Let the readers see `tensor` through a Q/DQ pair; they share one."""
        scale, zero = grid(limits, symmetric=symmetric)
        scale_name = self.set_initializer(f"{tensor}/scale", np.array(scale, np.float32))
        zero_name = self.set_initializer(f"{tensor}/zero", np.array(zero, np.int8 if symmetric else np.uint8))
        integers, result = f"{tensor}/quantized", f"{tensor}/dequantized"
        first = min(readers, key=list(self.nodes).index)
        self._before.setdefault(first, []).extend(
            [
                helper.make_node("QuantizeLinear", [tensor, scale_name, zero_name], [integers], f"{tensor}/Q"),
                helper.make_node("DequantizeLinear", [integers, scale_name, zero_name], [result], f"{tensor}/DQ"),
            ]
        )
        for reader in readers:
            self._redirect(self.nodes[reader], tensor, result)

    def write_weight(self, layer: Layer, precision: Precision) -> None:
        """Keep a layer's weight as `precision` says."""
        if precision == "float32":
            return
        if precision == "float16-weight":
            self._half(layer)
        elif precision == "int8-dynamic":
            self._dynamic(layer)
        elif layer.kind == "Gather":
            self._embedding(layer)
        else:
            self._dequantized(layer)

    def _half(self, layer: Layer) -> None:
        half = self.set_initializer(f"{layer.weight}/half", self.array(layer.weight).astype(np.float16))
        if layer.kind == "Gather":  # widen the few rows that were looked up, not the table
            node = self.nodes[layer.node]
            looked_up, node.output[0] = node.output[0], f"{layer.output}/half"
            self._redirect(node, layer.weight, half)
            cast = helper.make_node("Cast", [node.output[0]], [looked_up], f"{layer.node}/widen", to=TensorProto.FLOAT)
            self._after.setdefault(layer.node, []).append(cast)
            return
        wide = f"{layer.node}/weight"
        self._put(layer, helper.make_node("Cast", [half], [wide], f"{wide}/widen", to=TensorProto.FLOAT), wide)

    def _dequantized(self, layer: Layer) -> None:
        weight, scale = self._int8(layer)
        result = f"{layer.node}/weight"
        node = helper.make_node("DequantizeLinear", [weight, scale], [result], f"{result}/DQ", axis=layer.axis)
        self._put(layer, node, result)

    def _embedding(self, layer: Layer) -> None:
        weight, scale = self._int8(layer, column=True)
        node = self.nodes[layer.node]
        name, rows = layer.node, node.output[0]
        self._redirect(node, layer.weight, weight)
        node.output[0] = f"{name}/integers"
        self._after.setdefault(name, []).extend(
            [
                helper.make_node(
                    "Cast", [f"{name}/integers"], [f"{name}/floats"], f"{name}/cast", to=TensorProto.FLOAT
                ),
                helper.make_node("Gather", [scale, node.input[1]], [f"{name}/scales"], f"{name}/scale", axis=0),
                helper.make_node("Mul", [f"{name}/floats", f"{name}/scales"], [rows], f"{name}/dequantize"),
            ]
        )

    def _dynamic(self, layer: Layer) -> None:
        """DynamicQuantizeLinear, MatMulInteger, and the scales multiplied back in."""
        weight, scale = self._int8(layer)
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

    def _int8(self, layer: Layer, *, column: bool = False) -> tuple[str, str]:
        integers, scale = quantize_weight(self.array(layer.weight), layer.axis)
        return (
            self.set_initializer(f"{layer.weight}/int8", integers),
            self.set_initializer(f"{layer.weight}/scale", scale[:, None] if column else scale),
        )

    def _put(self, layer: Layer, node: NodeProto, result: str) -> None:
        self._before.setdefault(layer.node, []).append(node)
        self._redirect(self.nodes[layer.node], layer.weight, result)

    @staticmethod
    def _redirect(node: NodeProto, old: str, new: str) -> None:
        for slot, name in enumerate(node.input):
            if name == old:
                node.input[slot] = new

    def finish(self) -> onnx.ModelProto:
        """The model, its nodes in order, and no initializer that nothing reads."""
        graph = self._model.graph
        nodes = []
        for name, node in self.nodes.items():
            for each in (*self._before.get(name, ()), node, *self._after.get(name, ())):
                copy = NodeProto()
                copy.CopyFrom(each)
                nodes.append(copy)
        read = {tensor for node in nodes for tensor in node.input} | self.outputs
        for index in reversed(range(len(graph.initializer))):
            if graph.initializer[index].name not in read or graph.initializer[index].name in self._added:
                del graph.initializer[index]
        graph.initializer.extend(tensor for name, tensor in self._added.items() if name in read)
        del graph.node[:]
        graph.node.extend(nodes)
        return self._model


def grid(limits: Range, *, symmetric: bool) -> tuple[float, int]:
    """Scale and zero point of the 8-bit grid over a range; zero is always on the grid, since padding is zero."""
    low, high = min(limits.low, 0.0), max(limits.high, 0.0)
    if symmetric:
        return max(-low, high, 1e-30) / 127, 0
    scale = max(high - low, 1e-30) / 255
    return scale, int(np.clip(np.rint(-low / scale), 0, 255))
