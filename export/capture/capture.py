"""Capture of a torch module as a float ONNX graph, with a parity check of both."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.export import Dim

from export.capture.graph_file import OPSET, write_graph
from export.capture.parity import PARITY, largest_difference
from export.passes.attention import plain_attention
from laconic.arrays import Arrays
from laconic.errors import CaptureError
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import bind, probe_sizes
from laconic.models.torch_session import TorchSession
from laconic.quantization.graph import Graph
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.tensor import BATCH, TensorSpec

PARITY_SIZES = ((1, 5), (3, 17))
"""Rows, and size of the other dynamic axes, of the batches of the parity check."""


def capture(checkpoint: Checkpoint, folder: Path) -> Graph:
    """Export the module to `folder` and compare its outputs with the graph's.

    Raises CaptureError if torch cannot export the module, or if the graph's outputs differ.
    """
    program = export_program(checkpoint)
    graph = write_graph(program, folder, checkpoint.inputs, checkpoint.outputs)
    error = measure_parity(checkpoint, graph)
    if not error <= PARITY:
        raise CaptureError(
            f"the captured graph does not compute what the module does: its outputs differ by {error:.2g} of the "
            f"largest value, expected at most {PARITY:g}. Look for randomness or state in the module's forward"
        )
    return graph


def export_program(checkpoint: Checkpoint) -> ir.Model:
    """Export the module as an ONNX model in memory, with dynamic axes."""
    # Each input is a separate tensor: given the same object twice, torch silently merges the two inputs.
    arrays = checkpoint.task.sample_inputs(probe_sizes(checkpoint.inputs, 0))
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    args, kwargs = bind(checkpoint.module, tensors)
    shapes = make_dynamic_shapes(checkpoint.inputs)
    named = {name: shapes[name] for name in kwargs} if kwargs else tuple(shapes.values())
    try:
        with quiet_exporter(), torch.no_grad(), plain_attention(checkpoint.module):
            program = torch.onnx.export(
                checkpoint.module,
                args,
                kwargs=kwargs,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=named,
                input_names=list(kwargs or shapes),
                verbose=False,
            )
    except Exception as error:
        raise CaptureError(f"torch cannot export this model: {find_root_cause(error)}") from error
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
        return largest_difference(reference, candidate, make_parity_inputs(checkpoint))


def make_parity_inputs(checkpoint: Checkpoint) -> Iterator[Arrays]:
    """Yield batches of several shapes; for texts also one with padding."""
    bounds = {name: limits for spec in checkpoint.inputs for name, limits in spec.bounds.items()}
    for batch, length in PARITY_SIZES:
        sizes = {axis: length for spec in checkpoint.inputs for axis in spec.shape if isinstance(axis, str)} | {
            BATCH: batch
        }
        yield checkpoint.task.sample_inputs(
            {axis: int(np.clip(size, *bounds.get(axis, (1, size)))) for axis, size in sizes.items()},
            seed=batch,
        )
    if checkpoint.task.padding:
        yield checkpoint.task.encode(checkpoint.task.examples(3))


def find_root_cause(error: BaseException) -> str:
    """Return the first line of the innermost cause of an error; torch's own reports have many pages."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Suppress the exporter's logs and warnings, about its own deprecations and packages that it does not need.

    A failure still reaches the caller as an exception; the log messages are addressed to torch's developers.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            warnings.filterwarnings("ignore", module=r"torch\b")
            # About the weights that an LSTM keeps in its own list; they are exported nevertheless.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during export")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
