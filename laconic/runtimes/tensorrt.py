"""TensorRT on an NVIDIA GPU: engines are built from strongly typed ONNX graphs, and kept in the cache.

Written against the Python interface of TensorRT 11.4, without a GPU: it has not run yet.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt as trt

from laconic.arrays import Array, Arrays
from laconic.cache import Cache
from laconic.errors import LaconicError, RuntimeFailure, UsageError
from laconic.runtimes.cuda_device import UNBOUNDED, CudaGraph, CudaStream, DeviceMemory, Gpu, PinnedBuffers, find_gpu
from laconic.runtimes.device_policy import ReplayCache
from laconic.runtimes.engine_inspector import parse_kernels
from laconic.runtimes.engine_messages import explain_builder
from laconic.runtimes.engine_spec import Bounds, EngineSpec, Shape, describe_model
from laconic.runtimes.engine_store import ENGINE, EngineStore
from laconic.runtimes.runtime import Compute, Kernel, Runtime, Session
from laconic.runtimes.tensorrt_builder import LoadedEngine, build_engine, deserialize

log = logging.getLogger("laconic.tensorrt")

WORKSPACE = 4 * 2**30
"""Bytes of scratch memory that a kernel may use."""
DTYPES = {
    trt.DataType.FLOAT: np.dtype(np.float32),
    trt.DataType.HALF: np.dtype(np.float16),
    trt.DataType.INT8: np.dtype(np.int8),
    trt.DataType.INT32: np.dtype(np.int32),
    trt.DataType.INT64: np.dtype(np.int64),
    trt.DataType.UINT8: np.dtype(np.uint8),
    trt.DataType.BOOL: np.dtype(np.bool_),
}
"""Types of inputs and outputs; numpy has no other."""


@dataclass(frozen=True)
class CapturedRun:
    """A run that was recorded for fixed shapes. context: its own; outputs: their shapes."""

    graph: CudaGraph
    context: Any
    outputs: dict[str, Shape]


class TensorRtSession(Session):
    """An engine with a stream, buffers and an execution context of its own; the weights may be shared."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self._engine = engine = loaded.engine
        names = [engine.get_tensor_name(place) for place in range(engine.num_io_tensors)]
        self._inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self._outputs = [name for name in names if name not in self._inputs]
        dtypes = {name: find_dtype(name, engine.get_tensor_dtype(name)) for name in names}
        shaping = [name for name in names if engine.is_shape_inference_io(name)]
        if shaping:
            raise RuntimeFailure(
                f"tensorrt: {shaping[0]} is a shape, not data. Export with shapes taken from the inputs"
            )
        self._stream = CudaStream()
        self._memory = DeviceMemory(engine.device_memory_size_v2)
        self._buffers = PinnedBuffers("tensorrt", dtypes, self._forget_replays)
        self._replays: ReplayCache[CapturedRun] = ReplayCache()
        self._captures = True
        self._context = self._make_context()

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        try:
            return self._run(inputs)
        except LaconicError:
            raise
        except Exception as error:
            raise RuntimeFailure(f"tensorrt failed: {error}") from error

    def kernels(self) -> list[Kernel]:
        inspector = self._engine.create_engine_inspector()
        return parse_kernels(inspector.get_engine_information(trt.LayerInformationFormat.JSON))

    def close(self) -> None:
        self._forget_replays()
        self._buffers.close()
        self._context = None
        self._memory.close()
        self._stream.close()

    def _run(self, inputs: Mapping[str, Array]) -> Arrays:
        self._buffers.check(inputs, self._inputs)
        shapes = {name: inputs[name].shape for name in self._inputs}
        key = tuple(shapes.values())
        captured = self._replays.find(key)
        outputs = captured.outputs if captured else self._bind(self._context, shapes)
        self._buffers.write(inputs)
        if captured:
            captured.graph.launch(self._stream)
        else:
            self._enqueue(self._context, shapes, outputs)
        self._stream.synchronize()
        answers = self._buffers.read(outputs)
        if not captured and self._captures and self._replays.count(key):
            self._capture(key, shapes)
        return answers

    def _make_context(self) -> Any:
        """Make an execution context. All of a session run one after the other, so they share its scratch memory."""
        context = self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise RuntimeFailure(f"tensorrt: {explain_builder(self._loaded.errors.messages)}")
        context.set_device_memory(self._memory.address, self._memory.size)
        return context

    def _bind(self, context: Any, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Give a context the shapes of the inputs and the addresses of all buffers. Returns the outputs' shapes."""
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise RuntimeFailure(f"tensorrt: input {name!r} has shape {list(shape)}, {self._describe_range(name)}")
        if unknown := context.infer_shapes():
            raise RuntimeFailure(f"tensorrt: the shape of {unknown[0]!r} is not known. Try another engine (--runtime)")
        outputs = {name: tuple(context.get_tensor_shape(name)) for name in self._outputs}
        for name, shape in {**shapes, **outputs}.items():
            if min(shape, default=1) < 0:
                raise RuntimeFailure(
                    f"tensorrt: the shape of output {name!r} depends on data. Try another engine (--runtime)"
                )
            context.set_tensor_address(name, self._buffers.reserve(name, shape, self._largest(name)))
        return outputs

    def _largest(self, name: str) -> int:
        """Return the bytes of the largest input that the engine takes; the largest shape of an output is not known."""
        return self._buffers.size_of(name, self._find_range(name)[1]) if name in self._inputs else UNBOUNDED

    def _find_range(self, name: str) -> tuple[Shape, Shape]:
        """Find the smallest and the largest shape of an input."""
        shape = tuple(self._engine.get_tensor_shape(name))
        if min(shape, default=0) >= 0:
            return shape, shape
        least, _, most = self._engine.get_tensor_profile_shape(name, 0)
        return tuple(least), tuple(most)

    def _describe_range(self, name: str) -> str:
        least, most = map(list, self._find_range(name))
        return f"and the engine takes {least} to {most}. Give other bounds (shapes), and build again"

    def _enqueue(self, context: Any, shapes: Mapping[str, Shape], outputs: Mapping[str, Shape]) -> None:
        self._buffers.upload(shapes, self._stream)
        if not context.execute_async_v3(int(self._stream.handle)):
            raise RuntimeFailure(f"tensorrt: {explain_builder(self._loaded.errors.messages)}")
        self._buffers.download(outputs, self._stream)

    def _capture(self, key: tuple[Shape, ...], shapes: Mapping[str, Shape]) -> None:
        """Record a run of these shapes as a CUDA graph, in a context of its own, whose shapes then stay."""
        try:
            context = self._make_context()
            outputs = self._bind(context, shapes)
            self._enqueue(context, shapes, outputs)  # the first run of a context does work that cannot be recorded
            self._stream.synchronize()
            self._stream.begin_capture()
            try:
                self._enqueue(context, shapes, outputs)
            except BaseException:
                with suppress(RuntimeFailure):
                    self._stream.end_capture().close()
                raise
            graph = self._stream.end_capture()
        except RuntimeFailure as error:
            log.warning("runs are not replayed as CUDA graphs: %s", error)
            self._captures = False
            return
        self._release(self._replays.put(key, CapturedRun(graph, context, outputs)))

    def _forget_replays(self) -> None:
        self._release(self._replays.clear())

    @staticmethod
    def _release(runs: Sequence[CapturedRun]) -> None:
        for run in runs:
            run.graph.close()


class TensorRt(Runtime):
    """TensorRT on the first GPU. The precision of every tensor is that in the graph."""

    name = "tensorrt"
    package = "tensorrt"

    def __init__(
        self, *, shapes: Mapping[str, Bounds] | None = None, workspace: int = WORKSPACE, cache: Cache | None = None
    ) -> None:
        """shapes: bounds of dynamic axes, by name. workspace: bytes. cache: where engines are kept."""
        self._shapes = shapes or {}
        self._workspace = workspace
        self._cache = cache or Cache()

    def version(self) -> str:
        return str(trt.__version__)

    def computes(self) -> tuple[Compute, ...]:
        return ("float16", "bfloat16")

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float16") -> TensorRtSession:
        return self.open_many(model, 1, threads=threads, compute=compute)[0]

    def open_many(
        self, model: Path, count: int, *, threads: int = 1, compute: Compute = "float16"
    ) -> Sequence[TensorRtSession]:
        try:
            description = describe_model(model, self._shapes)
            loaded = self._load(model, make_spec(description, find_gpu(), self._workspace, self.version()))
            return open_sessions(loaded, count)
        except UsageError:
            raise
        except Exception as error:
            if isinstance(error, RuntimeFailure) and str(model) in str(error):
                raise
            raise RuntimeFailure(f"tensorrt refused {model}: {error}") from error

    def _load(self, model: Path, spec: EngineSpec) -> LoadedEngine:
        """Load the engine of a spec from the cache, or build it."""
        store, name = EngineStore(self._cache), f"{spec.key}{ENGINE}"
        with self._cache.lock(f"tensorrt-{spec.key}"):
            stored = store.read(name, spec.describe())
            if stored is not None:
                with suppress(RuntimeFailure):
                    return deserialize(stored)
                store.drop(name, "TensorRT does not read it")
            built = build_engine(model, spec, store)
            store.write(name, built, spec.describe())
            return deserialize(built)


def open_sessions(loaded: LoadedEngine, count: int) -> list[TensorRtSession]:
    """Open sessions of one engine; none stays open if one of them fails."""
    sessions: list[TensorRtSession] = []
    try:
        for _ in range(count):
            sessions.append(TensorRtSession(loaded))
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions


def make_spec(description: Any, gpu: Gpu, workspace: int, version: str) -> EngineSpec:
    """Make the spec of an engine. description: what `describe_model` returned."""
    digests, profile, sparse = description
    device = {"gpu" if key == "name" else key: value for key, value in asdict(gpu).items()}
    return EngineSpec(model=digests, profile=profile, sparse=sparse, workspace=workspace, tensorrt=version, **device)


def find_dtype(name: str, dtype: Any) -> Any:
    """Find the numpy type of an input or output. Raises RuntimeFailure for one that numpy lacks."""
    if dtype not in DTYPES:
        raise RuntimeFailure(f"tensorrt: {name!r} is {dtype}, which numpy lacks. Cast it to FLOAT in the graph")
    return DTYPES[dtype]
