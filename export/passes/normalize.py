"""Normalization of captured graphs: weights as initializers in one layout, and readable names.

After it, a linear layer is a MatMul whose second input is an initializer [in, out], a convolution has its weight as an
initializer, an embedding is a Gather from one, and node names are unique. The exporter's debugging information (stack
traces with local paths, a third of a small file) is removed.
"""

import ast
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from export.passes.fold import fold_scales, split_key_transposes
from export.passes.stored_weights import find_stored_weights, fold_recurrent_weights
from laconic.arrays import Array
from laconic.quantization.graph import Layer, StoredWeight
from laconic.tensor import TensorSpec

SCOPES = "pkg.torch.onnx.name_scopes"
MODULE = "laconic.module"
"""The metadata key of a node's module while the passes run; not written to the file."""


def normalize(model: ir.Model, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> tuple[Layer, ...]:
    """Normalize a model in place, with the names and dynamic axes of these specs.

    Returns its layers in the order in which they run.
    """
    _record_modules(model.graph)
    fold_recurrent_weights(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.RemoveInitializersFromInputsPass()(model)
    common.IdentityEliminationPass()(model)
    for graph in (model.graph, *model.graph.subgraphs()):
        _separate_outputs(graph)
    for value, spec in (*zip(model.graph.inputs, inputs, strict=True), *zip(model.graph.outputs, outputs, strict=True)):
        takes_one_row = value.shape is not None and len(value.shape) > 0 and value.shape[0] == 1
        value.name = spec.name
        value.shape = ir.Shape((1, *spec.shape[1:]) if takes_one_row else spec.shape)
    for value in model.graph.initializers.values():
        _copy_initializer(value)
    for node in list(model.graph):
        if node.op_type == "Gemm" and node.domain == "":
            _split_gemm(model.graph, node)
    for node in list(model.graph):
        if node.op_type == "Transpose" and node.domain == "":
            _fold_transpose(model.graph, node)
    fold_scales(model.graph)
    split_key_transposes(model.graph)
    common.RemoveUnusedNodesPass()(model)
    common.DeduplicateHashedInitializersPass(size_limit=1 << 40)(model)
    common.RemoveUnusedOpsetsPass()(model)
    common.TopologicalSortPass()(model)
    _name_nodes(model.graph)
    _name_values(model.graph)
    layers = tuple(find_layers(model.graph))
    layers = _name_weights(model.graph, layers)
    _strip_metadata(model)
    return layers


def read_constant(value: ir.Value | None) -> Array | None:
    """Read the array of an initializer; None for any other value."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    return value.const_value.numpy()


def _record_modules(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
        node.metadata_props.clear()
        # The last scope is the operation itself, the one before it the module that called it.
        if len(scopes) > 1 and scopes[-2] and not scopes[-2].startswith("_"):
            node.metadata_props[MODULE] = scopes[-2]
        # A convolution with a folded normalization has the scope of the normalization.
        weight = node.inputs[1] if scopes and node.op_type == "Conv" else None
        if weight is not None and str(weight.name).endswith(".weight"):
            node.metadata_props[MODULE] = str(weight.name).removesuffix(".weight")


def _separate_outputs(graph: ir.Graph) -> None:
    """Insert an Identity for each output that is a constant, an input, another output, or, in the body of a loop or a
    branch, a tensor from outside, as ONNX requires."""
    seen: set[int] = set()
    for place, value in enumerate(graph.outputs):
        producer = value.producer()
        if producer is None or producer.graph is not graph or id(value) in seen:
            node = ir.node("Identity", [value])
            node.outputs[0].type = value.type
            graph.append(node)
            graph.outputs[place] = node.outputs[0]
        seen.add(id(value))


def _copy_initializer(value: ir.Value) -> None:
    """Copy an initializer out of the exporter's storage, which may be a view that is transposed."""
    array = read_constant(value)
    if array is not None:
        value.const_value = ir.tensor(np.asarray(array, order="C"), name=value.name)


def _initializer(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    while name in graph.initializers:
        name += "_"
    tensor = ir.tensor(np.asarray(array, order="C"), name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _split_gemm(graph: ir.Graph, gemm: ir.Node) -> None:
    """Replace Gemm with a constant weight by MatMul and Add: engines quantize a MatMul whatever its bias."""
    source, weight = gemm.inputs[1], read_constant(gemm.inputs[1])
    bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    alpha, beta = gemm.attributes.get_float("alpha", 1.0), gemm.attributes.get_float("beta", 1.0)
    if (
        source is None
        or weight is None
        or gemm.attributes.get_int("transA", 0) != 0
        or (bias is not None and beta != 1 and read_constant(bias) is None)
    ):
        return
    turned = gemm.attributes.get_int("transB", 0) == 1
    array = weight.T if turned else weight
    array = array if alpha == 1 else array * np.asarray(alpha, array.dtype)
    matrix = source if array is weight else _initializer(graph, f"{source.name}.T", array)
    output = gemm.outputs[0]
    product = ir.node("MatMul", [gemm.inputs[0], matrix], metadata_props=dict(gemm.metadata_props), name=gemm.name)
    made = [product]
    if bias is not None:
        values = read_constant(bias)
        if values is not None and beta != 1:
            bias = _initializer(graph, f"{bias.name}.scaled", values * np.asarray(beta, values.dtype))
        made.append(ir.node("Add", [product.outputs[0], bias], metadata_props=dict(gemm.metadata_props)))
        product.outputs[0].name = f"{output.name}.product"
    ir.convenience.replace_nodes_and_values(graph, gemm, [gemm], made, [output], [made[-1].outputs[0]])


def _fold_transpose(graph: ir.Graph, node: ir.Node) -> None:
    source, output = node.inputs[0], node.outputs[0]
    array = read_constant(source)
    if source is None or array is None or output.is_graph_output():
        return
    axes = node.attributes.get_ints("perm", tuple(reversed(range(array.ndim))))
    folded = _initializer(graph, f"{source.name}.T", array.transpose(axes))
    ir.convenience.replace_nodes_and_values(graph, node, [node], [], [output], [folded])


def _name_nodes(graph: ir.Graph) -> None:
    """Name nodes after their module, or keep the name; a number makes names unique."""
    taken: set[str] = set()
    counts: dict[str, int] = {}
    for node in graph.all_nodes():
        module = node.metadata_props.get(MODULE)
        stem = f"{module}/{node.op_type}" if module else node.name or node.op_type
        name = stem = stem.replace(",", ".")  # engines join the names of fused nodes by commas
        while name in taken:
            counts[stem] = counts.get(stem, 0) + 1
            name = f"{stem}_{counts[stem]}"
        taken.add(name)
        node.name = name


def _name_values(graph: ir.Graph) -> None:
    """Name values after the nodes that compute them, in place of the exporter's numbers.

    Inputs and outputs keep their names, also where another value has the same one: torch's exporter gives a name twice
    where an output is called like an operation.
    """
    taken = {str(value.name) for value in (*graph.inputs, *graph.outputs)}
    for value in list(graph.initializers.values()):
        if value.name in taken:
            value.name = _unused_name(f"{value.name}.constant", taken)
        taken.add(str(value.name))
    for node in graph.all_nodes():
        for index, value in enumerate(node.outputs):
            if value.name and not value.is_graph_output():
                value.name = _unused_name(f"{node.name}:{index}" if index else str(node.name), taken)
                taken.add(value.name)


def _unused_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def find_layers(graph: ir.Graph) -> Iterator[Layer]:
    """Find the nodes with a float32 weight of two axes or more, in the graph's order."""
    stored = find_stored_weights(graph)
    for node in graph:
        if node.name in stored:
            yield make_stored_layer(node, stored[node.name])
            continue
        if node.domain != "" or node.op_type not in ("MatMul", "Gemm", "Conv", "Gather"):
            continue
        place = 0 if node.op_type == "Gather" else 1
        value, moving = node.inputs[place], node.inputs[1 - place]
        weight = read_constant(value)
        if value is None or moving is None or weight is None or weight.dtype != np.float32 or weight.ndim < 2:
            continue
        if node.op_type == "MatMul":
            if weight.ndim != 2:
                continue
            axis = 1
        elif node.op_type == "Gemm":
            axis = 0 if node.attributes.get_int("transB", 0) else 1
        else:
            axis = 0
        yield Layer(
            node=str(node.name),
            module=node.metadata_props.get(MODULE, str(node.name)),
            kind=node.op_type,  # type: ignore[arg-type]
            input=str(moving.name),
            weight=str(value.name),
            output=str(node.outputs[0].name),
            shape=tuple(weight.shape),
            axis=axis,
        )


def make_stored_layer(node: ir.Node, stored: tuple[StoredWeight, ...]) -> Layer:
    """Make the layer of a node whose arithmetic stays in float."""
    return Layer(
        node=str(node.name),
        module=node.metadata_props.get(MODULE, str(node.name)),
        kind=node.op_type,  # type: ignore[arg-type]
        input=next((str(value.name) for value in node.inputs if value is not None), ""),
        weight=stored[0].name,
        output=str(node.outputs[0].name),
        shape=stored[0].shape,
        axis=0,
        stored=stored,
    )


def _name_weights(graph: ir.Graph, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Give a weight that the exporter numbered (it transposed it) the name of its module."""
    named = []
    renamed: dict[str, str] = {}
    for layer in layers:
        value = graph.initializers.get(layer.weight)
        name = f"{layer.module}.weight"
        if value is not None and layer.module != layer.node and layer.weight.startswith("val_") and not layer.stored:
            while name in graph.initializers:
                name += "_"
            value.name = name
            renamed[layer.weight] = name
        named.append(layer)
    return tuple(Layer(**{**vars(layer), "weight": renamed.get(layer.weight, layer.weight)}) for layer in named)


def _strip_metadata(model: ir.Model) -> None:
    common.ClearMetadataAndDocStringPass()(model)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = value.type = None
            value.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.shape = value.type = None  # the tensor has them
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.doc_string = model.domain = model.model_version = None
