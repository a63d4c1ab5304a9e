"""ONNX Runtime on the CPU."""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from laconic.errors import RuntimeFailure
from laconic.runtimes.onnx_file import Node, read_nodes
from laconic.runtimes.runtime import Compute, Kernel, Runtime, Session
from laconic.tensor import Array, Arrays

# Its official builds report to Microsoft unless told otherwise before the import (Privacy.md, 1.31).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

FLOAT = frozenset({"MatMul", "FusedMatMul", "MatMulNBits", "Gemm", "FusedGemm", "Conv", "FusedConv", "ConvTranspose"})
"""Operators with weights that compute in float, whatever their weights were before they were read."""
WITHOUT_GEMM = ("optimization.disable_specified_optimizers", "MatMulAddFusion")
"""It makes one Gemm of a MatMul and an Add before it looks for INT8, and then has no INT8 kernel for that."""
IN_FLOAT = ("session.qdq_matmulnbits_accuracy_level", "0")
"""Without it, weights kept in 8 bits are multiplied with activations that are quantized to 8 bits as well, unasked:
that moved a layer's output by 0.5 % of the largest; with it, by 5e-7."""
INTEGER = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "MatMulInteger", "ConvInteger")
"""How the names of the operators begin that multiply in INT8."""
NODE_SUFFIX = re.compile(r"(_token_\d+|/MatMulAddFusion)+$")
"""What the engine hangs on to the name of a node that it rewrites."""


class OrtSession(Session):
    """A model loaded by ONNX Runtime."""

    def __init__(self, session: ort.InferenceSession, model: Path) -> None:
        """session: may be shared, its `run` being safe to call from several threads. model: the file that it is of."""
        self._session = session
        self._model = model
        self._outputs = [output.name for output in session.get_outputs()]

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        try:
            answers = self._session.run(self._outputs, dict(inputs))
        except Exception as error:
            raise RuntimeFailure(f"onnxruntime failed: {error}") from error
        return dict(zip(self._outputs, answers, strict=True))

    def kernels(self) -> list[Kernel]:
        # The engine tells by writing the graph that it made of the model; the weights go to a file that is not read.
        options = self._session.get_session_options()
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "optimized.onnx"
            again = ort.SessionOptions()
            again.log_severity_level = 3
            again.add_session_config_entry(*WITHOUT_GEMM)
            again.add_session_config_entry(*IN_FLOAT)
            again.graph_optimization_level = options.graph_optimization_level
            again.optimized_model_filepath = str(written)
            again.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
            try:
                ort.InferenceSession(self._model, again, providers=["CPUExecutionProvider"])
                found = read_nodes(written)
            except Exception as error:  # the engine's exceptions share no base class
                raise RuntimeFailure(f"onnxruntime does not tell what it runs: {error}") from error
        return [
            Kernel(NODE_SUFFIX.sub("", node.name), node.kind, find_arithmetic(node))
            for node in found
            if find_arithmetic(node)
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

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float32", optimize: bool = True) -> OrtSession:
        """optimize=False runs each node as written: the reference that engines are compared with."""
        return OrtSession(self._load(model, threads, optimize=optimize), model)

    def open_many(
        self, model: Path, count: int, *, threads: int = 1, compute: Compute = "float32"
    ) -> Sequence[Session]:
        # A run with one thread happens in the thread that calls it, so one loaded model does for all. With more, runs
        # would share one pool: the first takes it all.
        if threads > 1:
            return super().open_many(model, count, threads=threads, compute=compute)
        shared = self._load(model, threads)
        return [OrtSession(shared, model) for _ in range(count)]

    def _load(self, model: Path, threads: int, *, optimize: bool = True) -> ort.InferenceSession:
        try:
            return ort.InferenceSession(model, self._options(threads, optimize), providers=["CPUExecutionProvider"])
        except Exception as error:  # the engine's exceptions share no base class
            raise RuntimeFailure(f"onnxruntime refused {model}: {error}") from error

    def _options(self, threads: int, optimize: bool) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads starve the HTTP server that shares the cores with them.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry(*WITHOUT_GEMM)
        options.add_session_config_entry(*IN_FLOAT)
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        return options


def find_arithmetic(node: Node) -> str:
    """What a node computes in; empty for one that no layer becomes."""
    if node.kind.startswith(INTEGER):
        return "int8"
    if node.kind == "Gather":
        return next(iter(node.weights), "")
    return "float32" if node.kind in FLOAT else ""
