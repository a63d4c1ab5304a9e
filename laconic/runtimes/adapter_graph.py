"""From the graph of a decoder to one that computes with LoRA adapters (Hu et al., 2021) beside its own weights.

Each linear product y = x W becomes y + ((x A) * mask) B, where A and B are inputs: the matrices of several adapters
side by side. The mask, one row for each row of the batch, has ones where the columns of its adapter are. So rows with
different adapters, and with none, are computed together, whatever the weights are stored in.
"""

from dataclasses import dataclass

from laconic.runtimes.batched_graph import KEPT
from laconic.runtimes.openvino import opset, ov

MASK = "adapter_mask"
"""The input that says which columns of the adapters each row uses: [batch, 1, columns], 1 or 0."""
PRODUCT = "/MatMul"
"""What the name of a module's product ends with."""
SCALED = "/smooth"
"""In the names of what divides the inputs of a layer by factors, which its weights are multiplied with."""


@dataclass(frozen=True)
class LinearProduct:
    """A product with an adapter beside it. module: its name, as in the adapter's file. inputs, outputs: its width."""

    module: str
    inputs: int
    outputs: int

    @property
    def names(self) -> tuple[str, str]:
        """The names of the graph's inputs for A, [inputs, columns], and B, [columns, outputs]."""
        return f"{self.module}.adapter_a", f"{self.module}.adapter_b"


def add_adapters(graph: "ov.Model") -> list[LinearProduct]:
    """Add inputs for adapters beside the linear products of a decoder's layers; return these. Left out are the head,
    products in a batch that is flattened, and those whose inputs are scaled for the sake of their weights."""
    mask = make_input(MASK, [-1, 1, -1])
    inputs, products = [mask], []
    for node in graph.get_ordered_ops():
        product = read_product(node)
        if product is None:
            continue
        down, up = product.names
        first, second = make_input(down, [product.inputs, -1]), make_input(up, [-1, product.outputs])
        readers = list(node.output(0).get_target_inputs())
        columns = opset.multiply(opset.matmul(node.input_value(0), first, False, False), mask)
        adapted = opset.add(node, opset.matmul(columns, second, False, False))
        for reader in readers:
            reader.replace_source_output(adapted.output(0))
        inputs += [first, second]
        products.append(product)
    graph.add_parameters(inputs)
    graph.validate_nodes_and_infer_types()
    return products


def read_product(node: "ov.Node") -> LinearProduct | None:
    """Read the product of a linear module; None where the node is another, or takes no adapter."""
    name = node.get_friendly_name()
    if node.get_type_name() != "MatMul" or not name.endswith(PRODUCT):
        return None
    source, weight = node.input_value(0), node.input_value(1).get_partial_shape()
    producer = source.get_node()
    if source.get_partial_shape().rank != ov.Dimension(3) or weight.is_dynamic or len(weight) != 2:
        return None
    if SCALED in producer.get_friendly_name() or is_head_input(producer):
        return None
    sizes = [size.get_length() for size in weight]
    rows, columns = reversed(sizes) if node.get_attributes()["transpose_b"] else sizes
    return LinearProduct(name.removesuffix(PRODUCT), rows, columns)


def is_head_input(node: "ov.Node") -> bool:
    """Return whether a node keeps the last tokens in front of the head."""
    kept: str = node.input_value(1).get_node().get_friendly_name() if node.get_type_name() == "Slice" else ""
    return kept == KEPT


def make_input(name: str, shape: list[int]) -> "ov.op.Parameter":
    """Make an input of a graph, in FP32."""
    parameter = opset.parameter(shape, ov.Type.f32, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter
