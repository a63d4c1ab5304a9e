"""From the decoder of an encoder-decoder in ONNX to one that reads rows of different lengths together.

As in `batched_graph`, rows end at the same place, and an input `padding` hides what lies in front of them from
self-attention. The graph counts the places of tokens by itself, from the length of the cache: where it reads a table of
positions by them, an input `shift` is taken off.
"""

from collections import deque
from pathlib import Path

import numpy as np

from laconic.errors import RuntimeFailure
from laconic.runtimes.batched_graph import add_padding, keep_last
from laconic.runtimes.decoder_file import LOGITS, past_name, present_name
from laconic.runtimes.openvino import opset, ov
from laconic.runtimes.stateful_graph import read_cache_shape, read_graph
from laconic.tasks.decoder_tensors import DECODER_INPUT_IDS

SHIFT = "shift"
"""The input that is taken off the places of tokens: the padding in front of each row, [batch, 1] int64."""
SHAPE = "ShapeOf"


def read_encoder_decoder(path: Path) -> "tuple[ov.Model, list[ov.op.Parameter]]":
    """Read the decoder of an encoder-decoder, and add the inputs `padding` and, where it reads positions, `shift`; its
    logits are those of the last tokens. Return it with the inputs that hold the cache. Raises RuntimeFailure for
    a graph that is no such decoder, or whose attention is not found."""
    graph = read_graph(path)
    inputs = {parameter.get_friendly_name(): parameter for parameter in graph.get_parameters()}
    outputs = {name for output in graph.outputs for name in output.get_names()}
    pasts = [inputs[name] for name in map(past_name, range(len(inputs))) if name in inputs]
    has_presents = {LOGITS, *map(present_name, range(len(pasts)))} <= outputs
    if not pasts or DECODER_INPUT_IDS not in inputs or not has_presents:
        raise RuntimeFailure(f"{path.name} is no decoder of an encoder-decoder with a cache")
    softmaxes = [find_self_attention(past, path) for past in pasts[::2]]
    shift_positions(graph, pasts)
    add_padding(graph, softmaxes)
    keep_last(graph)
    graph.validate_nodes_and_infer_types()
    return graph, pasts


def find_self_attention(past: "ov.op.Parameter", path: Path) -> "ov.Node":
    """Find the softmax over the scores of a layer's keys: the nearest one behind them. Raises RuntimeFailure."""
    queue: deque[ov.Node] = deque([past])
    seen: set[str] = set()
    while queue:
        node = queue.popleft()
        if node.get_type_name() == "Softmax" and node.get_output_partial_shape(0).rank == ov.Dimension(4):
            return node
        for output in node.outputs():
            for target in output.get_target_inputs():
                reader = target.get_node()
                if reader.get_type_name() != SHAPE and reader.get_friendly_name() not in seen:
                    seen.add(reader.get_friendly_name())
                    queue.append(reader)
    raise RuntimeFailure(f"{path.name} has no softmax over the scores of {past.get_friendly_name()}")


def shift_positions(graph: "ov.Model", pasts: "list[ov.op.Parameter]") -> None:
    """Take the input `shift` off the places by which the graph reads a table of positions. A table of biases by
    distance, which has a number for each head, is left alone."""
    heads, _ = read_cache_shape(pasts[0])
    names = {past.get_friendly_name() for past in pasts}
    shift = opset.parameter([-1, 1], ov.Type.i64, name=SHIFT)
    shift.output(0).get_tensor().set_names({SHIFT})
    is_read = False
    for node in graph.get_ordered_ops():
        kind = node.get_type_name()
        if kind not in ("Gather", "GatherND"):
            continue
        table, places = node.input_value(0).get_partial_shape(), node.input_value(1)
        if table.rank != ov.Dimension(2) or table.is_dynamic or table[1] == ov.Dimension(heads):
            continue
        if not names & find_inputs(places.get_node()):
            continue
        taken = opset.convert(shift, places.get_element_type())
        if kind == "GatherND":  # its places are lists of one number, [batch, tokens, 1]
            taken = opset.unsqueeze(taken, opset.constant(np.int64(2)))
        node.input(1).replace_source_output(opset.subtract(places, taken).output(0))
        is_read = True
    if is_read:
        graph.add_parameters([shift])


def find_inputs(node: "ov.Node") -> set[str]:
    """Find the inputs of the graph that a node depends on, by name."""
    names: set[str] = set()
    seen: set[str] = set()
    queue = [node]
    while queue:
        node = queue.pop()
        if node.get_friendly_name() in seen:
            continue
        seen.add(node.get_friendly_name())
        if node.get_type_name() == "Parameter":
            names.add(node.get_friendly_name())
        queue += [value.get_node() for value in node.input_values()]
    return names
