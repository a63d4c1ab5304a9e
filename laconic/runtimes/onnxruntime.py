"""ONNX Runtime on the CPU."""

from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort

from laconic.errors import RuntimeFailure
from laconic.runtimes.runtime import Compute, Runtime, Session
from laconic.tensor import Array, Arrays


class OrtSession(Session):
    """A model loaded by ONNX Runtime."""

    def __init__(self, model: Path, options: ort.SessionOptions) -> None:
        try:
            self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the engine's exceptions share no base class
            raise RuntimeFailure(f"onnxruntime refused {model}: {error}") from error
        self._model = model
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        try:
            answers = self._session.run(self._outputs, dict(inputs))
        except Exception as error:
            raise RuntimeFailure(f"onnxruntime failed: {error}") from error
        return dict(zip(self._outputs, answers, strict=True))

    def close(self) -> None:
        del self._session


class OnnxRuntime(Runtime):
    """ONNX Runtime on the CPU."""

    name = "onnxruntime"

    def version(self) -> str:
        return str(ort.__version__)

    def computes(self) -> tuple[Compute, ...]:
        return ("float32",)

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float32", optimize: bool = True) -> OrtSession:
        """optimize=False runs each node as written: the reference that engines are compared with."""
        return OrtSession(model, self._options(threads, optimize))

    def _options(self, threads: int, optimize: bool) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads starve the HTTP server that shares the cores with them.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        return options
