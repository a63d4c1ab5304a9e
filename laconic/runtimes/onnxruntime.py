"""ONNX Runtime on the CPU."""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.arrays import Array, Arrays
from laconic.errors import RuntimeFailure
from laconic.runtimes.onnx_file import Node, read_nodes
from laconic.runtimes.runtime import JOINED, Compute, Kernel, Runtime, Session, open_row_by_row

# The official builds send telemetry to Microsoft unless it is disabled before the import (Privacy.md, 1.31).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

FLOAT = frozenset(
    {
        "MatMul", "FusedMatMul", "MatMulNBits", "Gemm", "FusedGemm", "Conv", "FusedConv", "ConvTranspose",
        "MultiHeadAttention", "LSTM", "GRU", "RNN",
    }
)  # fmt: skip
"""Operators that multiply in float, whatever type their weights are stored in."""
DISABLED = ("optimization.disable_specified_optimizers", "MatMulAddFusion;Pad_Fusion")
"""The first optimizer fuses MatMul and Add to Gemm before the INT8 fusions run, and the result has no INT8 kernel. The
second fuses a Pad with zeros into a MaxPool, whose own padding never wins: where all values are negative, the maximum
is then negative in place of 0 (onnxruntime 1.31; BiT)."""
IN_FLOAT = ("session.qdq_matmulnbits_accuracy_level", "0")
"""Without it, activations that meet 8-bit weights are quantized to 8 bits too, unasked: that changed a layer's output
by 0.5 % of its largest value; with it, by 5e-7."""
INTEGER = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "MatMulInteger", "ConvInteger")
"""Prefixes of the operators that multiply in INT8."""
NODE_SUFFIX = re.compile(r"(_token_\d+|/MatMulAddFusion|_nchwc)+$")
"""Suffixes that the engine appends to the names of nodes that it rewrites."""


class OrtSession(Session):
    """A model loaded by ONNX Runtime."""

    def __init__(self, session: ort.InferenceSession, model: Path, options: ort.RunOptions | None = None) -> None:
        """session: may be shared between threads, since its `run` is thread-safe. model: the file that was loaded.
        options: of each run."""
        self._session = session
        self._model = model
        self._options = options
        self._outputs = [output.name for output in session.get_outputs()]

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        try:
            answers = self._session.run(self._outputs, dict(inputs), self._options)
        except Exception as error:
            raise RuntimeFailure(f"onnxruntime failed: {error}") from error
        return dict(zip(self._outputs, answers, strict=True))

    def kernels(self) -> list[Kernel]:
        options = ort.SessionOptions()
        options.add_session_config_entry(*DISABLED)
        options.add_session_config_entry(*IN_FLOAT)
        options.graph_optimization_level = self._session.get_session_options().graph_optimization_level
        nodes = read_optimized_nodes(self._model, options, ["CPUExecutionProvider"])
        return [
            Kernel(name, node.kind, find_arithmetic(node))
            for node in nodes
            if find_arithmetic(node)
            for name in NODE_SUFFIX.sub("", node.name).split(JOINED)
        ]

    def close(self) -> None:
        del self._session


class OnnxRuntime(Runtime):
    """ONNX Runtime on the CPU."""

    name = "onnxruntime"
    package = "onnxruntime"

    def version(self) -> str:
        return str(ort.__version__)

    def computes(self) -> tuple[Compute, ...]:
        return ("float32",)

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float32", optimize: bool = True) -> Session:
        """Load a model file. optimize=False runs the graph node by node: the reference of the parity checks."""
        return make_session(self._load(model, threads, optimize=optimize), model)

    def open_many(
        self, model: Path, count: int, *, threads: int = 1, compute: Compute = "float32"
    ) -> Sequence[Session]:
        # A run with one thread happens in the calling thread, so all sessions can share one loaded model. With more
        # threads, concurrent runs would compete for one thread pool.
        if threads > 1:
            return super().open_many(model, count, threads=threads, compute=compute)
        shared = self._load(model, threads)
        return [make_session(shared, model) for _ in range(count)]

    def _load(self, model: Path, threads: int, *, optimize: bool = True) -> ort.InferenceSession:
        try:
            return ort.InferenceSession(model, self._options(threads, optimize), providers=["CPUExecutionProvider"])
        except Exception as error:  # the engine's exceptions share no base class
            raise RuntimeFailure(f"onnxruntime refused {model}: {error}") from error

    def _options(self, threads: int, optimize: bool) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # A failed run is raised; below 4, the engine also prints it on the terminal.
        options.log_severity_level = 4
        # Spinning threads would starve the HTTP server, which shares the cores with them.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry(*DISABLED)
        options.add_session_config_entry(*IN_FLOAT)
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        return options


def make_session(session: ort.InferenceSession, model: Path) -> Session:
    """Return the session of a loaded model; one whose batch is fixed to one row runs row by row."""
    return open_row_by_row(OrtSession(session, model), (each.shape for each in session.get_inputs()))


def read_optimized_nodes(model: Path, options: ort.SessionOptions, providers: Sequence[Any]) -> list[Node]:
    """Read the nodes that the engine makes of a model. It reports its kernels by writing the optimized graph; the
    weights go to a file that is not read."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "optimized.onnx"
        options.log_severity_level = 3
        options.optimized_model_filepath = str(written)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        try:
            ort.InferenceSession(model, options, providers=providers)
            return read_nodes(written)
        except Exception as error:  # the engine's exceptions share no base class
            raise RuntimeFailure(f"onnxruntime does not report its kernels: {error}") from error


def find_arithmetic(node: Node) -> str:
    """Find the arithmetic of a node; empty for one that does not multiply and has no weights."""
    if node.kind.startswith(INTEGER):
        return "int8"
    if node.kind == "Gather":
        return next(iter(node.weights), "")
    return "float32" if node.kind in FLOAT else ""
