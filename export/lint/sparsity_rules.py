"""Rules on 2:4 sparse weights: which layers have the pattern that TensorRT has kernels for, and what spoils it.

They restate NVIDIA's documentation of structured sparsity in TensorRT; none was tried on a GPU for this module.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from export.lint.layer_rules import WeightedNode, list_weighted
from export.lint.lint_graph import LintGraph, Problem, attribute_of, warning
from laconic.arrays import Array

LEAST_CHANNELS = 256
"""Input or output channels below which TensorRT was seen to use no sparse kernel (its issue 4065)."""
LEAST_ZEROS = 0.4
"""Share of zeros from which a weight is taken to be meant as sparse. Trained weights have hardly any; INT8 ones had up
to a tenth."""
RANKS = {"Gemm": range(2, 3), "Conv": range(3, 6), "ConvTranspose": range(3, 6)}
"""Axes of the weights, by operator."""
KEEPING = frozenset({"QuantizeLinear", "DequantizeLinear", "Cast", "Identity"})
"""Operators that keep the zeros of a weight, and their places."""


@dataclass(frozen=True)
class SparseCount:
    """How many linear layers and convolutions have 2:4 sparse weights."""

    sparse: int
    total: int


@dataclass(frozen=True)
class SparseWeight:
    """A weight with many zeros.

    layer: that reads it. zeros: their share. inputs, outputs: channels, of one group of a convolution. groups: of four
    successive inputs. broken: those of them with more than two weights that are not zero; all, where the inputs are no
    multiple of four.
    """

    layer: WeightedNode
    zeros: float
    inputs: int
    outputs: int
    groups: int
    broken: int


def check_sparsity(graph: LintGraph) -> Iterator[Problem]:
    """Find zeros that do not pay off: they do in the 2:4 pattern alone, in wide layers that do not compute in FP32."""
    for weight in list_sparse(graph):
        reason = explain_density(graph, weight)
        if reason:
            share = f"{100 * weight.zeros:.0f} % of the weights are zero, and take the time of others: "
            yield warning(weight.layer.node, share + reason)


def explain_density(graph: LintGraph, weight: SparseWeight) -> str:
    """Say why a layer with many zeros runs as if it had none, and what to try; empty where nothing is known."""
    if weight.inputs % 4:
        return (
            f"its {weight.inputs} inputs are no multiple of four. Only 2:4 sparse weights have kernels; keep it dense"
        )
    if weight.broken:
        return (
            f"{weight.broken} of {weight.groups} groups of four inputs have more than two that are not, and only 2:4 "
            f"sparse weights have kernels. Prune with prune.two-four, and with no stage after it that fills zeros"
        )
    if min(weight.inputs, weight.outputs) < LEAST_CHANNELS:
        return (
            f"TensorRT was seen to use no kernel for sparse weights below {LEAST_CHANNELS} channels, and the layer has "
            f"{weight.inputs} inputs and {weight.outputs} outputs. Measure, or keep it dense"
        )
    if graph.types.get(weight.layer.activation) == TensorProto.FLOAT and not graph.find_dequantizer(
        weight.layer.activation
    ):
        return "the layer computes in FP32, for which there are no sparse kernels. Place it in FP16, BF16, INT8 or FP8"
    return ""


def count_sparse(graph: LintGraph) -> SparseCount:
    """Count the layers whose weights have the 2:4 pattern along their inputs."""
    sparse = sum(not each.broken for each in list_sparse(graph))
    return SparseCount(sparse, len(list(list_weighted(graph))))


def list_sparse(graph: LintGraph) -> Iterator[SparseWeight]:
    """List the weights with at least `LEAST_ZEROS` of zeros."""
    for layer in list_weighted(graph):
        weight = read_weight(graph, layer)
        if weight is None or not weight.size:
            continue
        zeros = 1 - np.count_nonzero(weight) / weight.size
        if zeros < LEAST_ZEROS:
            continue
        occupied = np.moveaxis(weight != 0, find_input_axis(layer, weight.ndim), -1)
        inputs = occupied.shape[-1]
        groups = max(weight.size // 4, 1)
        broken = groups if inputs % 4 else int((occupied.reshape(-1, 4).sum(axis=1) > 2).sum())
        yield SparseWeight(layer, zeros, inputs, weight.shape[layer.axis], groups, broken)


def find_input_axis(layer: WeightedNode, rank: int) -> int:
    """Find the axis of a weight along which products are summed up."""
    if layer.node.op_type == "MatMul":
        return rank - 1 if layer.axis == rank - 2 else rank - 2
    return {"Gemm": 1 - layer.axis, "Conv": 1, "ConvTranspose": 0}[layer.node.op_type]


def read_weight(graph: LintGraph, layer: WeightedNode) -> Array | None:
    """Read the numbers of a weight as it is stored, in the order in which its layer reads them; None where an operator
    changes their order in another way, or they cannot be read."""
    orders = []
    name = layer.weight
    while name not in graph.tensors:
        node = graph.producers.get(name)
        if node is None or node.op_type not in KEEPING | {"Transpose"}:
            return None
        if node.op_type == "Transpose":
            orders.append(node)
        elif node.op_type == "DequantizeLinear" and attribute_of(node, "block_size", 0):
            return None  # weights alone are quantized: the products are in float, of weights unpacked on the way
        name = node.input[0]
    weight = graph.array(name)
    if weight is None or weight.ndim not in RANKS.get(layer.node.op_type, range(2, 65)):
        return None
    for node in reversed(orders):
        order = next((list(each.ints) for each in node.attribute if each.name == "perm"), None)
        if order and sorted(order) != list(range(weight.ndim)):
            return None
        weight = weight.transpose(order)
    return weight
