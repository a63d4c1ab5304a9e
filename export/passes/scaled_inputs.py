"""The division of a tensor by a factor for each channel, which the weights that read it were multiplied with."""

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, helper

from export.passes.rewrite import GraphRewriter
from laconic.arrays import Array


def divide_input(
    rewrite: GraphRewriter, tensor: str, factors: Array, readers: Sequence[str], *, normalization: bool
) -> str:
    """Divide `tensor` by factors [channels] for these readers; return the name of the quotient.

    normalization: where a LayerNormalization computes the tensor, or a product with weights, as at the end of RMSNorm,
    compute the quotient by a second one, which has other weights.
    """
    result = f"{tensor}/smooth"
    producer = rewrite.producer(tensor)
    weights = find_channel_weights(rewrite, producer, factors) if normalization and producer is not None else []
    if producer is not None and weights:
        node = NodeProto()
        node.CopyFrom(producer)
        node.name, node.output[0] = f"{result}/normalize", result
        for slot in weights:
            divided = rewrite.array(producer.input[slot]) / factors
            node.input[slot] = rewrite.set_initializer(f"{result}/{slot}", divided)
    else:
        inverse = rewrite.set_initializer(f"{result}/factors", (1 / factors).astype(np.float32))
        node = helper.make_node("Mul", [tensor, inverse], [result], f"{result}/multiply")
    rewrite.insert_between(tensor, [node], result, readers)
    return result


def find_channel_weights(rewrite: GraphRewriter, node: NodeProto, factors: Array) -> list[int]:
    """Find the inputs of a node that are divided where its output is to be; none where there are no such."""
    if node.op_type == "LayerNormalization":
        return list(range(1, len(node.input)))
    slots = [slot for slot, name in enumerate(node.input) if rewrite.is_initializer(name)]
    has_gain = node.op_type == "Mul" and len(slots) == 1 and rewrite.array(node.input[slots[0]]).shape == factors.shape
    return slots if has_gain else []
