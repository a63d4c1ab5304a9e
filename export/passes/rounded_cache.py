"""A cache of keys and values in 8 bits, as nodes of a language model's graph: what is added to it is rounded."""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, helper

from export.passes.rewrite import GraphRewriter
from laconic.runtimes.decoder_file import rounded_name
from laconic.tasks.decoder_tensors import PAST

STEPS, LEAST, WIDTH = "rounded/steps", "rounded/least", "rounded/width"
"""The constants: the steps between the least and the largest number, the least size of one, and the axis of a head."""


def round_cache(rewrite: GraphRewriter) -> None:
    """Round new keys and values to 8 bits before they are joined with earlier ones: for each head of each token, to 256
    levels between its least and its largest number.

    A token reads itself and those beside it rounded too, so that a text at once gives what it gives token by token.
    """
    rewrite.set_initializer(STEPS, np.array(255, np.float32))
    rewrite.set_initializer(LEAST, np.array(1e-9, np.float32))
    rewrite.set_initializer(WIDTH, np.array([-1], np.int64))
    for index, joined in find_joined(rewrite):
        new = joined.input[1]
        rewrite.insert_between(new, make_rounding(new, rounded_name(index)), rounded_name(index), [joined.name])


def find_joined(rewrite: GraphRewriter) -> Iterator[tuple[int, NodeProto]]:
    """Find the nodes that join earlier keys or values with new ones, each with its place in the cache."""
    for node in rewrite.nodes.values():
        if node.op_type == "Gather" and node.input[0] == PAST:
            for reader in map(rewrite.nodes.__getitem__, rewrite.readers(node.output[0])):
                if reader.op_type == "Concat" and reader.input[0] == node.output[0]:
                    yield int(rewrite.array(node.input[1])), reader


def make_rounding(tensor: str, result: str) -> list[NodeProto]:
    """Make nodes that round a tensor. The first input of the last node is scaled levels, and the second the least
    numbers: by these an engine with a cache in 8 bits finds what it keeps."""

    def make(kind: str, inputs: list[str], name: str) -> NodeProto:
        inputs = [each if each in (tensor, STEPS, LEAST, WIDTH) else f"{result}/{each}" for each in inputs]
        output = f"{result}/{name}" if name else result
        return helper.make_node(kind, inputs, [output], output)

    return [
        make("ReduceMin", [tensor, WIDTH], "low"),
        make("ReduceMax", [tensor, WIDTH], "high"),
        make("Sub", ["high", "low"], "range"),
        make("Div", ["range", STEPS], "step"),
        make("Max", ["step", LEAST], "scale"),
        make("Sub", [tensor, "low"], "shifted"),
        make("Div", ["shifted", "scale"], "scaled"),
        make("Round", ["scaled"], "levels"),
        make("Mul", ["levels", "scale"], "restored"),
        make("Add", ["restored", "low"], ""),
    ]
