"""Rules on the file and its types: opset, element types, numbers that overflowed, unnamed axes, external data."""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from export.lint.lint_graph import LintGraph, Problem, attribute_of, error, type_name, warning

OPSETS = range(9, 26)
"""The opsets that the parser of TensorRT 11 takes."""
SAME_TYPE: dict[str, slice] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Min", "Max", "Sum", "Mean", "Concat", "PRelu"), slice(None)),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), slice(None)),
    **dict.fromkeys(("MatMul", "Gemm", "Conv", "ConvTranspose", "LayerNormalization"), slice(None)),
    "Where": slice(1, None),
    "QuantizeLinear": slice(2),
}
"""Operators whose inputs have one element type, and which of the inputs those are."""
HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
EIGHT_BITS = tuple(
    getattr(TensorProto, name) for name in ("FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "FLOAT8E5M2FNUZ")
)
FOUR_BITS = (TensorProto.INT4, TensorProto.UINT4)


def check_opset(graph: LintGraph) -> Iterator[Problem]:
    """Check that the parser takes the opset: the parser of TensorRT 11 takes opset 9 to 25 (NVIDIA's documentation)."""
    if graph.opset not in OPSETS:
        yield error(
            "",
            f"the model has opset {graph.opset}, and TensorRT 11's parser takes {OPSETS.start} to {OPSETS.stop - 1}. "
            f"Export it with an opset in between",
        )


def check_quantization_opset(graph: LintGraph) -> Iterator[Problem]:
    """Find forms of QuantizeLinear and DequantizeLinear that came later than the model's opset."""
    for node in graph.of_type("QuantizeLinear", "DequantizeLinear"):
        needed, what = find_needed_opset(graph, node)
        if graph.opset < needed:
            yield error(
                node,
                f"{node.op_type} with {what} exists from opset {needed}, and the model has {graph.opset}. Convert it "
                f"to opset {needed} or later",
            )


def find_needed_opset(graph: LintGraph, node: NodeProto) -> tuple[int, str]:
    """Find the first opset with what a quantization node uses, and what that is."""
    types = {graph.types.get(name) for name in (*node.input, *node.output) if name}
    if types & {TensorProto.FLOAT4E2M1}:
        return 23, "FP4"
    if types & set(FOUR_BITS):
        return 21, "INT4"
    if attribute_of(node, "block_size", 0):
        return 21, "blocks"
    if types & set(EIGHT_BITS):
        return 19, "FP8"
    if graph.types.get(node.input[1]) in HALF:
        return 19, f"scales in {type_name(graph.types[node.input[1]])}"
    if (graph.shape(node.input[1]) or ()) not in ((), (1,)):
        return 13, "a scale per channel"
    return 10, "a scale"


def check_mixed_types(graph: LintGraph) -> Iterator[Problem]:
    """Find operators whose inputs differ in type. TensorRT 11 knows strongly typed networks only: it inserts no
    casts."""
    for node in graph.of_type(*SAME_TYPE):
        names = [name for name in node.input[SAME_TYPE[node.op_type]] if name in graph.types]
        types = dict.fromkeys(graph.types[name] for name in names)
        if len(types) > 1:
            yield error(
                node,
                f"{node.op_type} reads {' and '.join(type_name(each) for each in types)}, and a strongly typed network "
                f"casts nothing by itself. Insert a Cast",
            )


def check_overflow(graph: LintGraph) -> Iterator[Problem]:
    """Find numbers that overflowed: FP16 ends at 65504. A single infinity may be the mask of an attention, so it is a
    warning."""
    for name, tensor in graph.tensors.items():
        values = graph.array(name) if tensor.data_type == TensorProto.FLOAT16 else None
        if values is None or np.isfinite(values).all():
            continue
        if values.size == 1:
            text = f"{name} is {values.reshape(-1)[0]} in FP16: a row that is masked as a whole becomes NaN in Softmax"
            yield warning(name, f"{text}. Use the lowest finite number, -65504")
        else:
            count = int(values.size - np.isfinite(values).sum())
            text = f"{count} of {values.size} numbers of {name} are infinite or NaN in FP16, which ends at 65504"
            yield error(name, f"{text}. Keep this tensor in FP32, or in BF16")


def check_float64(graph: LintGraph) -> Iterator[Problem]:
    """Find FP64, which TensorRT casts to FP32 (the parser's documentation)."""
    values = {value.name: value.type.tensor_type.elem_type for value in graph.model.graph.input}
    for name, kind in {**values, **{name: tensor.data_type for name, tensor in graph.tensors.items()}}.items():
        if kind == TensorProto.DOUBLE:
            yield warning(name, f"{name} is FP64, which TensorRT casts to FP32. Export it in FP32")


def check_axes(graph: LintGraph) -> Iterator[Problem]:
    """Find dynamic axes without a name, by which their bounds are given."""
    for value in graph.model.graph.input:
        if value.name in graph.tensors:
            continue
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            yield warning(value.name, f"input {value.name} has no shape. Export it with the rank and named axes")
            continue
        for axis, size in enumerate(tensor.shape.dim):
            if not size.dim_param and not size.HasField("dim_value"):
                yield warning(
                    value.name,
                    f"axis {axis} of input {value.name} is dynamic and has no name, by which an optimization profile "
                    f"finds its bounds. Export it with a name (dynamic_shapes)",
                )


def check_external_data(graph: LintGraph) -> Iterator[Problem]:
    """Check the weights that lie in files beside the model."""
    home = graph.folder.resolve()
    missing: dict[str, str] = {}
    for name, tensor in graph.tensors.items():
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path = (home / entries.get("location", "")).resolve()
        end = sum(int(size) for size in (entries.get("offset", ""), entries.get("length", "")) if size.isdecimal())
        if not path.is_relative_to(home):
            missing[name] = f"lies outside the folder of the model, in {entries.get('location')}"
        elif not path.is_file():
            missing[name] = f"lies in {path.name}, which is missing"
        elif path.stat().st_size < end:
            missing[name] = f"ends at byte {end} of {path.name}, which has {path.stat().st_size}"
    for name, what in missing.items():
        yield error(name, f"the data of {name} {what}. Copy the model again, with its external data")
