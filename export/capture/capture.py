"""Capture of a torch module as a float ONNX graph, with a parity check of both."""

import copy
import io
import linecache
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.rnn import PackedSequence

from export.capture.graph_file import OPSET, write_graph
from export.capture.graph_forms import graph_forms
from export.capture.parity import PARITY, largest_difference, relative_difference
from export.passes.optimize import optimize
from laconic.arrays import Arrays
from laconic.errors import CaptureError, RuntimeFailure
from laconic.models.checkpoint import Checkpoint
from laconic.models.language_model import LanguageModel
from laconic.models.signature import bind, call, probe_sizes
from laconic.models.torch_session import TorchSession
from laconic.quantization.graph import Graph
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.tasks.decoder_tensors import PAST
from laconic.tensor import BATCH, TensorSpec

QUIET = ("torch.onnx", "torch.export", "torch.fx.experimental.symbolic_shapes", "onnx_ir", "onnxscript")
"""The loggers of the exporter."""

PARITY_SIZES = ((1, 5), (3, 17))
"""Rows, and size of the other dynamic axes, of the batches of the parity check."""


def capture(checkpoint: Checkpoint, folder: Path) -> Graph:
    """Export the module to `folder` and compare its outputs with the graph's.

    Raises CaptureError if torch cannot export the module, or if the graph's outputs differ.
    """
    program = export_program(checkpoint)
    graph = write_graph(program, folder, checkpoint.inputs, checkpoint.outputs)
    try:
        error = measure_parity(checkpoint, graph)
    except RuntimeFailure as failure:
        raise CaptureError(
            f"the captured graph does not run on inputs of other sizes than those that it was captured with "
            f"({' '.join(str(failure).split())[:200]}). A loop over a free axis in Python is unrolled, such as the "
            f"recurrence of a state-space model: write it without the loop, or fix the size of this axis"
        ) from failure
    if not error <= PARITY:
        raise CaptureError(
            f"the captured graph does not compute what the module does: its outputs differ by {error:.2g} of the "
            f"largest value, expected at most {PARITY:g}. {explain_difference(checkpoint)}"
        )
    return graph


def explain_difference(checkpoint: Checkpoint) -> str:
    """Say why no graph may compute what a module does, found by its own outputs in FP64: each sum is rounded
    otherwise."""
    deviation = measure_rounding(checkpoint)
    if deviation <= PARITY:
        return "Look for randomness or state in the module's forward"
    return (
        f"The module's own outputs differ by {deviation:.2g} between FP32 and FP64: rounding decides them, as where "
        f"equal scores are ranked or small differences are amplified. Weights that were not trained do so; train the "
        f"model first"
    )


def measure_rounding(checkpoint: Checkpoint) -> float:
    """Measure the largest difference between the module's outputs in FP64 and in FP32, relative to the largest output;
    0 for a module that does not compute in FP64."""
    wide, worst = copy.deepcopy(checkpoint.module).double(), 0.0
    for arrays in make_parity_inputs(checkpoint):
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        doubles = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
        try:
            with torch.no_grad():
                expected, doubled = call(checkpoint.module, inputs), call(wide, doubles)
        except RuntimeError:  # it converts something to FP32 itself
            return worst
        narrow, precise = ({name: each.numpy() for name, each in one.items()} for one in (expected, doubled))
        worst = max(worst, relative_difference(narrow, precise, checkpoint.task.align))
    return worst


def export_program(checkpoint: Checkpoint) -> ir.Model:
    """Export the module as an ONNX model in memory, with dynamic axes."""
    # Each input is a separate tensor: given the same object twice, torch silently merges the two inputs.
    arrays = checkpoint.task.sample_inputs(probe_sizes(checkpoint.inputs, 0))
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    args, kwargs = bind(checkpoint.module, tensors)
    shapes = make_dynamic_shapes(checkpoint.inputs)
    named = {name: shapes[name] for name in kwargs} if kwargs else tuple(shapes.values())
    try:
        # With torch's cache of what operators do to fake tensors, a Llama of one layer took 8.6 s of processor time,
        # without it 6.5: what is found there is checked symbol by symbol. The graph is the same.
        uncached = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
        with quiet_exporter(), torch.no_grad(), graph_forms(checkpoint.module), uncached:
            program = torch.onnx.export(
                checkpoint.module,
                args,
                kwargs=kwargs,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=named,
                input_names=list(kwargs or shapes),
                optimize=False,
                verbose=False,
            )
            if program is not None:
                optimize(program.model)
    except Exception as error:
        raise CaptureError(f"torch cannot export this model: {describe_failure(error)}") from error
    if program is None:
        raise CaptureError("torch exported nothing and gave no reason")
    return program.model


def make_dynamic_shapes(inputs: tuple[TensorSpec, ...]) -> dict[str, dict[int, Any]]:
    """Make the `dynamic_shapes` of torch.export: one Dim per dynamic axis, shared wherever the axis occurs."""
    dims: dict[str, Any] = {}
    for spec in inputs:
        for axis in spec.shape:
            if isinstance(axis, str) and axis not in dims:
                low, high = spec.bounds.get(axis, (1, None))
                dims[axis] = Dim(f"axis_{len(dims)}", min=low, max=high)
    return {
        spec.name: {place: dims[axis] for place, axis in enumerate(spec.shape) if isinstance(axis, str)}
        for spec in inputs
    }


def measure_parity(checkpoint: Checkpoint, graph: Graph) -> float:
    """Measure the largest difference between the graph's outputs and the module's, relative to the largest output."""
    reference = TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs)
    with reference, OnnxRuntime().open(graph.path) as candidate:
        return largest_difference(reference, candidate, make_parity_inputs(checkpoint), checkpoint.task.align)


def make_parity_inputs(checkpoint: Checkpoint) -> Iterator[Arrays]:
    """Yield batches of several shapes; for texts also one with padding."""
    bounds = {name: limits for spec in checkpoint.inputs for name, limits in spec.bounds.items()}
    axes = list(dict.fromkeys(axis for spec in checkpoint.inputs for axis in spec.shape if isinstance(axis, str)))
    for batch, length in PARITY_SIZES:
        # Each axis has a size of its own: of height and width that are equal, either could stand for the other.
        sizes = {axis: length + 16 * place for place, axis in enumerate(each for each in axes if each != BATCH)}
        sizes[BATCH] = batch
        for axis, (low, high) in bounds.items():
            sizes[axis] = min(low + sizes[axis] - 1, high)
        yield with_true_past(checkpoint, checkpoint.task.sample_inputs(sizes, seed=batch))
    if checkpoint.task.padding:
        yield checkpoint.task.encode(checkpoint.task.examples(3))


def with_true_past(checkpoint: Checkpoint, inputs: Arrays) -> Arrays:
    """Return the inputs of a language model with the keys and values of tokens, those of the inputs repeated, in the
    place of random ones. With these, rounding alone changed outputs of SmolLM2-135M by 3e-4 of the largest."""
    past = inputs.get(PAST)
    if past is None or not isinstance(checkpoint.module, LanguageModel) or not (length := past.shape[3]):
        return inputs
    ids = torch.from_numpy(np.resize(inputs["input_ids"], (len(inputs["input_ids"]), length)))
    return inputs | {PAST: checkpoint.module.compute_past(ids).numpy()}


def describe_failure(error: BaseException) -> str:
    """Describe what stopped an export, with the line of the model's code: torch's own reports have many pages."""
    while error.__cause__ is not None:
        error = error.__cause__
    place = find_user_line(error)
    if place and isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"{place} depends on the values of tensors: a branch, a loop or a shape that a graph cannot hold. Compute "
            f"it from shapes, or with torch.where on all elements, and try again"
        )
    frames = traceback.walk_tb(error.__traceback__)
    if any(isinstance(value, PackedSequence) for frame, _ in frames for value in frame.f_locals.values()):
        return (
            f"{place or 'a recurrent layer'} computes with a packed sequence (pack_padded_sequence), which no graph "
            f"holds. Let the layer read the padded tensor, and take each row's last step by its length"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return f"{place}: {reason}" if place else reason


def find_user_line(error: BaseException) -> str | None:
    """Find the line of the model's own code that a failed export stopped at: file, line and source. None where it names
    only lines of torch."""
    library = str(Path(torch.__file__).parent)
    reported = [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
    raised = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    for file, line in (*reversed(reported), *reversed(raised)):
        if not file.startswith((library, "<")):
            return f"{Path(file).name}, line {line} ({linecache.getline(file, line).strip()})"
    return None


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Suppress the exporter's logs and warnings, about its own deprecations and packages that it does not need.

    A failure still reaches the caller as an exception; the log messages are addressed to torch's developers.
    """
    loggers = [logging.getLogger(name) for name in QUIET]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        # A failed export prints its whole graph.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            for category in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            warnings.filterwarnings("ignore", module=r"torch\b")
            # About the weights that an LSTM keeps in its own list; they are exported nevertheless.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during export")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
