"""A cache of keys and values in 8 bits, in OpenVINO's graphs: of each head of a token the levels, their scale and the
least number. The graph in an artifact rounds to these; engines that keep a cache keep the levels."""

from collections.abc import Sequence

from laconic.errors import RuntimeFailure
from laconic.runtimes.decoder_file import past_name, present_name, rounded_name
from laconic.runtimes.openvino import opset, ov

SCALES = 8
"""Bytes of the scale and the least number of a head, beside its levels."""
TOKENS, WIDTH = 2, 3
"""The axes of tokens and of the numbers of a head."""


def find_rounded(graph: "ov.Model") -> "dict[int, ov.Node]":
    """Find the nodes that compute rounded keys and values of new tokens, by their place in the cache; none where the
    cache is in float. The first input of each is scaled levels, the second the least numbers."""
    places = {rounded_name(index): index for index in range(len(graph.inputs))}
    nodes = [(node, places.keys() & node.output(0).get_names()) for node in graph.get_ordered_ops() if node.outputs()]
    return {places[name]: node for node, names in nodes for name in names}


def skip_rounding(graph: "ov.Model") -> bool:
    """Have what reads rounded keys and values of new tokens read them as they are, for an engine that rounds them as it
    keeps them. Return whether there were any."""
    rounded = find_rounded(graph)
    for node in rounded.values():
        node.output(0).replace(node.input_value(1).get_node().input_value(0))
    return bool(rounded)


def keep_levels(graph: "ov.Model", pasts: "Sequence[ov.op.Parameter]") -> "list[ov.op.Parameter]":
    """Have a graph that rounds keys and values take and return levels of 8 bits, and with each part of the cache
    another, the scales and least numbers: [batch, heads, tokens, 2]. Return the inputs that hold the cache: those that
    are there where it is in float. pasts: these. Raises RuntimeFailure for a graph of another form."""
    rounded = find_rounded(graph)
    if not rounded:
        return list(pasts)
    return [part for index, past in enumerate(pasts) for part in keep_part(graph, past, rounded.get(index), index)]


def keep_part(
    graph: "ov.Model", past: "ov.op.Parameter", rounded: "ov.Node | None", index: int
) -> "list[ov.op.Parameter]":
    """Replace an input that holds keys or values by two, as `keep_levels`. rounded: computes those of new tokens."""
    result = graph.output(present_name(index)).get_node()
    joined = result.input_value(0).get_node()
    if rounded is None or [value.get_node() for value in joined.input_values()] != [past, rounded]:
        raise RuntimeFailure(f"the graph rounds its cache in another way than expected, at {past_name(index)}")
    (levels, scale), low = rounded.input_value(0).get_node().input_values(), rounded.input_value(1)
    batch, heads, tokens, _ = shape = past.get_partial_shape()
    grid = past_name(index) + ".grid"
    parts = [
        opset.parameter(shape, ov.Type.u8, name=past_name(index)),
        opset.parameter(ov.PartialShape([batch, heads, tokens, 2]), ov.Type.f32, name=grid),
    ]
    new = [opset.convert(levels, ov.Type.u8), opset.concat([scale, low], WIDTH)]
    whole = [opset.concat(pair, TOKENS) for pair in zip(parts, new, strict=True)]
    scales, lows = opset.split(whole[1], opset.constant(WIDTH), 2).outputs()
    numbers = opset.add(opset.multiply(opset.convert(whole[0], ov.Type.f32), scales), lows)
    graph.remove_result(result)
    joined.output(0).get_tensor().set_names(set())
    joined.output(0).replace(numbers.output(0))
    past.output(0).replace(parts[0].output(0))
    graph.remove_parameter(past)
    graph.add_parameters(parts)
    for part, present in zip(parts, whole, strict=True):
        part.output(0).get_tensor().set_names({part.get_friendly_name()})
        present.output(0).get_tensor().set_names({name_present(part.get_friendly_name())})
    graph.add_results([opset.result(present) for present in whole])
    return parts


def name_present(past: str) -> str:
    """Return the output for a part of the cache with new tokens, by the input for it."""
    return present_name(0).partition(".")[0] + past.removeprefix(past_name(0).partition(".")[0])
