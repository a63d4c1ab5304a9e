"""Attention as ONNX Runtime's operator MultiHeadAttention.

Its CPU kernel computes scores in blocks that stay in the cache (Dao et al., FlashAttention, 2022), but only where it is
given no mask. A mask that is the same for all queries is therefore written as one more feature of the keys, which meets
a feature of the queries that is constant: their product is added to the scores as the mask was.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, helper

from export.passes.opset import require_opset
from export.passes.rewrite import GraphRewriter
from laconic.runtimes.runtime import JOINED

OPERATOR, DOMAIN = "MultiHeadAttention", "com.microsoft"
SPLIT, KEYS = (0, 2, 1, 3), (0, 2, 3, 1)
"""Permutations of [batch, seq, heads, width]: to a matrix for each head, and that transposed."""
LEAST = -1e30
"""The lowest value that a mask may have: its exponential is 0, as that of minus infinity is, but no product or sum with
it overflows, which would turn a block of scores into NaN."""
SMALL = 1024
"""Most numbers of a constant that a shape may be computed from."""

Sizes = tuple[int | None, ...]
"""The shape of a tensor, None for an axis without a fixed size."""


@dataclass(frozen=True)
class Attention:
    """The nodes of one attention: query times key, an optional mask added, Softmax, times value."""

    scores: NodeProto
    add: NodeProto | None
    softmax: NodeProto
    values: NodeProto

    @property
    def mask(self) -> str:
        """The tensor that is added to the scores; empty for none."""
        return self.add.input[1] if self.add else ""


@dataclass(frozen=True)
class SplitHeads:
    """What a factor of a product is a permutation of. tensor: [batch, seq, heads, width]. count: of heads. factor: by
    which it is multiplied. nodes: the names of those between it and the product."""

    tensor: str
    count: int
    factor: float
    nodes: tuple[str, ...]


def find_attention(rewrite: GraphRewriter) -> Iterator[Attention]:
    """Find the attention of a graph, in the form in which it is captured."""
    for softmax in list(rewrite.nodes.values()):
        if softmax.op_type != "Softmax":
            continue
        add = None
        scores = rewrite.producer(softmax.input[0])
        if scores is not None and scores.op_type == "Add":
            add, scores = scores, rewrite.producer(scores.input[0])
        products = [rewrite.nodes[name] for name in rewrite.readers(softmax.output[0])]
        if scores is None or scores.op_type != "MatMul" or [each.op_type for each in products] != ["MatMul"]:
            continue
        if not any(rewrite.is_initializer(tensor) for product in (scores, *products) for tensor in product.input):
            yield Attention(scores, add, softmax, products[0])


def fuse_attention(rewrite: GraphRewriter, shapes: Mapping[str, Sizes]) -> None:
    """Write attention as MultiHeadAttention, in place, where its mask, if any, is the same for all queries and heads.

    The node gets the names of both products. shapes: of the float graph, by `infer_shapes`.
    """
    columns: dict[tuple[str, int], str] = {}
    for attention in list(find_attention(rewrite)):
        heads = find_all_heads(rewrite, attention, shapes)
        if heads is not None:
            _fuse(rewrite, attention, heads, columns)


def find_all_heads(
    rewrite: GraphRewriter, attention: Attention, shapes: Mapping[str, Sizes]
) -> tuple[SplitHeads, SplitHeads, SplitHeads] | None:
    """Find the queries, keys and values of an attention; None where the operator does not compute it."""
    scores, values = attention.scores, attention.values
    inner = [scores, *([attention.add] if attention.add else []), attention.softmax, values]
    if any(len(rewrite.readers(node.output[0])) > 1 or node.output[0] in rewrite.outputs for node in inner):
        return None
    if any(each.name == "axis" and each.i not in (-1, 3) for each in attention.softmax.attribute):
        return None
    if attention.mask and not is_same_for_all_queries(shapes.get(attention.mask, ())):
        return None
    query = find_heads(rewrite, scores.input[0], SPLIT, shapes)
    key = find_heads(rewrite, scores.input[1], KEYS, shapes)
    value = find_heads(rewrite, values.input[1], SPLIT, shapes)
    merged = [read_permutation(rewrite.nodes[name]) for name in rewrite.readers(values.output[0])]
    if query is None or key is None or value is None or merged != [SPLIT]:
        return None
    return (query, key, value) if query.count == key.count == value.count and value.factor == 1 else None


def is_same_for_all_queries(mask: Sizes) -> bool:
    """Return whether a mask of this shape is [batch, 1, 1, seq], with a row for each sample and a number for each
    key."""
    return len(mask) == 4 and mask[1:3] == (1, 1) and 1 not in (mask[0], mask[3])


def find_heads(
    rewrite: GraphRewriter, tensor: str, order: tuple[int, ...], shapes: Mapping[str, Sizes]
) -> SplitHeads | None:
    """Find what a factor of a product is a permutation of; None where it is not the one of attention.

    order: the permutation from [batch, seq, heads, width].
    """
    factor, nodes = 1.0, list[str]()
    axes: tuple[int, ...] = (0, 1, 2, 3)
    node = rewrite.producer(tensor)
    while node is not None and node.op_type in ("Transpose", "Mul"):
        if len(rewrite.readers(tensor)) > 1 or tensor in rewrite.outputs:
            return None
        if node.op_type == "Transpose":
            permutation = read_permutation(node)
            if len(permutation) != len(axes):
                return None
            axes = tuple(permutation[axis] for axis in axes)
        elif rewrite.is_initializer(node.input[1]) and rewrite.array(node.input[1]).size == 1:
            factor *= rewrite.array(node.input[1]).item()
        else:
            return None
        nodes.append(node.name)
        tensor = node.input[0]
        node = rewrite.producer(tensor)
    if axes != order or node is None or node.op_type != "Reshape":
        return None
    whole, split = shapes.get(node.input[0], ()), shapes.get(tensor, ())
    if len(whole) != 3 or len(split) != 4 or not whole[-1] or not split[-1]:
        return None
    return SplitHeads(tensor, whole[-1] // split[-1], factor, tuple(nodes))


def read_permutation(node: NodeProto) -> tuple[int, ...]:
    """Read the permutation of a Transpose; empty for another node."""
    if node.op_type != "Transpose":
        return ()
    return tuple(axis for attribute in node.attribute if attribute.name == "perm" for axis in attribute.ints)


def _fuse(
    rewrite: GraphRewriter,
    attention: Attention,
    heads: tuple[SplitHeads, SplitHeads, SplitHeads],
    columns: dict[tuple[str, int], str],
) -> None:
    """Replace the nodes of an attention. columns: the masks that have been written as features of keys."""
    scores, values = attention.scores, attention.values
    stem, count = f"{scores.name}/fused", heads[0].count
    scale = heads[0].factor * heads[1].factor
    merge = rewrite.nodes[rewrite.readers(values.output[0])[0]]
    nodes, tensors = list[NodeProto](), [each.tensor for each in heads]
    if attention.mask:
        column = columns.get((attention.mask, count))
        if column is None:
            column = columns[attention.mask, count] = f"{attention.mask}/column/{count}"
            nodes += write_column(rewrite, attention.mask, count, column)
        one = rewrite.set_initializer(f"{stem}/one", np.array(1 / scale, np.float32))
        pads = rewrite.set_initializer(f"{stem}/pads", np.array([0] * 7 + [1], np.int64))
        query, key = f"{stem}/query", f"{stem}/key"
        nodes += [
            helper.make_node("Pad", [tensors[0], pads, one], [query], query),
            helper.make_node("Concat", [tensors[1], column], [key], key, axis=3),
        ]
        tensors[:2] = query, key
    flat = rewrite.set_initializer(f"{stem}/flat", np.array([0, 0, -1], np.int64))
    split = rewrite.set_initializer(f"{stem}/split", np.array([0, 0, count, -1], np.int64))
    packed = [f"{stem}/{part}/flat" for part in ("query", "key", "value")]
    nodes += [helper.make_node("Reshape", [each, flat], [to], to) for each, to in zip(tensors, packed, strict=True)]
    result = f"{stem}/result"
    name = JOINED.join([scores.name, values.name])
    nodes += [
        helper.make_node(OPERATOR, packed, [result], name, domain=DOMAIN, num_heads=count, scale=scale),
        helper.make_node("Reshape", [result, split], merge.output, result),
    ]
    require_opset(rewrite.model, DOMAIN, 1)
    inner = {node.name for node in (scores, attention.add, attention.softmax, values, merge) if node is not None}
    rewrite.replace_nodes(inner.union(*(each.nodes for each in heads)), nodes)


def write_column(rewrite: GraphRewriter, mask: str, heads: int, column: str) -> list[NodeProto]:
    """Make nodes that write an additive mask [batch, 1, 1, seq] as a feature of the keys, [batch, seq, heads, 1]."""
    size = rewrite.set_initializer(f"{column}/size", np.array([1, 1, heads, 1], np.int64))
    shape = rewrite.set_initializer(f"{column}/shape", np.array([0, -1, 1, 1], np.int64))
    least = rewrite.set_initializer(f"{column}/least", np.array(LEAST, np.float32))
    narrow, bounded = f"{column}/narrow", f"{column}/bounded"
    return [
        helper.make_node("Reshape", [mask, shape], [narrow], narrow),
        helper.make_node("Max", [narrow, least], [bounded], bounded),
        helper.make_node("Expand", [bounded, size], [column], column),
    ]


def infer_shapes(model: onnx.ModelProto) -> dict[str, Sizes]:
    """Infer the shape of each tensor of a graph, from its operators and its small constants alone."""
    graph = model.graph
    small = [each for each in graph.initializer if np.prod(each.dims) <= SMALL]
    large = [each for each in graph.initializer if np.prod(each.dims) > SMALL]
    constants = (helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in large)
    outputs = [onnx.ValueInfoProto(name=each.name) for each in graph.output]
    light = helper.make_model(
        helper.make_graph(graph.node, graph.name, [*graph.input, *constants], outputs, small),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
        functions=model.functions,
    )
    inferred = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    return {
        value.name: tuple(
            axis.dim_value if axis.HasField("dim_value") else None for axis in value.type.tensor_type.shape.dim
        )
        for value in (*inferred.input, *inferred.value_info)
    }
