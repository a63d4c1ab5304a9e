"""From a decoder with a cache in ONNX to one that reads rows of different lengths together.

Rows end at the same place, and shorter ones have padding in front. A graph's own masks compare places, so that windows
and biases by distance stay as they are; an input `padding` is added to the scores of every attention, and hides what
lies in front of a row.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from laconic.errors import RuntimeFailure
from laconic.runtimes.decoder_file import LOGITS
from laconic.runtimes.low_bit_cache import keep_levels
from laconic.runtimes.openvino import opset, ov
from laconic.runtimes.stateful_graph import find_key, find_pasts, is_product, read_graph

PADDING = "padding"
"""The input that is added to the scores: [batch, 1, 1, past + tokens], 0 or `HIDING`."""
KEPT = "kept"
"""The input that says of which token on, counted from the end, logits are computed: [1], -1 for the last alone."""
HIDING = -1e9
"""Added to the scores of padding, whose share is then 0, in BF16 too; less may overflow beside a mask of the graph."""
PASSING = ("Add", "Convert", "Divide", "Multiply", "Tanh")
"""What may stand between a product and what it is for: each output number is made of one number."""


def read_batched(path: Path) -> "tuple[ov.Model, list[ov.op.Parameter]]":
    """Read a decoder with a cache, and add the input `padding`; its logits are those of the last tokens, [batch, kept,
    vocabulary]. Return it with the inputs that hold the cache, in 8 bits where the graph rounds it.

    Raises RuntimeFailure for a graph that is no such decoder, or whose attention is not found.
    """
    graph = read_graph(path)
    pasts = find_pasts(graph, path)
    softmaxes = [node for node in graph.get_ordered_ops() if is_attention(node)]
    if len(softmaxes) * 2 != len(pasts):
        raise RuntimeFailure(
            f"{path.name} has a cache of {len(pasts) // 2} layers, and attention that can be batched in "
            f"{len(softmaxes)} of them: a softmax over the scores of all tokens is expected, multiplied with the values"
        )
    add_padding(graph, softmaxes)
    for node in graph.get_ordered_ops():
        share_heads(node)
    keep_last(graph)
    parts = keep_levels(graph, pasts)
    graph.validate_nodes_and_infer_types()
    return graph, parts


def add_padding(graph: "ov.Model", softmaxes: "Sequence[ov.Node]") -> None:
    """Add the input `padding`, which is added to the scores of every one of these attentions."""
    padding = opset.parameter([-1, 1, 1, -1], ov.Type.f32, name=PADDING)
    padding.output(0).get_tensor().set_names({PADDING})
    for softmax in softmaxes:
        scores = softmax.input_value(0)
        softmax.input(0).replace_source_output(opset.add(scores, padding).output(0))
    graph.add_parameters([padding])


def is_attention(node: "ov.Node") -> bool:
    """Return whether a node is the softmax of an attention: over [batch, heads, tokens, all tokens], for a product."""
    if node.get_type_name() != "Softmax" or node.get_output_partial_shape(0).rank != ov.Dimension(4):
        return False
    reader = node
    while True:
        readers = [target.get_node() for target in reader.output(0).get_target_inputs()]
        if len(readers) != 1:
            return False
        (reader,) = readers
        if reader.get_type_name() == "MatMul":
            return True
        if reader.get_type_name() not in ("Convert", "Reshape"):
            return False


def keep_last(graph: "ov.Model") -> None:
    """Compute the logits of the last tokens alone, as many as the input `kept` says: in front of the product that makes
    them where that is found, so that a long prompt takes neither the time nor the memory of all."""
    place = graph.output(LOGITS).get_node().input(0)
    node = place.get_source_output().get_node()
    while node.get_type_name() in PASSING and node.get_output_partial_shape(0).rank == ov.Dimension(3):
        axes = [value.get_node().get_type_name() == "Constant" for value in node.input_values()]
        if axes[0] or not all(axes[1:]):
            break
        node = node.input_value(0).get_node()
    if is_product(node, transposed=True) and node.input_value(0).get_partial_shape().rank == ov.Dimension(3):
        place = node.input(0)
    kept = opset.parameter([1], ov.Type.i64, name=KEPT)
    kept.output(0).get_tensor().set_names({KEPT})
    bounds = (opset.constant(np.array([value], np.int64)) for value in (np.iinfo(np.int64).max, 1, 1))
    place.replace_source_output(opset.slice(place.get_source_output(), kept, *bounds).output(0))
    graph.add_parameters([kept])


def share_heads(product: "ov.Node") -> None:
    """Have a product with keys or values that are repeated for groups of heads read them as they are, the heads of a
    group as rows: SmolLM2-135M, 8 rows of 450 tokens, spent a third of a step on repeating them."""
    if not is_product(product, transposed=True):
        return
    key = find_key(product)
    repeated = (product.input_value(1) if key is None else key).get_node()
    broadcast = repeated.input_value(0).get_node() if repeated.get_type_name() == "Reshape" else repeated
    if broadcast.get_type_name() != "Broadcast":
        return
    unsqueeze, target = (value.get_node() for value in broadcast.input_values()[:2])
    if unsqueeze.get_type_name() != "Unsqueeze" or target.get_type_name() != "Constant":
        return
    sizes, axes = target.get_data().tolist(), unsqueeze.input_value(1).get_node().get_data().tolist()
    shape = unsqueeze.get_output_partial_shape(0)
    if len(sizes) != 5 or sizes != [1, 1, sizes[2], 1, 1] or axes != [2] or shape[1].is_dynamic:
        return
    heads = shape[1].get_length()
    rows = reshape_heads(product.input_value(0), heads)
    shared = opset.matmul(rows, unsqueeze.input_value(0), transpose_a=False, transpose_b=key is not None)
    product.output(0).replace(reshape_heads(shared.output(0), heads * sizes[2]).output(0))


def reshape_heads(tensor: "ov.Output", heads: int) -> "ov.Node":
    """Reshape [batch, heads, rows, width] to another number of heads, each with more or fewer rows."""
    return opset.reshape(tensor, opset.constant(np.array([0, heads, -1, 0], np.int64)), special_zero=True)
