"""From a decoder with a cache in ONNX to what OpenVINO GenAI takes: attention as one operator, the cache as state.

Paged attention keeps neither a mask nor a bias: every token reads all tokens before it. So a graph whose mask hides
earlier tokens (a sliding window), or adds to scores (ALiBi), is refused here; the engine would compute something else
without a word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laconic.arrays import Array
from laconic.errors import RuntimeFailure
from laconic.runtimes.decoder_file import LOGITS, cross_name, past_name, present_name
from laconic.runtimes.low_bit_cache import count_rounded_bytes, skip_rounding
from laconic.runtimes.openvino import MakeStateful, Manager, core, opset, ov
from laconic.tasks.decoder_tensors import PLACES

IDS, POSITIONS = "input_ids", "position_ids"
FEATURES = cross_name(0)
"""The input of a vision-language model's decoder that holds what its tower makes of images."""
HIDDEN = -1e3
"""A mask adds less than this to the scores of tokens that are not to be read."""
PROBED = 8
"""Tokens of the prompt that a mask is computed for, beside one token after the longest past."""


class PagingRefused(RuntimeFailure):
    """Paged attention would not compute a graph as it is."""


@dataclass(frozen=True)
class CacheShape:
    """The cache of one token. layers: keys and values count as one each; of each: heads and the width of a head. bits:
    of each, where it is rounded; empty where it is in float."""

    layers: tuple[tuple[int, int], ...]
    bits: tuple[int, ...]

    def count_bytes(self, kept: int) -> int:
        """Count its bytes. kept: those of a number in float."""
        if not self.bits:
            return sum(heads * width * kept for heads, width in self.layers)
        pairs = zip(self.layers, self.bits, strict=True)
        return sum(heads * count_rounded_bytes(width, bits) for (heads, width), bits in pairs)


@dataclass(frozen=True)
class StatefulModel:
    """A model as OpenVINO GenAI takes it. vocabulary: the number of its tokens."""

    graph: "ov.Model"
    cache: CacheShape
    vocabulary: int


@dataclass(frozen=True)
class AttentionNodes:
    """The nodes of one attention, softmax(scale q k^T + mask) v. output: the product that it ends in."""

    query: "ov.Output"
    key: "ov.Output"
    value: "ov.Output"
    mask: "ov.Output"
    scale: float
    output: "ov.Node"


def make_stateful(path: Path, context: int) -> StatefulModel:
    """Read a decoder with a cache, and make it stateful. context: the most tokens that the model takes.

    Raises RuntimeFailure for a graph that is no such decoder, PagingRefused for one that paged attention would not
    compute as it is.
    """
    graph = read_graph(path)
    pasts = find_pasts(graph, path)
    if any(parameter.get_friendly_name() == FEATURES for parameter in graph.get_parameters()):
        raise PagingRefused(f"{path.name} reads images, which OpenVINO GenAI takes in graphs of its own alone")
    bits = skip_rounding(graph)
    attentions = [found for node in graph.get_ordered_ops() if (found := match_attention(node)) is not None]
    if len(attentions) * 2 != len(pasts):
        raise PagingRefused(
            f"{path.name} has a cache of {len(pasts) // 2} layers, and attention that can be paged in "
            f"{len(attentions)} of them: softmax(q k + mask) v without a cap on the scores is expected"
        )
    check_masks(graph, attentions, context, path)
    for attention in attentions:
        fuse(attention)
    add_state(graph, pasts)
    cache = CacheShape(tuple(map(read_cache_shape, pasts)), tuple(bits[index] for index in sorted(bits)))
    return StatefulModel(graph, cache, read_vocabulary(graph, path))


def read_graph(path: Path) -> "ov.Model":
    """Read an ONNX graph. Raises RuntimeFailure."""
    try:
        return core().read_model(path)
    except Exception as error:  # the engine raises RuntimeError and its like
        raise RuntimeFailure(f"OpenVINO cannot read {path.name} as an ONNX graph") from error


def find_pasts(graph: "ov.Model", path: Path) -> "list[ov.op.Parameter]":
    """Find the inputs that hold the cache, in their order. Raises RuntimeFailure where the interface is another."""
    inputs = {parameter.get_friendly_name(): parameter for parameter in graph.get_parameters()}
    outputs = {name for output in graph.outputs for name in output.get_names()}
    count = sum(past_name(index) in inputs for index in range(len(inputs)))
    expected = {IDS, POSITIONS, *map(past_name, range(count))}
    has_presents = {LOGITS, *map(present_name, range(count))} <= outputs
    if not count or count % 2 or set(inputs) - {FEATURES, PLACES} != expected or not has_presents:
        raise RuntimeFailure(
            f"{path.name} is no decoder with a cache: expected the inputs {IDS}, {POSITIONS}, {past_name(0)}, ... and "
            f"the outputs {LOGITS}, {present_name(0)}, ..."
        )
    return [inputs[past_name(index)] for index in range(count)]


def match_attention(softmax: "ov.Node") -> AttentionNodes | None:
    """Match the attention around a softmax; None where the node is no softmax, or its surroundings are other."""
    if softmax.get_type_name() != "Softmax":
        return None
    readers = [target.get_node() for target in softmax.output(0).get_target_inputs()]
    scores = softmax.input_value(0).get_node()
    if len(readers) != 1 or not is_product(readers[0]) or scores.get_type_name() != "Add":
        return None
    for product, mask in ((0, 1), (1, 0)):
        node, scale = strip_scale(scores.input_value(product).get_node())
        key = find_key(node) if is_product(node, transposed=True) else None
        if key is not None:
            query, value = node.input_value(0), readers[0].input_value(1)
            return AttentionNodes(query, key, value, scores.input_value(mask), scale, readers[0])
    return None


def is_product(node: "ov.Node", *, transposed: bool = False) -> bool:
    """Return whether a node multiplies matrices as they are. transposed: or the second of them transposed."""
    if node.get_type_name() != "MatMul":
        return False
    attributes = node.get_attributes()
    return not attributes["transpose_a"] and (transposed or not attributes["transpose_b"])


def strip_scale(node: "ov.Node") -> "tuple[ov.Node, float]":
    """Return what is in front of a multiplication or division by a constant number, and the factor."""
    kind = node.get_type_name()
    if kind not in ("Multiply", "Divide"):
        return node, 1.0
    constant = node.input_value(1).get_node()
    if constant.get_type_name() != "Constant" or constant.get_data().size != 1:
        return node, 1.0
    factor = float(constant.get_data().reshape(-1)[0])
    return node.input_value(0).get_node(), factor if kind == "Multiply" else 1 / factor


def find_key(product: "ov.Node") -> "ov.Output | None":
    """Find the keys, [batch, heads, tokens, width], that a product reads transposed; None where it does not."""
    if product.get_attributes()["transpose_b"]:
        return product.input_value(1)
    transpose = product.input_value(1).get_node()
    if transpose.get_type_name() != "Transpose":
        return None
    order = transpose.input_value(1).get_node()
    if order.get_type_name() != "Constant" or order.get_data().tolist() != [0, 1, 3, 2]:
        return None
    return transpose.input_value(0)


def check_masks(graph: "ov.Model", attentions: Sequence[AttentionNodes], context: int, path: Path) -> None:
    """Raise PagingRefused unless every mask hides the tokens that follow, none of those before, and does nothing else.

    Masks are computed for a short prompt, and for the last token of the longest text.
    """
    layers: dict[str, int] = {}
    masks = []
    for layer, attention in enumerate(attentions):
        name = attention.mask.get_node().get_friendly_name()
        if name not in layers:
            layers[name] = layer
            masks.append(attention.mask)
    for past, tokens in ((0, PROBED), (context - 1, 1)):
        hidden = np.arange(past + tokens) > np.arange(past, past + tokens)[:, None]
        for mask, layer in zip(compute_masks(graph, masks, past, tokens, path), layers.values(), strict=True):
            rows = np.broadcast_to(mask, (*mask.shape[:-2], *hidden.shape))
            if not (rows[..., hidden] < HIDDEN).all():
                raise RuntimeFailure(f"layer {layer} of {path.name} reads tokens that follow: its mask is not causal")
            if (rows[..., ~hidden] < HIDDEN).any():
                width = int((rows.reshape(-1, rows.shape[-1])[-1] > HIDDEN).sum())
                raise PagingRefused(
                    f"layer {layer} of {path.name} has a sliding window of {width} tokens, and OpenVINO GenAI's paged "
                    f"attention would read all {past + tokens}"
                )
            if rows[..., ~hidden].any():
                raise PagingRefused(
                    f"layer {layer} of {path.name} adds a bias to the scores of its attention, which OpenVINO GenAI's "
                    f"paged attention would leave out"
                )


def compute_masks(
    graph: "ov.Model", masks: "Sequence[ov.Output]", past: int, tokens: int, path: Path
) -> Sequence[Array]:
    """Compute the masks for new tokens after a past of zeros; [..., tokens, past + tokens] each."""
    probe = ov.Model([opset.result(mask) for mask in masks], graph.get_parameters(), "masks")
    positions = np.arange(past, past + tokens, dtype=np.int64)[None]
    inputs: dict[int, Array] = {}
    for index, parameter in enumerate(graph.get_parameters()):
        name = parameter.get_friendly_name()
        if name in (IDS, POSITIONS):
            inputs[index] = positions if name == POSITIONS else np.zeros_like(positions)
        else:
            heads, width = read_cache_shape(parameter)
            inputs[index] = np.zeros((1, heads, past, width), np.float32)
    try:
        request = core().compile_model(probe, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
        request.infer(inputs)
        return [request.get_output_tensor(index).data.copy() for index in range(len(masks))]
    except Exception as error:
        raise RuntimeFailure(f"OpenVINO cannot compute the masks of the attention of {path.name}") from error


def read_cache_shape(past: "ov.op.Parameter") -> tuple[int, int]:
    """Read the heads and the width of a head of a part of the cache."""
    shape = past.get_partial_shape()
    if shape.rank.get_length() != 4 or shape[1].is_dynamic or shape[3].is_dynamic:
        name = past.get_friendly_name()
        raise RuntimeFailure(f"input {name} has shape {shape}, expected [batch, heads, past, width] with fixed heads")
    return shape[1].get_length(), shape[3].get_length()


def read_vocabulary(graph: "ov.Model", path: Path) -> int:
    """Read the number of tokens that the logits are of."""
    last = graph.output(LOGITS).get_partial_shape()[-1]
    if last.is_dynamic:
        raise RuntimeFailure(f"{path.name} does not say of how many tokens its {LOGITS} are")
    return int(last.get_length())


def fuse(attention: AttentionNodes) -> None:
    """Put one operator in the place of the nodes of an attention. The engine reads past tokens without a mask; the
    graph's own, which `check_masks` found to be no other, would keep nodes that read the shape of the cache."""
    fused = opset.scaled_dot_product_attention(
        attention.query,
        attention.key,
        attention.value,
        opset.constant(np.zeros((1, 1, 1, 1), np.float32)),
        opset.constant(np.float32(attention.scale)),
        causal=True,
    )
    fused.set_friendly_name(attention.output.get_friendly_name())
    attention.output.output(0).replace(fused.output(0))


def add_state(graph: "ov.Model", pasts: "Sequence[ov.op.Parameter]") -> None:
    """Make the cache a state of the model, and add the inputs that GenAI expects: the row that each row goes on from,
    and a mask of padding, which nothing reads."""
    beams = opset.parameter([-1], ov.Type.i32, name="beam_idx")
    mask = opset.parameter([-1, -1], ov.Type.i64, name="attention_mask")
    for parameter in (beams, mask):
        parameter.output(0).get_tensor().set_names({parameter.get_friendly_name()})
    batch = select_batch(graph.input(IDS).get_node().output(0))
    pairs = {}
    for index, past in enumerate(pasts):
        read_batch_elsewhere(past, batch)
        readers = list(past.output(0).get_target_inputs())
        rows = opset.gather(past, beams, opset.constant(np.int32(0)))
        for reader in readers:
            reader.replace_source_output(rows.output(0))
        pairs[past.get_friendly_name()] = present_name(index)
    graph.add_parameters([beams, mask])
    graph.validate_nodes_and_infer_types()
    manager = Manager()
    manager.register_pass(MakeStateful(pairs))
    manager.run_passes(graph)
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            state = node.get_output_partial_shape(0)
            sizes = np.array([state[1].get_length(), 0, state[3].get_length()], np.int64)
            empty = opset.broadcast(opset.constant(np.float32(0)), opset.concat([batch, opset.constant(sizes)], 0))
            node.set_arguments([empty])
    graph.validate_nodes_and_infer_types()


def select_batch(tensor: "ov.Output") -> "ov.Node":
    """Return the size of a tensor's first axis, [1]."""
    shape = opset.shape_of(tensor, ov.Type.i64)
    return opset.gather(shape, opset.constant(np.array([0], np.int64)), opset.constant(np.int64(0)))


def read_batch_elsewhere(past: "ov.op.Parameter", batch: "ov.Node") -> None:
    """Have nodes that read the batch size off the cache read it elsewhere, as a paged one has no rows. batch: [1]."""
    for reader in past.output(0).get_target_inputs():
        shape = reader.get_node()
        if shape.get_type_name() == "ShapeOf":
            for user in list(shape.output(0).get_target_inputs()):
                if is_first_only(user.get_node()):
                    user.get_node().output(0).replace(batch.output(0))


def is_first_only(node: "ov.Node") -> bool:
    """Return whether a node slices the first number off a list."""
    bounds = [value.get_node() for value in node.input_values()[1:4]]
    return (
        node.get_type_name() == "Slice"
        and all(bound.get_type_name() == "Constant" for bound in bounds)
        and [bound.get_data().tolist() for bound in bounds] == [[0], [1], [1]]
    )
