"""Import of an ONNX file from any framework: checked, optimized, and normalized like a captured graph."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import ModelProto, TensorProto, version_converter
from onnx_ir.passes import common
from onnxscript import rewriter
from onnxscript.rewriter.rules.common import fuse_batchnorm_into_conv_rule

from export.capture.graph_file import write_graph
from export.capture.parity import PARITY, largest_difference
from export.passes.optimize import name_nodes, optimize
from laconic.arrays import Arrays
from laconic.errors import CaptureError, RuntimeFailure, SourceError
from laconic.models.processors import plain_task
from laconic.models.signature import probe, probe_sizes
from laconic.quantization.graph import Graph
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import RowByRowSession, Session
from laconic.tasks.task import Task
from laconic.tensor import BATCH, DTYPES, TensorSpec, sample_inputs

LEAST_OPSET = 13
"""The first opset with per-channel scales in QuantizeLinear. A newer file keeps its own."""
FIXED = "takes one row at a time, and does not run on larger batches. Export the model with a dynamic batch"
LEASTS = (3, 32, 224)
"""Sizes to try for dynamic axes without bounds: most networks do not run on images of three pixels."""


def import_onnx(path: Path, folder: Path, task: str | None = None) -> tuple[Graph, Task]:
    """Check the file, normalize it, write it to `folder`, and compare its outputs with those of the original file.

    task: default "tensors"; image-classification needs one float input [batch, channels, height, width].
    Raises SourceError for a file that is damaged, quantized, in half precision, or that does not run on batches.
    """
    proto = read_onnx(path)
    with tempfile.TemporaryDirectory() as scratch:
        whole = path
        if has_fixed_batch(proto):
            whole = Path(scratch) / "free.onnx"
            onnx.save(free_batch(proto), whole)
        with OnnxRuntime().open(whole, optimize=False) as original:
            model = ir.from_proto(proto)
            name_nodes(model.graph)
            optimize(model)
            rewriter.rewrite(model, [fuse_batchnorm_into_conv_rule])
            common.RemoveInitializersFromInputsPass()(model)
            inputs, outputs, least = infer_signature(model.graph, original, path)
            check_rows(path, whole, make_batches(inputs, least))
            graph = write_graph(model, folder, inputs, outputs)
            with OnnxRuntime().open(graph.path) as candidate:
                error = largest_difference(original, candidate, make_batches(inputs, least))
    if not error <= PARITY:
        raise CaptureError(
            f"normalizing {path} changed its outputs by {error:.2g} of the largest value, expected at most {PARITY:g}. "
            f"Export the model again, with another opset"
        )
    return graph, plain_task(task, inputs, path)


def has_fixed_batch(proto: ModelProto) -> bool:
    """Return whether every input has a fixed batch of one row, the default of many exporters."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value.type.tensor_type.shape.dim for value in proto.graph.input if value.name not in weights]
    return bool(inputs) and all(dims and dims[0].dim_value == 1 for dims in inputs)


def free_batch(proto: ModelProto) -> ModelProto:
    """Make the batch axis of a model dynamic, in place, and drop the shapes inferred from the fixed one."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name not in weights and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = BATCH
    del proto.graph.value_info[:]
    return proto


def check_rows(path: Path, whole: Path, samples: Iterable[Arrays]) -> None:
    """Raise SourceError if the model with a dynamic batch computes other outputs than row by row."""
    if whole == path:
        return
    try:
        with OnnxRuntime().open(path, optimize=False) as single, OnnxRuntime().open(whole, optimize=False) as free:
            error = largest_difference(RowByRowSession(single), free, samples)
    except (CaptureError, RuntimeFailure, ValueError) as failure:
        raise SourceError(f"{path} {FIXED} ({str(failure).splitlines()[0][:200]})") from failure
    if not error <= PARITY:
        raise SourceError(f"{path} {FIXED} (the output for a row changes by {error:.2g} with the other rows)")


def read_onnx(path: Path) -> ModelProto:
    """Read and check a model, converted to an opset that can be quantized if it is older. Raises SourceError."""
    try:
        proto = onnx.load(path)
        onnx.checker.check_model(proto if proto.ByteSize() < 2**31 - 1 else path)
    except FileNotFoundError as error:
        raise SourceError(
            f"{error.filename or path} is missing. Copy the model again, with its external data"
        ) from error
    except Exception as error:
        raise SourceError(
            f"{path} is not a valid ONNX file ({' '.join(str(error).split())[:200]}): it is truncated, or has another "
            f"format. Export it again"
        ) from error
    check_kind(proto, path)
    version = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), LEAST_OPSET)
    if version >= LEAST_OPSET:
        return proto
    try:
        return version_converter.convert_version(proto, LEAST_OPSET)
    except RuntimeError as error:
        raise SourceError(
            f"{path} has opset {version}, which cannot be converted to {LEAST_OPSET} ({error}). Export it again with "
            f"opset {LEAST_OPSET} or later"
        ) from error


def check_kind(proto: ModelProto, path: Path) -> None:
    """Raise SourceError for a model that is already quantized, or in half precision."""
    quantized = sorted(
        {node.op_type for node in proto.graph.node if "Quantize" in node.op_type or "Integer" in node.op_type}
    )
    if quantized:
        raise SourceError(
            f"{path} is already quantized (it has {', '.join(quantized[:3])}); expected the float model that it was "
            f"made from"
        )
    kinds = {tensor.data_type for tensor in proto.graph.initializer}
    for kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        if kind in kinds:
            raise SourceError(
                f"{path} has weights in {TensorProto.DataType.Name(kind)}; expected FLOAT. Export the model again, "
                f"without converting it to half precision"
            )


def infer_signature(
    graph: ir.Graph, session: Session, path: Path
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], int]:
    """Infer the inputs and outputs with named dynamic axes, and the smallest size of these axes at which the model ran.

    Axes without a name are first assumed to be shared by all inputs, by position; if the model does not run with that,
    each input gets its own.
    """
    failure: RuntimeFailure | None = None
    for shared in (True, False):
        inputs = tuple(make_spec(value, shared, path) for value in graph.inputs)
        for least in LEASTS:
            try:
                return inputs, probe(session.run, inputs, least=least), least
            except RuntimeFailure as error:
                failure = failure or error
    described = ", ".join(f"{spec.name} {spec.dtype} {spec.describe()}" for spec in inputs)
    raise SourceError(
        f"{path} does not run on batches of its inputs {described}: {str(failure).splitlines()[0][:300]}. "
        f"Export it with named dynamic axes"
    )


def make_spec(value: ir.Value, shared: bool, path: Path) -> TensorSpec:
    """Make the spec of one input. Raises SourceError for one that is not a tensor of numbers, or has no batch axis."""
    dtype = "none" if value.dtype is None else np.dtype(value.dtype.numpy()).name
    if value.shape is None or dtype not in DTYPES:
        raise SourceError(f"input {value.name!r} of {path} is not a tensor of numbers with a known rank")
    if not value.shape or isinstance(value.shape[0], int):
        raise SourceError(
            f"input {value.name!r} of {path} has shape {[str(size) for size in value.shape]}; expected a dynamic first "
            f"axis, the batch. Export the model with a dynamic batch"
        )
    shape: list[int | str] = [BATCH]
    for place, size in enumerate(list(value.shape)[1:], 1):
        unnamed = f"axis_{place}" if shared else f"{value.name}_{place}"
        shape.append(
            size if isinstance(size, int) else BATCH if size == value.shape[0] and size.value else size.value or unnamed
        )
    return TensorSpec(name=str(value.name), dtype=dtype, shape=tuple(shape))


def make_batches(inputs: tuple[TensorSpec, ...], least: int) -> Iterator[Arrays]:
    """Yield batches of two shapes, with random values."""
    for number in range(2):
        yield sample_inputs(inputs, probe_sizes(inputs, number, least=least), seed=number)
