"""A placed graph with a float reference beside each of its nodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, helper, numpy_helper

from export.passes.fused_attention import OPERATOR
from laconic.arrays import Array
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import BITS, Precision
from laconic.quantization.qparams import (
    DEFAULT_GROUP_SIZE,
    expand_scales,
    fake_quantize_weight,
    quantize_along,
    quantize_in_groups,
)

REFERENCE, ROUNDED, REQUANTIZED = "/reference", "/rounded", "/requantized"
"""Suffixes of the tensors that are added."""


@dataclass(frozen=True)
class ReferencedTensor:
    """A tensor of the placed graph that has a reference.

    layer: module path of the layer that computes it, or of the node where that is no layer. kind: the operator.
    precision: of the layer; float32 for other nodes. rounded: whether there is also the result of rounding.
    """

    name: str
    layer: str
    kind: str
    precision: Precision
    rounded: bool

    @property
    def reference(self) -> str:
        """The tensor in float, from the same inputs."""
        return self.name + REFERENCE

    @property
    def from_rounded(self) -> str:
        """The tensor in float, from the same inputs rounded to the bits of the plan."""
        return self.name + ROUNDED


class FloatReference:
    """Adds each node of a captured graph to the graph that was placed from it, as a reference.

    A reference reads the same activations as the placed node, without Q/DQ, and the captured weights, so that it does
    not inherit the error of earlier nodes. Where the placed node is quantized, a second one reads activations and
    weights that are rounded to the same bits afresh: activations to the range of the sample, weights to nearest. Its
    error is what the quantization of this node explains. A layer and the addition of its bias count as one node, and so
    do the nodes that became one operator, such as those of attention.
    """

    def __init__(self, graph: Graph, placed: onnx.ModelProto, precision: Mapping[str, str]) -> None:
        """placed: extended in place by `extend`. precision: of the placed graph's layers, by node."""
        self._captured = onnx.load(graph.path).graph
        self._placed = placed.graph
        self._weights = {tensor.name: tensor for tensor in self._captured.initializer}
        self._nodes = {node.name: node for node in self._placed.node}
        self._layers = {layer.node: layer for layer in graph.layers}
        # A manifest may hold any name; one that is unknown explains no error.
        self._precision: dict[str, Precision] = {
            node: known for known in BITS for node, name in precision.items() if name == known
        }
        self._added: set[str] = set()
        self._biased = self._find_biased(graph.layers)
        computed = {tensor for node in self._placed.node for tensor in node.output}
        self._fused = {tensor for node in self._captured.node for tensor in node.output if tensor not in computed}

    def find_missing(self) -> str | None:
        """Find a node of the captured graph that the placed graph has neither as it was nor in an operator of several;
        None if it has all of them."""
        fused = any(node.op_type == OPERATOR for node in self._placed.node)
        nodes = (node.name for node in self._captured.node if not fused or node.name in self._layers)
        return next((name for name in nodes if name not in self._nodes), None)

    def extend(self) -> list[ReferencedTensor]:
        """Add the references as nodes and outputs; returns the tensors that have one, in the order of the graph."""
        tensors = [found for node in list(self._captured.node) for found in self._refer(node)]
        known = {value.name for value in self._placed.output}
        names = [name for each in tensors for name in (each.name, each.reference)]
        names += [each.from_rounded for each in tensors if each.rounded]
        self._placed.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
        return tensors

    def _find_biased(self, layers: Iterable[Layer]) -> dict[str, Layer]:
        """Find the layers whose output is read by the addition of a bias alone, by the name of that output."""
        readers: dict[str, list[NodeProto]] = {}
        for node in self._captured.node:
            for tensor in node.input:
                readers.setdefault(tensor, []).append(node)
        outputs = {value.name for value in self._captured.output}
        return {
            layer.output: layer
            for layer in layers
            if layer.output not in outputs
            and [node.op_type for node in readers.get(layer.output, [])] == ["Add"]
            and any(tensor in self._weights for tensor in readers[layer.output][0].input)
        }

    def _refer(self, node: NodeProto) -> Iterable[ReferencedTensor]:
        """Add the references of a node; yields its first output, unless the addition of a bias follows."""
        if any(each.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for each in node.attribute):
            return
        if node.name not in self._nodes:
            yield from self._refer_fused(node)
            return
        chained = [tensor for tensor in node.input if tensor in self._biased]
        layer = self._biased[chained[0]] if chained else self._layers.get(node.name)
        precision = self._precision.get(layer.node, "float32") if layer else "float32"
        read = self._nodes[node.name].input
        quantized = [
            tensor
            for tensor in node.input
            if tensor and tensor not in chained and tensor not in self._weights and tensor not in read
        ]
        self._copy(node, REFERENCE, {tensor: tensor + REFERENCE for tensor in chained})
        rounded = bool(quantized) or precision != "float32"
        if rounded:
            changed = {tensor: tensor + ROUNDED for tensor in chained}
            changed |= {tensor: self._requantize(tensor) for tensor in quantized}
            if layer is not None and layer.node == node.name and precision != "float32":
                changed |= self._round_weights(layer, precision)
            self._copy(node, ROUNDED, changed)
        if node.output[0] not in self._biased:
            module = layer.module if layer else node.name.rpartition("/")[0] or node.name
            kind = layer.kind if layer else node.op_type
            yield ReferencedTensor(node.output[0], module, kind, precision, rounded)

    def _refer_fused(self, node: NodeProto) -> Iterable[ReferencedTensor]:
        """Add the reference of a node that is part of an operator; yields its output if that is the operator's."""
        self._copy(node, REFERENCE, {tensor: tensor + REFERENCE for tensor in node.input if tensor in self._fused})
        if node.output[0] not in self._fused:
            module = node.name.rpartition("/")[0] or node.name
            yield ReferencedTensor(node.output[0], module, OPERATOR, "float32", rounded=False)

    def _copy(self, node: NodeProto, suffix: str, inputs: Mapping[str, str]) -> None:
        """Add a node with other inputs, and outputs with a suffix."""
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.name = node.name + suffix
        copy.input[:] = [inputs.get(name) or self._take_weight(name) for name in node.input]
        copy.output[:] = [name and name + suffix for name in node.output]
        self._placed.node.append(copy)

    def _take_weight(self, name: str) -> str:
        """Add a captured initializer to the placed graph; return its name there, while that of another tensor is the
        same."""
        if name not in self._weights:
            return name
        return self._add_weight(name + REFERENCE, numpy_helper.to_array(self._weights[name]))

    def _add_weight(self, name: str, array: Array) -> str:
        if name not in self._added:
            self._added.add(name)
            self._placed.initializer.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def _requantize(self, tensor: str) -> str:
        """Add nodes that round an activation to 8 bits, by its own range."""
        name = tensor + REQUANTIZED
        if name not in self._added:
            self._added.add(name)
            parts = [f"{name}/{part}" for part in ("integers", "scale", "zero")]
            self._placed.node.append(helper.make_node("DynamicQuantizeLinear", [tensor], parts, f"{name}/Q"))
            self._placed.node.append(helper.make_node("DequantizeLinear", parts, [name], f"{name}/DQ"))
        return name

    def _round_weights(self, layer: Layer, precision: Precision) -> dict[str, str]:
        """Add the weights of a layer, rounded to nearest in the bits of its precision; return their names by those of
        the weights."""
        if not layer.stored:
            return {layer.weight: self._round_weight(layer, precision)}
        names = {}
        for stored in layer.stored:
            weight = numpy_helper.to_array(self._weights[stored.name])
            if precision == "float16-weight":
                rounded = weight.astype(np.float16)
            else:
                integers, scale = quantize_along(weight, stored.axes)
                rounded = integers * scale
            names[stored.name] = self._add_weight(stored.name + ROUNDED, rounded.astype(np.float32))
        return names

    def _round_weight(self, layer: Layer, precision: Precision) -> str:
        """Add a layer's weight, rounded to nearest in the bits of its precision."""
        weight = numpy_helper.to_array(self._weights[layer.weight])
        if precision == "float16-weight":
            rounded = weight.astype(np.float16)
        elif precision == "int4-weight" and layer.kind == "MatMul":
            integers, scales, _ = quantize_in_groups(weight, DEFAULT_GROUP_SIZE)
            rounded = integers * expand_scales(scales, len(weight), DEFAULT_GROUP_SIZE)
        else:
            rounded = fake_quantize_weight(weight, layer.axis)
        return self._add_weight(f"{layer.node}/weight{ROUNDED}", rounded.astype(np.float32))
