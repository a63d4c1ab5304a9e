"""A cache of keys and values in 8 bits, or of values in 4, as nodes of a language model's graph: what is added to it is
rounded."""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, helper

from export.passes.rewrite import GraphRewriter
from laconic.errors import UnsupportedPrecision
from laconic.runtimes.decoder_file import find_value_group, rounded_name
from laconic.tasks.decoder_tensors import PAST

STEPS, LEAST, WIDTH = "rounded/steps", "rounded/least", "rounded/width"
"""The constants: the steps between the least and the largest number, the least size of one, and the axis of a head."""
STEPS_4, DIVIDED, JOINED = "rounded/steps4", "rounded/divided", "rounded/joined"
"""Those of values in 4 bits: the steps, and the shapes of heads that are divided into groups and joined again."""


def round_cache(rewrite: GraphRewriter, *, int4_values: bool = False) -> None:
    """Round new keys and values to 8 bits before they are joined with earlier ones: for each head of each token, to 256
    levels between its least and its largest number. int4_values: round values to 4 bits, each group of a head by itself
    (`find_value_group`).

    A token reads itself and those beside it rounded too, so that a text at once gives what it gives token by token.
    Raises UnsupportedPrecision for values of an odd number in 4 bits.
    """
    rewrite.set_initializer(STEPS, np.array(255, np.float32))
    rewrite.set_initializer(LEAST, np.array(1e-9, np.float32))
    rewrite.set_initializer(WIDTH, np.array([-1], np.int64))
    group = set_groups(rewrite) if int4_values else 0
    for index, joined in find_joined(rewrite):
        new, is_small = joined.input[1], int4_values and index % 2 == 1
        name = rounded_name(index, 4 if is_small else 8)
        nodes = make_group_rounding(new, name, group) if is_small else make_rounding(new, name, STEPS)
        rewrite.insert_between(new, nodes, name, [joined.name])


def set_groups(rewrite: GraphRewriter) -> int:
    """Add the constants of values in 4 bits; return the numbers of a group, 0 where that is a whole head."""
    (past,) = (value for value in rewrite.model.graph.input if value.name == PAST)
    width = past.type.tensor_type.shape.dim[-1].dim_value
    if width % 2:
        raise UnsupportedPrecision(
            f"values of {width} numbers are not kept in 4 bits, which takes two in a byte. Leave out int4_value_cache"
        )
    group = find_value_group(width)
    rewrite.set_initializer(STEPS_4, np.array(15, np.float32))
    rewrite.set_initializer(DIVIDED, np.array([0, 0, 0, -1, group], np.int64))
    rewrite.set_initializer(JOINED, np.array([0, 0, 0, -1], np.int64))
    return 0 if group == width else group


def find_joined(rewrite: GraphRewriter) -> Iterator[tuple[int, NodeProto]]:
    """Find the nodes that join earlier keys or values with new ones, each with its place in the cache."""
    for node in rewrite.nodes.values():
        if node.op_type == "Gather" and node.input[0] == PAST:
            for reader in map(rewrite.nodes.__getitem__, rewrite.readers(node.output[0])):
                if reader.op_type == "Concat" and reader.input[0] == node.output[0]:
                    yield int(rewrite.array(node.input[1])), reader


def make_group_rounding(tensor: str, result: str, group: int) -> list[NodeProto]:
    """Make nodes that round values to 4 bits. group: the numbers of one, 0 for those of a head."""
    if not group:
        return make_rounding(tensor, result, STEPS_4)
    divided, restored = f"{result}/divided", f"{result}/restored"
    return [
        helper.make_node("Reshape", [tensor, DIVIDED], [divided], divided),
        *make_rounding(divided, restored, STEPS_4),
        helper.make_node("Reshape", [restored, JOINED], [result], result),
    ]


def make_rounding(tensor: str, result: str, steps: str) -> list[NodeProto]:
    """Make nodes that round a tensor. The first input of the last node is scaled levels, and the second the least
    numbers: by these an engine with such a cache finds what it keeps."""

    def make(kind: str, inputs: list[str], name: str) -> NodeProto:
        inputs = [each if each in (tensor, steps, LEAST, WIDTH) else f"{result}/{each}" for each in inputs]
        output = f"{result}/{name}" if name else result
        return helper.make_node(kind, inputs, [output], output)

    return [
        make("ReduceMin", [tensor, WIDTH], "low"),
        make("ReduceMax", [tensor, WIDTH], "high"),
        make("Sub", ["high", "low"], "range"),
        make("Div", ["range", steps], "step"),
        make("Max", ["step", LEAST], "scale"),
        make("Sub", [tensor, "low"], "shifted"),
        make("Div", ["shifted", "scale"], "scaled"),
        make("Round", ["scaled"], "levels"),
        make("Mul", ["levels", "scale"], "restored"),
        make("Add", ["restored", "low"], ""),
    ]
