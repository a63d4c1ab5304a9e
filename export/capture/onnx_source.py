"""Import of an ONNX file of any framework: its interface, its normalized float graph, and the proof that both agree."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir as ir
from onnx import ModelProto, TensorProto
from onnxscript import rewriter
from onnxscript.rewriter.rules.common import fuse_batchnorm_into_conv_rule
from pydantic import BaseModel, ConfigDict

from export.capture.graph_file import write_graph
from export.capture.model_file import LARGEST
from export.capture.onnx_adapter import adapt_inputs, adapt_outputs
from export.capture.onnx_interface import InputLayout, find_states, infer_layouts, name_inputs
from export.capture.onnx_probe import Signature, find_signature
from export.capture.parity import PARITY, largest_difference
from export.capture.source_divergence import find_source_divergence
from export.capture.source_file import find_quantized_operators, has_half_precision, raise_opset, read_onnx, widen_half
from export.passes.optimize import name_nodes, optimize
from laconic.arrays import Array, Arrays
from laconic.errors import CaptureError, RuntimeFailure, SourceError
from laconic.models.processors import plain_task
from laconic.quantization.graph import Graph
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import Session
from laconic.tasks.task import Task
from laconic.tensor import TensorSpec

HALF_PARITY = 0.02
"""The largest difference between a file in FP16 or BF16 and its graph in FP32, relative to the largest output."""
ROUNDING_SLACK = 5
"""How many times as far as two orders of its sums differ from each other a graph may be from its file. 2.7e-4 for a
network that takes logarithms of quiet sounds (basic-pitch), whose graph is 4.6e-4 from the file."""
SOURCE = "source.onnx"
"""The file that was given, between inputs and outputs with the batch first."""

ReadSamples = Callable[[Task], Sequence[Arrays]]
"""Reads a few samples as a task encodes them, [1, ...] by input."""


@dataclass(frozen=True)
class OnnxHints:
    """What is known of a file beside its content. inputs: specs of inputs from the recipe, in the order
    of the file's axes. constants: values of inputs from the recipe. rows: arrays of some samples, by input. read: reads
    some samples. quantizes: whether the recipe quantizes the model."""

    inputs: tuple[TensorSpec, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, Sequence[Array]] = field(default_factory=dict)
    read: ReadSamples | None = None
    quantizes: bool = False


class OnnxInterface(BaseModel):
    """What is different from a file about inputs and outputs. exactness: 1 minus the largest difference allowed between
    the file and its graph. constants: values of inputs that all samples share, as nested lists. notes: sentences."""

    model_config = ConfigDict(frozen=True)

    exactness: float
    constants: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ImportedGraph:
    """A graph with the task of its model. file: the one that was given, or the same nodes with the batch first.
    typical: a sample, [1, ...] by input; empty where none was read."""

    graph: Graph
    task: Task
    file: Path
    interface: OnnxInterface
    typical: Arrays


def import_onnx(path: Path, folder: Path, task: str | None = None, hints: OnnxHints | None = None) -> ImportedGraph:
    """Check the file, normalize it, write it to `folder`, and compare its outputs with those of the original file.

    task: default "tensors"; image-classification needs one float input [batch, channels, height, width].
    Raises SourceError for a file that is damaged, that is to be quantized again, or whose inputs are not known.
    """
    hints = hints or OnnxHints()
    proto = read_onnx(path)
    quantized = find_quantized_operators(proto)
    if quantized and hints.quantizes:
        raise SourceError(
            f"{path} is already quantized (it has {', '.join(quantized[:3])}). Give the float model that it was made "
            f"from; or prove and serve it as it is: laconic export {path}"
        )
    layouts = infer_layouts(ir.from_proto(proto), path, specs=hints.inputs, constants=hints.constants, rows=hints.rows)
    constants = {each.name: each.constant.tolist() for each in layouts if each.constant is not None}
    fed = [each for each in layouts if each.constant is None]
    samples = hints.read(plain_task(task, name_inputs(fed, shared=False), path, constants)) if hints.read else ()
    adapted = adapt(proto, path, folder, layouts, samples)
    model = ir.from_proto(raise_opset(ir.to_proto(adapted.model), path))
    half = has_half_precision(model)
    if half:
        widen_half(model)
    name_nodes(model.graph)
    if not quantized:  # folding would turn integer weights into floats
        optimize(model)
        rewriter.rewrite(model, [fuse_batchnorm_into_conv_rule])
    signature = adapted.signature
    graph = write_graph(model, folder, signature.inputs, signature.outputs)
    allowed = HALF_PARITY if half else PARITY
    with OnnxRuntime().open(adapted.file, optimize=False) as original, OnnxRuntime().open(graph.path) as candidate:
        error = largest_difference(original, candidate, signature.batches)
    notes = (*adapted.notes, *(["its weights are in half precision: they are read as float32"] if half else []))
    if error > PARITY and (rounding := measure_rounding(adapted.file, signature.batches)) > PARITY / ROUNDING_SLACK:
        allowed = max(allowed, min(ROUNDING_SLACK * rounding, HALF_PARITY))
        notes += (
            f"its own outputs change by {rounding:.1g} with the order of sums: its graph may differ by {allowed:.1g}",
        )
    if not error <= allowed:
        node = find_source_divergence(adapted.file, graph.path, [each for each in signature.batches if is_row(each)])
        where = f" from node {node!r} on" if node else ""
        raise CaptureError(
            f"the float graph differs from {path}{where}: by {error:.2g} of the largest output, expected at most "
            f"{allowed:g}. Its operators were rewritten wrongly, which no setting mends. Please report it with the node"
        )
    interface = OnnxInterface(exactness=1 - allowed, constants=constants, notes=notes)
    typical = choose_typical(samples) if samples else {}
    made = plain_task(task, signature.inputs, path, constants, typical)
    return ImportedGraph(graph, made, adapted.file, interface, typical)


def measure_rounding(file: Path, batches: Iterable[Arrays]) -> float:
    """Measure how far a file's outputs are from themselves with sums in another order, as its engine optimizes it,
    relative to the largest output."""
    with OnnxRuntime().open(file, optimize=False) as plain, OnnxRuntime().open(file) as optimized:
        return largest_difference(plain, optimized, batches)


def choose_typical(samples: Sequence[Arrays]) -> Arrays:
    """Return the sample of median size."""
    return sorted(samples, key=lambda arrays: sum(array.size for array in arrays.values()))[len(samples) // 2]


def is_row(inputs: Arrays) -> bool:
    """Return whether inputs are of one row."""
    return all(len(array) == 1 for array in inputs.values())


@dataclass(frozen=True)
class AdaptedModel:
    """The model of a file with the batch first. model: what is imported. file: what it is compared with, the same
    between inputs and outputs in the same order. notes: what is different, in sentences."""

    model: ir.Model
    file: Path
    signature: Signature
    notes: tuple[str, ...]


def adapt(
    proto: ModelProto, path: Path, folder: Path, layouts: Sequence[InputLayout], samples: Sequence[Arrays]
) -> AdaptedModel:
    """Put the batch of a model first, and free one that is fixed to one row where rows do not meet.

    Raises SourceError where the model does not run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fed = [layout for layout in layouts if layout.constant is None]
    if any(layout.has_fixed_batch for layout in fed):
        try:
            single, model, signature = free_batch(proto, path, folder, layouts, samples)
        except (CaptureError, RuntimeFailure, SourceError, ValueError):
            single, signature = adapt_whole(proto, path, folder, layouts, samples, one_row=True)
            model = single
    else:
        single, signature = adapt_whole(proto, path, folder, layouts, samples)
        model = single
    notes = (*describe_interface(layouts, signature, one_row=has_fixed_rows(model)), *describe_states(model))
    if not signature.outputs:
        raise SourceError(f"no output of {path} depends on its inputs. Export the model again, with its outputs")
    is_same = all(layout.is_plain for layout in layouts) and all(each.place == 0 for each in signature.layouts)
    file = path.resolve() if is_same and not has_odd_ends(proto) else write_model(single, folder / SOURCE)
    return AdaptedModel(model, file, signature, notes)


def adapt_whole(
    proto: ModelProto,
    path: Path,
    folder: Path,
    layouts: Sequence[InputLayout],
    samples: Sequence[Arrays],
    *,
    free: bool = False,
    one_row: bool = False,
) -> tuple[ir.Model, Signature]:
    """Adapt inputs and outputs. free: whether a batch that is fixed to one row becomes free. one_row: whether it is
    fixed. Returns the model with its signature. Raises SourceError where it does not run."""
    model = adapt_inputs(proto, layouts, free=free)
    fed = [layout for layout in layouts if layout.constant is None]
    with open_model(model, folder) as session:
        signature = find_signature(session.run, fed, samples, path, one_row=one_row)
    adapt_outputs(model, signature.layouts)
    return model, signature


def free_batch(
    proto: ModelProto, path: Path, folder: Path, layouts: Sequence[InputLayout], samples: Sequence[Arrays]
) -> tuple[ir.Model, ir.Model, Signature]:
    """Free the batch of a model. Returns the model of one row, that with a free batch, and the signature.

    Raises SourceError or RuntimeFailure where it does not run so, and CaptureError where the rows then meet.
    """
    model, signature = adapt_whole(proto, path, folder, layouts, samples, free=True)
    single = adapt_inputs(proto, layouts, free=False)
    adapt_outputs(single, signature.layouts)
    with open_model(single, folder) as alone, open_model(model, folder) as together:
        error = largest_difference(alone, together, signature.batches)
    if not error <= PARITY:
        raise CaptureError(f"the output for a row changes by {error:.2g} with the other rows")
    return single, model, signature


def describe_interface(layouts: Sequence[InputLayout], signature: Signature, *, one_row: bool) -> Iterator[str]:
    """Yield a sentence for each thing that is different from the file about inputs and outputs."""
    for layout in layouts:
        if layout.constant is not None:
            yield f"input {layout.name!r} has one value for all samples, and is a constant"
        elif layout.place:
            yield f"the batch is axis {layout.place} of input {layout.name!r} in the file, and comes first here"
    for output in signature.layouts:
        if output.place is None:
            yield f"output {output.name!r} does not depend on the samples, and is left out"
        elif output.place > 0:
            yield f"the batch is axis {output.place} of output {output.name!r} in the file, and comes first here"
        elif output.place < 0:
            yield f"output {output.name!r} has no axis for the batch in the file, and gets one"
    if one_row:
        yield "the model takes one row at a time: batches are run row by row"


def describe_states(model: ir.Model) -> Iterator[str]:
    """Yield a sentence for each state of a streaming model."""
    for name, after in find_states(model).items():
        yield (
            f"input {name!r} is taken for a state that comes back as {after!r}: it is calibrated and compared with the "
            f"values that the samples have, and the server keeps none between requests"
        )


def has_fixed_rows(model: ir.Model) -> bool:
    """Return whether the batch of a model's inputs is fixed to one row."""
    return any(value.shape is not None and value.shape[0] == 1 for value in model.graph.inputs)


def has_odd_ends(proto: ModelProto) -> bool:
    """Return whether an input or output is in half precision, or has a free axis that is written as 0, which engines
    take literally."""
    types = [value.type.tensor_type for value in (*proto.graph.input, *proto.graph.output)]
    is_half = any(each.elem_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16) for each in types)
    return is_half or any(
        axis.HasField("dim_value") and axis.dim_value == 0 for each in types for axis in each.shape.dim
    )


def write_model(model: ir.Model, path: Path) -> Path:
    """Write a model, with its weights in a file beside it where they are large. Returns the path."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    ir.save(model, path, external_data=path.with_suffix(".data").name if size > LARGEST else None)
    return path


@contextmanager
def open_model(model: ir.Model, folder: Path) -> Iterator[Session]:
    """Open a model in ONNX Runtime, node by node, by way of a file in `folder`."""
    with (
        TemporaryDirectory(dir=folder) as scratch,
        OnnxRuntime().open(write_model(model, Path(scratch) / SOURCE), optimize=False) as session,
    ):
        yield session
