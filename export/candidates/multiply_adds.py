"""The multiply-adds of a graph, product by product, from the shapes of one sample; and what a plan asks for each."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnxscript.optimizer import fold_constants

from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan
from laconic.runtimes.decoder_file import encoder_of
from laconic.runtimes.product import ARITHMETIC, Product, ProductKind, find_arithmetic
from laconic.runtimes.runtime import Compute

Shape = tuple[int, ...]

FUSED = frozenset({"Clip", "Gelu", "HardSwish", "LeakyRelu", "Relu", "Sigmoid", "Tanh"})
"""Activations that engines fuse with the product before them, and may name the kernel after."""


def fold_shapes(model: ir.Model) -> None:
    """Fold the constants of a model in place, and infer its shapes."""
    # A node that cannot be evaluated is left as it is, which is no concern of the user's; a warning would be printed.
    logger = logging.getLogger(fold_constants.__module__).getChild("_constant_folding")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):  # the logarithm of a distance of 0, which T5 then leaves out
            fold_constants(model, onnx_shape_inference=True)
    finally:
        logger.setLevel(before)


def count_products(graph: Graph, sizes: Mapping[str, Sequence[int]]) -> tuple[Product, ...]:
    """Count the multiply-adds of each product of a float graph: matrix products, convolutions, attention, recurrent
    layers, in the order in which they run. Multiplications by zero count.

    sizes: the shape of each input. The result is empty if a shape depends on the values of the inputs.
    """
    model = ir.load(graph.path)
    for value in model.graph.inputs:
        value.shape = ir.Shape(sizes[str(value.name)])
    for value in model.graph.outputs:
        value.shape = None
    # Inference alone does not follow a shape through Slice: BERT's position embeddings lose their length in it.
    fold_shapes(model)
    weights = {layer.node for layer in graph.layers}
    products = []
    for node in model.graph:
        if node.op_type not in FORMULAS or node.domain != "":
            continue
        shapes = [read_shape(value) for value in (*node.inputs, *node.outputs)]
        if any(shape is None for shape in shapes):
            return ()
        inputs, outputs = shapes[: len(node.inputs)], shapes[len(node.inputs) :]
        count = FORMULAS[node.op_type](node, [each or () for each in inputs], outputs[0] or ())
        kind = find_kind(node, weights)
        products.append(Product(node=str(node.name), names=find_names(node), kind=kind, multiply_adds=count))
    return tuple(products)


NODE_BY_NODE = 2e11
"""Multiply-adds that one check may spend in a graph that is run node by node: about ten seconds of one core."""
FEWEST = 8
"""Samples that such a check looks at in any case."""


def limit_samples(count: int, products: Sequence[Product]) -> int:
    """Return how many samples a check of at most `count` looks at, so that one of a large model takes no longer than
    that of a small one. products: of one sample; all samples where none are known."""
    total = sum(each.multiply_adds for each in products)
    return min(count, max(int(NODE_BY_NODE / total), FEWEST)) if total else count


def read_shape(value: ir.Value | None) -> Shape | None:
    """Read the shape of a tensor; () for one that is left out, None where an axis is not known."""
    if value is None:
        return ()
    if value.const_value is not None:
        return tuple(value.const_value.shape.numpy())
    if value.shape is None or not value.shape.is_static():
        return None
    return tuple(value.shape.numpy())


def count_matmul(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Count for [..., rows, inner] times [..., inner, columns]; one of them may be a vector."""
    return math.prod(output) * inputs[0][-1]


def count_gemm(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Count for matrices, either of them transposed."""
    transposed = node.attributes.get_int("transA", 0)
    return math.prod(output) * inputs[0][0 if transposed else 1]


def count_convolution(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Count for a weight [output channels, input channels per group, kernel...]."""
    return math.prod(output) * math.prod(inputs[1][1:])


def count_transposed_convolution(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Count for a weight [input channels, output channels per group, kernel...]: each input is multiplied with all of
    them."""
    return math.prod(inputs[0]) * math.prod(inputs[1][1:])


def count_attention(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Count for query, key and value, [batch, heads, length, width] or [batch, length, heads x width]: scores, and
    their sums."""
    query, key, value = inputs[:3]
    if len(query) == 4:
        return math.prod(query[:3]) * key[2] * (query[3] + value[3])
    groups = node.attributes.get_int("q_num_heads", 1) // node.attributes.get_int("kv_num_heads", 1)
    return query[0] * query[1] * key[1] * (query[2] + value[2] * groups)


def count_recurrent(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Count for inputs [steps, batch, ...], or batch first; weights of inputs and states, [directions, gates x hidden,
    ...]."""
    return math.prod(inputs[0][:2]) * (math.prod(inputs[1]) + math.prod(inputs[2]))


def count_einsum(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Count for two factors: the product of the sizes of all letters. With an ellipsis, of all axes that no letter
    repeats."""
    equation = node.attributes.get_string("equation", "").replace(" ", "").partition("->")[0]
    sizes: dict[str, int] = {}
    for letters, shape in zip(equation.split(","), inputs, strict=True):
        before, _, after = letters.partition("...")
        axes = [*before, *(f".{place}" for place in range(len(shape) - len(before) - len(after), 0, -1)), *after]
        for axis, size in zip(axes, shape, strict=True):
            sizes[axis] = max(size, sizes.get(axis, 1))
    return math.prod(sizes.values()) if len(inputs) > 1 else 0


FORMULAS: Mapping[str, Callable[[ir.Node, Sequence[Shape], Shape], int]] = {
    "MatMul": count_matmul,
    "Gemm": count_gemm,
    "Conv": count_convolution,
    "ConvTranspose": count_transposed_convolution,
    "Attention": count_attention,
    "Einsum": count_einsum,
    "LSTM": count_recurrent,
    "GRU": count_recurrent,
    "RNN": count_recurrent,
}
"""The multiply-adds of a node from the shapes of its inputs and of its first output, by operator."""


def find_kind(node: ir.Node, weights: set[str]) -> ProductKind:
    """Find the kind of a product. weights: the nodes that are layers of the graph."""
    if "Conv" in node.op_type:
        return "convolution"
    if node.op_type in ("LSTM", "GRU", "RNN"):
        return "recurrent"
    constant = any(value is not None and value.const_value is not None for value in node.inputs[:2])
    return "linear" if constant or node.name in weights else "attention"


def find_names(node: ir.Node) -> tuple[str, ...]:
    """Find the names that an engine may give to a product's kernel: of the node, of the bias and the activation after
    it, and of the output of the graph that they end in."""
    names = [str(node.name)]
    value = node.outputs[0]
    while not value.is_graph_output() and len(uses := list(value.uses())) == 1:
        after = uses[0].node
        bias = after.op_type == "Add" and any(
            each is not None and each.const_value is not None for each in after.inputs
        )
        if not bias and after.op_type not in FUSED:
            break
        names.append(str(after.name))
        value = after.outputs[0]
    return (*names, str(value.name)) if value.is_graph_output() else tuple(names)


def plan_products(
    products: Sequence[Product], asked: Plan, plan: Plan, placed: Path, compute: Compute, *, explicit: bool
) -> tuple[Product, ...]:
    """Add to each product what the recipe asks for, and what the placed graph does.

    asked: the plan that the recipe would like best. plan: that of the placed graph, the file `placed`. compute: the
    arithmetic of the layers that are not quantized. explicit: whether the graph itself is in that arithmetic, so that a
    layer in float32 stays in it.
    """
    files = [file for file in (encoder_of(placed), placed) if file.is_file()]
    nodes = [node for file in files for node in onnx.load(file, load_external_data=False).graph.node]
    dequantized = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    integer = {node.name for node in nodes if len(dequantized & set(node.input[:2])) == 2}
    static = next(
        (each for each in ("int8", "float8") if each in asked.precision.values()), find_arithmetic(None, compute)
    )
    annotated = []
    for each in products:
        precision = plan.precision.get(each.node)
        requested: str = asked.precision.get(each.node, compute)
        requested = requested if requested in ARITHMETIC else compute
        planned = "float32" if precision == "float32" and explicit else find_arithmetic(precision, compute)
        if each.kind == "attention":
            requested, planned = static, "int8" if each.node in integer else planned
        elif precision is None:
            requested = planned
        annotated.append(each.model_copy(update={"asked": requested, "planned": planned}))
    return tuple(annotated)
