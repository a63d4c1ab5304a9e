"""A cache of keys and values in 8 bits, or of values in 4, in OpenVINO's graphs: of each group of numbers of a token
the levels, their scale and the least number. The graph in an artifact rounds to these; engines that keep a cache keep
the levels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from laconic.errors import RuntimeFailure
from laconic.runtimes.decoder_file import find_value_group, past_name, present_name, rounded_name
from laconic.runtimes.openvino import opset, ov

SCALES = 8
"""Bytes of the scale and the least number of a group, beside its levels."""
TOKENS, WIDTH = 2, 3
"""The axes of tokens and of the numbers of a head."""
HIGH = 16.0
"""What the second of two levels of 4 bits in a byte is multiplied with."""


@dataclass(frozen=True)
class CacheRounding:
    """How a graph rounds keys or values of new tokens. bits: of a level. new: the numbers before. levels, scale, low:
    of their groups. result: computes the rounded numbers."""

    bits: int
    new: "ov.Output"
    levels: "ov.Output"
    scale: "ov.Output"
    low: "ov.Output"
    result: "ov.Node"

    @classmethod
    def read(cls, result: "ov.Node", bits: int) -> "CacheRounding":
        """Read it off the node that ends it: a sum of scaled levels and the least numbers, joined to heads again where
        these have several groups."""
        is_grouped = result.get_type_name() == "Reshape"
        restored = result.input_value(0).get_node() if is_grouped else result
        levels, scale = restored.input_value(0).get_node().input_values()
        low = restored.input_value(1)
        read = low.get_node().input_value(0)
        return cls(bits, read.get_node().input_value(0) if is_grouped else read, levels, scale, low, result)


def count_rounded_bytes(width: int, bits: int) -> int:
    """Count the bytes of the keys or the values of a head of a token."""
    groups = width // find_value_group(width) if bits == 4 else 1
    return width * bits // 8 + SCALES * groups


def find_rounded(graph: "ov.Model") -> dict[int, CacheRounding]:
    """Find how keys and values of new tokens are rounded, by their place in the cache; none where that is in float."""
    places = {rounded_name(index, bits): (index, bits) for index in range(len(graph.inputs)) for bits in (8, 4)}
    nodes = [(node, places.keys() & node.output(0).get_names()) for node in graph.get_ordered_ops() if node.outputs()]
    return {places[name][0]: CacheRounding.read(node, places[name][1]) for node, names in nodes for name in names}


def skip_rounding(graph: "ov.Model") -> Mapping[int, int]:
    """Have what reads rounded keys and values of new tokens read them as they are, for an engine that rounds them as it
    keeps them. Return the bits of each, by its place in the cache."""
    rounded = find_rounded(graph)
    for rounding in rounded.values():
        rounding.result.output(0).replace(rounding.new)
    return {index: rounding.bits for index, rounding in rounded.items()}


def keep_levels(graph: "ov.Model", pasts: "Sequence[ov.op.Parameter]") -> "list[ov.op.Parameter]":
    """Have a graph that rounds keys and values take and return levels, of 4 bits two in a byte, and with each part of
    the cache another, the scales and least numbers: [batch, heads, tokens, 2 groups]. Return the inputs that hold the
    cache: those that are there where it is in float. pasts: these. Raises RuntimeFailure for a graph of another
    form."""
    rounded = find_rounded(graph)
    if not rounded:
        return list(pasts)
    return [part for index, past in enumerate(pasts) for part in keep_part(graph, past, rounded.get(index), index)]


def keep_part(
    graph: "ov.Model", past: "ov.op.Parameter", rounding: CacheRounding | None, index: int
) -> "list[ov.op.Parameter]":
    """Replace an input that holds keys or values by two, as `keep_levels`. rounding: of those of new tokens."""
    result = graph.output(present_name(index)).get_node()
    joined = result.input_value(0).get_node()
    if rounding is None or [value.get_node() for value in joined.input_values()] != [past, rounding.result]:
        raise RuntimeFailure(f"the graph rounds its cache in another way than expected, at {past_name(index)}")
    batch, heads, tokens, numbers = past.get_partial_shape()
    width, is_packed = numbers.get_length(), rounding.bits == 4
    groups = width // find_value_group(width) if is_packed else 1
    grid = past_name(index) + ".grid"
    shape = ov.PartialShape([batch, heads, tokens, width * rounding.bits // 8])
    parts = [
        opset.parameter(shape, ov.Type.u8, name=past_name(index)),
        opset.parameter(ov.PartialShape([batch, heads, tokens, 2 * groups]), ov.Type.f32, name=grid),
    ]
    levels, scale, low = (reshape(each, [-1]) for each in (rounding.levels, rounding.scale, rounding.low))
    levels = pack(levels) if is_packed else levels
    new = [opset.convert(levels, ov.Type.u8), opset.concat([scale, low], WIDTH)]
    whole = [opset.concat(pair, TOKENS) for pair in zip(parts, new, strict=True)]
    kept = opset.convert(whole[0], ov.Type.f32)
    scales, lows = (reshape(each, [groups, 1]) for each in opset.split(whole[1], opset.constant(WIDTH), 2).outputs())
    kept = reshape(unpack(kept) if is_packed else kept, [groups, -1])
    restored = reshape(opset.add(opset.multiply(kept, scales), lows), [-1])
    graph.remove_result(result)
    joined.output(0).get_tensor().set_names(set())
    joined.output(0).replace(restored.output(0))
    past.output(0).replace(parts[0].output(0))
    graph.remove_parameter(past)
    graph.add_parameters(parts)
    for part, present in zip(parts, whole, strict=True):
        part.output(0).get_tensor().set_names({part.get_friendly_name()})
        present.output(0).get_tensor().set_names({name_present(part.get_friendly_name())})
    graph.add_results([opset.result(present) for present in whole])
    return parts


def reshape(tensor: "ov.Output | ov.Node", sizes: Sequence[int]) -> "ov.Node":
    """Give the numbers of a head, the fourth axis and what follows, other axes."""
    return opset.reshape(tensor, opset.constant(np.array([0, 0, 0, *sizes], np.int64)), special_zero=True)


def pack(levels: "ov.Node") -> "ov.Node":
    """Join levels of 4 bits, [..., width], those of the first half of a head with those of the second: [..., width /
    2]."""
    low, high = opset.split(levels, opset.constant(WIDTH), 2).outputs()
    return opset.add(low, opset.multiply(high, opset.constant(np.float32(HIGH))))


def unpack(packed: "ov.Node") -> "ov.Node":
    """Divide what `pack` joined."""
    high = opset.floor(opset.multiply(packed, opset.constant(np.float32(1 / HIGH))))
    low = opset.subtract(packed, opset.multiply(high, opset.constant(np.float32(HIGH))))
    return opset.concat([low, high], WIDTH)


def name_present(past: str) -> str:
    """Return the output for a part of the cache with new tokens, by the input for it."""
    return present_name(0).partition(".")[0] + past.removeprefix(past_name(0).partition(".")[0])
