"""ONNX Runtime on NVIDIA GPUs, by its CUDA provider.

Written against its documentation (1.31), without a GPU: what is said here of CUDA has not run yet. The binding of
inputs and outputs runs in the tests, on the CPU provider.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from laconic.arrays import Array, Arrays
from laconic.errors import LaconicError, MissingPackage, RuntimeFailure
from laconic.runtimes.cuda_device import CudaStream, PinnedBuffers, Shape, find_gpu
from laconic.runtimes.device_policy import ReplayCache
from laconic.runtimes.onnx_file import Node
from laconic.runtimes.onnxruntime import NODE_SUFFIX, OrtSession, read_optimized_nodes
from laconic.runtimes.runtime import Compute, Kernel, Runtime

log = logging.getLogger("laconic.onnxruntime")

PROVIDER, DEVICE = "CUDAExecutionProvider", "cuda"
PROVIDER_OPTIONS = {
    # Otherwise the arena doubles with each growth, and a server with several models runs out of memory.
    "arena_extend_strategy": "kSameAsRequested",
    # The exhaustive search is repeated for every new input shape.
    "cudnn_conv_algo_search": "HEURISTIC",
    # What the graph writes in FP32 is computed in FP32, as by TensorRT here.
    "use_tf32": "0",
}
CUDA_GRAPHS = {"enable_cuda_graph": "1"}
REFUSES_GRAPHS = "graph capture"
"""Words of the message by which a session is refused that was to capture CUDA graphs: one with control flow, or with
operators that the provider lacks."""
WEIGHTS_BESIDE_ARENA = ("session.use_device_allocator_for_initializers", "1")
"""Weights are allocated one by one, so that the arena, which returns nothing, holds activations alone."""
CAPTURES = 16
"""CUDA graphs of a session, also of those that are no longer used: the provider keeps them until the session ends."""
NO_CAPTURE = -1
DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
"""Types of inputs and outputs that are bound."""
LAYERS = frozenset({"MatMul", "FusedMatMul", "MatMulNBits", "Gemm", "Conv", "FusedConv", "ConvTranspose", "Gather"})
"""Operators with weights, by the names of the optimized graph."""


class OrtCudaSession(OrtSession):
    """A model loaded to a GPU by ONNX Runtime, with a stream, buffers and a binding of its own.

    Inputs are copied to the device, the model runs, and outputs are copied back, all queued on one stream that is
    waited for once. Shapes that come three times are captured as CUDA graphs. A model whose outputs have sizes that
    those of its inputs do not tell, or types that numpy lacks, runs without a binding.
    """

    def __init__(self, session: ort.InferenceSession, model: Path, stream: CudaStream, *, captures: bool) -> None:
        """stream: that of the session; closed with it. captures: whether the session may capture CUDA graphs."""
        super().__init__(session, model, make_run_options(NO_CAPTURE, waits=True))
        self._stream = stream
        self._captures = captures
        self._inputs = {value.name: tuple(value.shape) for value in session.get_inputs()}
        self._shapes = {value.name: tuple(value.shape) for value in session.get_outputs()}
        types = {value.name: value.type for value in (*session.get_inputs(), *session.get_outputs())}
        self._bindable = set(types.values()) <= set(DTYPES)
        self._dtypes = {name: DTYPES.get(each, np.float32) for name, each in types.items()}
        self._buffers = PinnedBuffers("onnxruntime", self._dtypes, self._forget_addresses)
        self._binding = session.io_binding()
        self._bound: tuple[Shape, ...] | None = None
        self._uncaptured = make_run_options(NO_CAPTURE, waits=False)
        self._replays: ReplayCache[ort.RunOptions] = ReplayCache(CAPTURES)
        self._captured = 0

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        shapes = {name: np.shape(array) for name, array in inputs.items()}
        outputs = find_shapes(self._inputs, shapes, self._shapes) if self._bindable else None
        if outputs is None:
            return super().run(inputs)
        try:
            self._buffers.check(inputs, list(self._inputs))
            self._bind({name: shapes[name] for name in self._inputs}, outputs)
            self._buffers.write(inputs)
            self._enqueue(shapes, outputs)
            self._stream.synchronize()
            return self._buffers.read(outputs)
        except LaconicError:
            raise
        except Exception as error:  # the engine's exceptions share no base class
            raise RuntimeFailure(f"onnxruntime failed: {error}") from error

    def close(self) -> None:
        del self._binding
        super().close()
        self._buffers.close()
        self._stream.close()

    def _bind(self, shapes: Mapping[str, Shape], outputs: Mapping[str, Shape]) -> None:
        """Bind the buffers as inputs and outputs of these shapes, unless they are bound so."""
        if self._bound == tuple(shapes.values()):
            return
        for bind, each in ((self._binding.bind_input, shapes), (self._binding.bind_output, outputs)):
            for name, shape in each.items():
                address = self._buffers.reserve(name, shape)
                bind(name, DEVICE, 0, self._dtypes[name], list(shape), address)
        self._bound = tuple(shapes.values())

    def _enqueue(self, shapes: Mapping[str, Shape], outputs: Mapping[str, Shape]) -> None:
        """Queue the copies and the run: by the CUDA graph of these shapes, captured if they come often."""
        # The provider keeps its graphs by thread.
        key = (threading.get_ident(), self._bound)
        options = self._replays.find(key)
        if options is None and self._captures and self._captured < CAPTURES and self._replays.count(key):
            self._captured += 1
            options = make_run_options(self._captured, waits=False)
            self._replays.put(key, options)
        self._buffers.upload(shapes, self._stream)
        try:
            self._session.run_with_iobinding(self._binding, options or self._uncaptured)
        except Exception as error:
            if options is None:
                raise
            log.warning("runs are not replayed as CUDA graphs: %s", error)
            self._captures = False
            self._replays.clear()
            self._session.run_with_iobinding(self._binding, self._uncaptured)
        self._buffers.download(outputs, self._stream)

    def _forget_addresses(self) -> None:
        self._bound = None
        self._replays.clear()

    def kernels(self) -> list[Kernel]:
        nodes = read_optimized_nodes(self._model, ort.SessionOptions(), [(PROVIDER, PROVIDER_OPTIONS)])
        return [
            Kernel(NODE_SUFFIX.sub("", node.name), node.kind, find_weight_type(node))
            for node in nodes
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
        find_gpu()
        stream = CudaStream()
        try:
            return self._open(model, threads, stream)
        except BaseException as error:
            stream.close()
            if isinstance(error, LaconicError) or not isinstance(error, Exception):
                raise
            raise RuntimeFailure(f"onnxruntime refused {model}: {error}") from error

    def _open(self, model: Path, threads: int, stream: CudaStream) -> OrtCudaSession:
        provider = {**PROVIDER_OPTIONS, "user_compute_stream": str(int(stream.handle))}
        captures = True
        try:
            session = make_session(model, threads, {**provider, **CUDA_GRAPHS})
        except Exception as error:  # the engine's exceptions share no base class
            if REFUSES_GRAPHS not in str(error):
                raise
            captures = False
            session = make_session(model, threads, provider)
        if session.get_providers()[0] != PROVIDER:  # it would run on the CPU without being asked
            raise RuntimeFailure(
                "onnxruntime found no GPU that it can use. Look at nvidia-smi, and at the CUDA version that "
                "onnxruntime-gpu needs; or try --target cpu"
            )
        return OrtCudaSession(session, model, stream, captures=captures)


def make_session(model: Path, threads: int, provider: Mapping[str, str]) -> ort.InferenceSession:
    """Load a model file with options of the provider; what fails is raised, and not tried on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry(*WEIGHTS_BESIDE_ARENA)
    return ort.InferenceSession(model, options, providers=[(PROVIDER, dict(provider))], enable_fallback=0)


def make_run_options(graph: int, *, waits: bool) -> ort.RunOptions:
    """Make the options of a run. graph: the number of its CUDA graph, which the provider captures if it has none of
    that number, or NO_CAPTURE. waits: whether the run ends when the device is done, and not when all is queued."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    if not waits:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def find_shapes(
    declared: Mapping[str, Sequence[Any]], shapes: Mapping[str, Shape], outputs: Mapping[str, Sequence[Any]]
) -> dict[str, Shape] | None:
    """Find the shapes of the outputs, by the names of the inputs' axes; None where these do not tell them, or where the
    inputs do not fit.

    declared, outputs: by name, an integer for a fixed axis, a name for a dynamic one, None for one without a name.
    """
    sizes: dict[str, int] = {}
    for name, axes in declared.items():
        if name not in shapes or len(shapes[name]) != len(axes):
            return None
        for axis, size in zip(axes, shapes[name], strict=True):
            if axis is not None and size != (axis if isinstance(axis, int) else sizes.setdefault(axis, size)):
                return None
    if not all(isinstance(axis, int) or axis in sizes for axes in outputs.values() for axis in axes):
        return None
    return {
        name: tuple(axis if isinstance(axis, int) else sizes[axis] for axis in axes) for name, axes in outputs.items()
    }


def find_weight_type(node: Node) -> str:
    """Find the type of a layer's weight, which is that of its arithmetic; empty where it is not a float."""
    return next((dtype for dtype in node.weights if "float" in dtype), "")
