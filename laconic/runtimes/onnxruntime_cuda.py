"""ONNX Runtime on NVIDIA GPUs, by its CUDA provider."""

import tempfile
from pathlib import Path

import onnxruntime as ort

from laconic.errors import MissingPackage, RuntimeFailure
from laconic.runtimes.onnx_file import Node, read_nodes
from laconic.runtimes.onnxruntime import NODE_SUFFIX, OrtSession
from laconic.runtimes.runtime import Compute, Kernel, Runtime

PROVIDER = "CUDAExecutionProvider"
PROVIDER_OPTIONS = {
    # Otherwise the arena doubles with each growth, and a server with several models runs out of memory.
    "arena_extend_strategy": "kSameAsRequested",
    # The exhaustive search is repeated for every new input shape.
    "cudnn_conv_algo_search": "HEURISTIC",
}
LAYERS = frozenset({"MatMul", "FusedMatMul", "MatMulNBits", "Gemm", "Conv", "FusedConv", "ConvTranspose", "Gather"})
"""Operators with weights, by the names of the optimized graph."""


class OrtCudaSession(OrtSession):
    """A model loaded to a GPU by ONNX Runtime."""

    def kernels(self) -> list[Kernel]:
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "optimized.onnx"
            options = ort.SessionOptions()
            options.log_severity_level = 3
            options.optimized_model_filepath = str(written)
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
            try:
                ort.InferenceSession(self._model, options, providers=[(PROVIDER, PROVIDER_OPTIONS)])
                found = read_nodes(written)
            except Exception as error:  # the engine's exceptions share no base class
                raise RuntimeFailure(f"onnxruntime does not report its kernels: {error}") from error
        return [
            Kernel(NODE_SUFFIX.sub("", node.name), node.kind, find_weight_type(node))
            for node in found
            if node.kind in LAYERS and find_weight_type(node)
        ]


class OnnxRuntimeCuda(Runtime):
    """ONNX Runtime on NVIDIA GPUs. Raises MissingPackage if the installed build has no CUDA provider."""

    name = "onnxruntime-cuda"
    package = "onnxruntime-gpu"

    def __init__(self) -> None:
        if PROVIDER not in ort.get_available_providers():
            raise MissingPackage(
                "the installed onnxruntime is the one for CPUs. Try: pip uninstall onnxruntime && "
                "pip install 'laconic[gpu]'"
            )

    def version(self) -> str:
        return str(ort.__version__)

    def computes(self) -> tuple[Compute, ...]:
        return ("float16", "bfloat16")

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float16") -> OrtCudaSession:
        """Load a model file, whose own types say the arithmetic. Raises RuntimeFailure also where there is no GPU."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            session = ort.InferenceSession(model, options, providers=[(PROVIDER, PROVIDER_OPTIONS)])
        except Exception as error:  # the engine's exceptions share no base class
            raise RuntimeFailure(f"onnxruntime refused {model}: {error}") from error
        if session.get_providers()[0] != PROVIDER:  # it would run on the CPU without being asked
            raise RuntimeFailure(
                "onnxruntime found no GPU that it can use. Look at nvidia-smi, and at the CUDA version that "
                "onnxruntime-gpu needs; or try --target cpu"
            )
        return OrtCudaSession(session, model)


def find_weight_type(node: Node) -> str:
    """The type of a layer's weight, which is that of its arithmetic; empty where it is not a float."""
    return next((dtype for dtype in node.weights if "float" in dtype), "")
