"""Splitting the graph of a model that writes: an encoder runs once, the decoder for each token, with a cache.

The graph of an encoder-decoder is that of `EncoderDecoder`: source, target and the stacked keys and values of earlier
tokens (`past`) to the tokens that are likeliest. What depends on the source alone goes to the encoder's file, the keys
and values of cross-attention among it; all else to the decoder's. Weights go where they are read. That of a language
model, `LanguageModel`, becomes a decoder alone; of a `VisionLanguageModel`, the tower with its projector becomes the
encoder, and the places of images are read by both. In the decoder, each layer's keys and values are an input and an
output of their own, so that the cache is not stacked and cut at every step.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, shape_inference

from export.capture.model_file import save_model
from export.passes.rewrite import read_tensors
from laconic.errors import CaptureError
from laconic.quantization.graph import Graph
from laconic.runtimes.decoder_file import LOGITS, cross_name, encoder_of, past_name, present_name
from laconic.tasks.decoder_tensors import (
    DECODER_INPUT_IDS,
    IMAGE_FEATURES,
    IMAGE_INPUTS,
    PAST,
    PIXELS,
    PLACES,
    POSITION_IDS,
    TARGET_INPUTS,
    TEXT_INPUTS,
    TOKENS,
)

IDS, MASK = "input_ids", "attention_mask"
LATE = frozenset(TARGET_INPUTS)
"""The inputs that the encoder does not read."""


def has_decoder(graph: Graph) -> bool:
    """Return whether a graph is that of a model that writes, with an encoder or without."""
    return any(spec.name == PAST for spec in graph.inputs)


def is_text_decoder(graph: Graph) -> bool:
    """Return whether a graph is that of a language model, which writes without an encoder but for one of images."""
    names = {spec.name for spec in graph.inputs}
    return PAST in names and DECODER_INPUT_IDS not in names


def split_decoder(path: Path, destination: Path | None = None) -> None:
    """Write the decoder of a model file, and its encoder beside it if it has one: in the file's place by default.
    Raises CaptureError."""
    model = onnx.load(path)
    if destination is None:
        destination = path
        path.with_suffix(".data").unlink(missing_ok=True)
    names = {value.name for value in model.graph.input}
    if DECODER_INPUT_IDS in names:
        encoder, decoder = split_model(model)
        save_model(encoder, encoder_of(destination))
    else:
        if PIXELS in names:
            save_model(take_image_encoder(model), encoder_of(destination))
        decoder = make_text_decoder(model)
    save_model(decoder, destination)


def split_model(model: ModelProto) -> tuple[ModelProto, ModelProto]:
    """Make the encoder and the decoder of a model. Raises CaptureError for a graph of another form."""
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    known = {value.name: value for value in (*inferred.value_info, *inferred.input)}
    past = known[PAST].type.tensor_type.shape.dim
    share_batch_size(model.graph)
    presents = separate_cache(model.graph)
    if len(presents) != past[1].dim_value:
        raise CaptureError(f"the decoder reads {len(presents)} of {past[1].dim_value} keys and values from its cache")
    producers = {name: node for node in model.graph.node for name in node.output}
    source = [value for value in model.graph.input if value.name not in LATE]
    early, late = find_dependent(model.graph, [value.name for value in source]), find_dependent(model.graph, LATE)

    def belongs(name: str) -> bool:
        """Return whether the decoder computes a value; one that is quantized crosses in INT8, for the pair to be
        fused."""
        return name in late or name not in early or producers[name].op_type == "DequantizeLinear"

    logits = find_logits(producers)
    decoder = collect_nodes(model.graph, [logits, *presents], belongs)
    border = [name for name in find_read(decoder) if name in producers]
    encoder = collect_nodes(model.graph, border, lambda name: True)
    if missing := [name for name in border if name not in known]:
        raise CaptureError(f"the shape of {missing[0]!r}, which the decoder reads of the encoder, is not known")
    read = set(find_read(decoder))
    crossing = [rename_description(known[name], cross_name(index)) for index, name in enumerate(border)]
    caches = [describe_cache(past_name(index), "past", past) for index in range(len(presents))]
    inputs = [known[DECODER_INPUT_IDS], *(value for value in source if value.name in read), *crossing, *caches]
    outputs = [
        helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["batch", "target", "vocabulary"]),
        *(describe_cache(present_name(index), "whole", past) for index in range(len(presents))),
    ]
    first, second = make_part(model, encoder, source, crossing), make_part(model, decoder, inputs, outputs)
    for node in first.graph.node:
        replace_input(node, DECODER_INPUT_IDS, source[0].name)
    for old, new in zip(border, crossing, strict=True):
        rename_value(first.graph, old, new.name)
    for old, new in zip([*border, logits, *presents], [*crossing, *outputs], strict=True):
        rename_value(second.graph, old, new.name)
    return first, second


def take_image_encoder(model: ModelProto) -> ModelProto:
    """Take out of a vision-language model what depends on the image alone, as a model of its own: in the graph, an
    input with the features takes its place. Raises CaptureError for a graph of another form."""
    known = {value.name: value for value in (*model.graph.input, *model.graph.output)}
    for node in model.graph.node:
        if is_first_size(node) and node.input[0] in (*TEXT_INPUTS, *IMAGE_INPUTS):
            node.input[0] = IDS
    early, late = find_dependent(model.graph, [PIXELS]), find_dependent(model.graph, TEXT_INPUTS)
    alone = early - late - {PIXELS}
    logits = find_logits({name: node for node in model.graph.node for name in node.output})
    decoder = collect_nodes(model.graph, [logits], lambda name: name not in alone)
    border = [name for name in find_read(decoder) if name in alone]
    if len(border) != 1:
        raise CaptureError(f"the language model reads {len(border)} values of the image, expected its features alone")
    nodes = collect_nodes(model.graph, border, lambda name: True)
    width = known[IMAGE_FEATURES].type.tensor_type.shape.dim[2].dim_value
    features = helper.make_tensor_value_info(cross_name(0), TensorProto.FLOAT, ["batch", "patches", width])
    encoder = make_part(model, nodes, [known[name] for name in IMAGE_INPUTS if name in known], [features])
    for node in encoder.graph.node:
        replace_input(node, IDS, PIXELS)
    rename_value(encoder.graph, border[0], features.name)
    kept = [node for node in model.graph.node if not alone.intersection(node.output)]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    rename_value(model.graph, border[0], features.name)
    model.graph.input.append(features)
    return encoder


def make_text_decoder(model: ModelProto) -> ModelProto:
    """Make the decoder of a language model, from tokens and a cache to logits and the cache with them. Raises
    CaptureError for a graph of another form."""
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    known = {value.name: value for value in inferred.input}
    past = known[PAST].type.tensor_type.shape.dim
    for node in model.graph.node:
        if node.op_type == "Shape" and (node.input[0] == MASK or (is_first_size(node) and node.input[0] in known)):
            node.input[0] = IDS
    presents = separate_cache(model.graph)
    logits = find_logits({name: node for node in model.graph.node for name in node.output})
    nodes = collect_nodes(model.graph, [logits, *presents], lambda name: True)
    if MASK in (read := find_read(nodes)) or len(presents) != past[1].dim_value:
        raise CaptureError(
            f"the model reads {len(presents)} of {past[1].dim_value} keys and values from its cache"
            + (", and its padding" if MASK in read else "")
        )
    caches = [describe_cache(past_name(index), "past", past) for index in range(len(presents))]
    outputs = [
        helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["batch", "seq", "vocabulary"]),
        *(describe_cache(present_name(index), "whole", past) for index in range(len(presents))),
    ]
    features = [known[name] for name in (cross_name(0), PLACES) if name in known]
    decoder = make_part(model, nodes, [known[IDS], known[POSITION_IDS], *features, *caches], outputs)
    for old, new in zip([logits, *presents], outputs, strict=True):
        rename_value(decoder.graph, old, new.name)
    return decoder


def rename_description(value: ValueInfoProto, name: str) -> ValueInfoProto:
    """Describe the type and shape of a value under another name."""
    renamed = ValueInfoProto()
    renamed.CopyFrom(value)
    renamed.name = name
    return renamed


def describe_cache(name: str, axis: str, past: Sequence[Any]) -> ValueInfoProto:
    """Describe the keys or values of one layer. axis: the name of the axis of tokens. past: the axes of the stack of
    all."""
    shape = ["batch", past[2].dim_value, axis, past[4].dim_value]
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def is_batch_size(node: NodeProto) -> bool:
    """Return whether a node is the size of the first axis of the decoder's tokens, which the source and the image
    share."""
    return is_first_size(node) and node.input[0] in (DECODER_INPUT_IDS, IDS)


def is_first_size(node: NodeProto) -> bool:
    """Return whether a node is the size of an axis 0."""
    bounds = {attribute.name: attribute.i for attribute in node.attribute}
    return node.op_type == "Shape" and bounds == {"start": 0, "end": 1}


def share_batch_size(graph: GraphProto) -> None:
    """Read the size of the batch from the target, wherever it is read from one of the inputs: the exporter takes any of
    them, also the cache in the middle of the encoder. Each part then reads it from an input of its own."""
    names = {value.name for value in graph.input}
    for node in graph.node:
        if is_first_size(node) and node.input[0] in names:
            node.input[0] = DECODER_INPUT_IDS


def separate_cache(graph: GraphProto) -> list[str]:
    """Let each layer read its earlier keys and values from an input of its own instead of from the stack of all.

    Returns, in their order, the values that hold the earlier ones with the new ones.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    presents: dict[int, str] = {}
    for node in [node for node in graph.node if PAST in node.input]:
        if node.op_type == "Shape":
            keep_shape(graph, node)
            continue
        if node.op_type != "Gather" or node.input[1] not in weights:
            raise CaptureError(f"the decoder reads its cache by {node.op_type}; expected one index of it at a time")
        index = int(numpy_helper.to_array(weights[node.input[1]]))
        readers = [each for each in graph.node if node.output[0] in each.input]
        joined = [each for each in readers if each.op_type == "Concat" and each.input[0] == node.output[0]]
        if len(joined) != 1:
            raise CaptureError(f"{node.name} is not joined with the keys and values of new tokens")
        presents[index] = joined[0].output[0]
        for reader in readers:
            replace_input(reader, node.output[0], past_name(index))
        graph.node.remove(node)
    return [presents[index] for index in sorted(presents)]


def keep_shape(graph: GraphProto, node: NodeProto) -> None:
    """Take the shape of the stack from the first layer's keys, which it has in common but for the stack's own axis."""
    name = f"{node.name}/stack"
    graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), f"{name}/axes"))
    unsqueeze = helper.make_node("Unsqueeze", [past_name(0), f"{name}/axes"], [name], name=name)
    graph.node.insert(list(graph.node).index(node), unsqueeze)
    replace_input(node, PAST, name)


def find_logits(producers: dict[str, NodeProto]) -> str:
    """Find the value whose largest elements are the likeliest tokens."""
    node = producers.get(TOKENS)
    if node is None or node.op_type != "ArgMax":
        raise CaptureError(f"the output {TOKENS!r} is not the largest of the logits")
    return str(node.input[0])


def find_dependent(graph: GraphProto, inputs: Collection[str]) -> set[str]:
    """Find the values that are computed from any of these inputs, but for the size of the batch; from those of the
    cache, where `past` is among them."""
    dependent = {*inputs}
    if PAST in inputs:
        dependent.update(name for node in graph.node for name in node.input if name.startswith("past."))
    for node in graph.node:
        if not is_batch_size(node) and any(name in dependent for name in read_tensors(node)):
            dependent.update(node.output)
    return dependent


def collect_nodes(graph: GraphProto, results: Collection[str], belongs: Callable[[str], bool]) -> list[NodeProto]:
    """Collect the nodes that results are computed by, in the graph's order, back to values that do not belong to
    them."""
    needed = {*results}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(name for name in read_tensors(node) if belongs(name))
    return kept[::-1]


def find_read(nodes: Collection[NodeProto]) -> list[str]:
    """List what nodes read that none of them computes, each once."""
    made = {name for node in nodes for name in node.output}
    return list(dict.fromkeys(name for node in nodes for name in read_tensors(node) if name not in made))


def make_part(
    model: ModelProto, nodes: Sequence[NodeProto], inputs: list[ValueInfoProto], outputs: list[ValueInfoProto]
) -> ModelProto:
    """Make a model of some of the nodes, with the weights that they read."""
    read = set(find_read(nodes))
    weights = [tensor for tensor in model.graph.initializer if tensor.name in read]
    part = ModelProto()
    part.CopyFrom(ModelProto(ir_version=model.ir_version, opset_import=model.opset_import))
    part.producer_name, part.producer_version = model.producer_name, model.producer_version
    part.graph.CopyFrom(helper.make_graph(nodes, model.graph.name, inputs, outputs, weights))
    return part


def rename_value(graph: GraphProto, old: str, new: str) -> None:
    """Give a value another name wherever it is computed and read."""
    for node in graph.node:
        replace_input(node, old, new)
        for place, name in enumerate(node.output):
            if name == old:
                node.output[place] = new


def replace_input(node: NodeProto, old: str, new: str) -> None:
    """Let a node read another value in place of one."""
    for place, name in enumerate(node.input):
        if name == old:
            node.input[place] = new
