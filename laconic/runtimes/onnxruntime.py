"""ONNX Runtime on the CPU."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from laconic.errors import RuntimeFailure
from laconic.runtimes.runtime import Compute, Runtime, Session
from laconic.tensor import Array, Arrays

# Its official builds report to Microsoft unless told otherwise before the import (Privacy.md, 1.31).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort


class OrtSession(Session):
    """A model loaded by ONNX Runtime."""

    def __init__(self, session: ort.InferenceSession) -> None:
        """session: may be shared, its `run` being safe to call from several threads."""
        self._session = session
        self._outputs = [output.name for output in session.get_outputs()]

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
        return OrtSession(self._load(model, threads, optimize=optimize))

    def open_many(
        self, model: Path, count: int, *, threads: int = 1, compute: Compute = "float32"
    ) -> Sequence[Session]:
        # A run with one thread happens in the thread that calls it, so one loaded model does for all. With more, runs
        # would share one pool: the first takes it all.
        if threads > 1:
            return super().open_many(model, count, threads=threads, compute=compute)
        shared = self._load(model, threads)
        return [OrtSession(shared) for _ in range(count)]

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
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        return options
