"""Stand-ins for `tensorrt` and `cuda.bindings.runtime` that run graphs with ONNX Runtime in host memory, and for a
session of ONNX Runtime that captures CUDA graphs.

They show that the runtimes call in the right order, grow their buffers and forget their CUDA graphs where they
must. They prove nothing about TensorRT or CUDA. The names are those of the real interface: see tensorrt_surface.json.
"""

import ctypes
import enum
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort

LIMIT = 2**24
"""Bytes of the simulated device."""


class Gpu:
    """The state of the simulated device: its allocations, and how often each thing happened."""

    def __init__(self, driver=13020, memory=LIMIT):
        self.driver, self.memory = driver, memory
        self.blocks = {}
        self.streams = {}
        self.counts = dict.fromkeys(("built", "allocated", "enqueued", "launched", "captured"), 0)

    def allocate(self, size):
        if size > self.memory:
            return (self.errors.cudaErrorMemoryAllocation, None)
        block = (ctypes.c_uint8 * size)()
        self.blocks[ctypes.addressof(block)] = block
        self.counts["allocated"] += 1
        return (self.errors.cudaSuccess, ctypes.addressof(block))

    def free(self, address):
        del self.blocks[address]  # a second release is an error here
        return (self.errors.cudaSuccess,)

    def enqueue(self, stream, work):
        """Run work, or record it while the stream is captured."""
        if stream.recorded is None:
            work()
        else:
            stream.recorded.append(work)

    class errors(enum.Enum):  # noqa: N801 - its name in CUDA
        cudaSuccess = 0  # noqa: N815
        cudaErrorMemoryAllocation = 2  # noqa: N815
        cudaErrorInsufficientDriver = 35  # noqa: N815
        cudaErrorNoDevice = 100  # noqa: N815
        cudaErrorUnknown = 999  # noqa: N815


class SimulatedStream:
    """A stream that runs its work at once. Its number stands for its handle."""

    def __init__(self, number):
        self.number, self.recorded = number, None

    def __int__(self):
        return self.number


def make_cuda(gpu):
    """Make the module `cuda.bindings.runtime`."""
    done = gpu.errors.cudaSuccess

    def create(flags):
        stream = SimulatedStream(len(gpu.streams) + 1)
        gpu.streams[stream.number] = stream
        return done, stream

    def copy(target, source, size, kind, stream):
        gpu.enqueue(stream, lambda: ctypes.memmove(target, source, size))
        return (done,)

    def begin(stream, mode):
        stream.recorded = []
        return (done,)

    def end(stream):
        recorded, stream.recorded = stream.recorded, None
        gpu.counts["captured"] += 1
        return done, recorded

    def launch(graph, stream):
        gpu.counts["launched"] += 1
        for work in graph:
            work()
        return (done,)

    module = ModuleType("cuda.bindings.runtime")
    module.__dict__.update(
        cudaError_t=gpu.errors,
        cudaStreamNonBlocking=1,
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2),
        cudaStreamCaptureMode=SimpleNamespace(cudaStreamCaptureModeThreadLocal=1),
        cudaDriverGetVersion=lambda: (done, gpu.driver),
        cudaRuntimeGetVersion=lambda: (done, 13000),
        cudaGetDeviceCount=lambda: (done, 1),
        cudaGetDeviceProperties=lambda device: (done, SimpleNamespace(name=b"Simulated", major=9, minor=0)),
        cudaMalloc=gpu.allocate,
        cudaMallocHost=gpu.allocate,
        cudaFree=gpu.free,
        cudaFreeHost=gpu.free,
        cudaMemcpyAsync=copy,
        cudaStreamCreateWithFlags=create,
        cudaStreamSynchronize=lambda stream: (done,),
        cudaStreamDestroy=lambda stream: (done,),
        cudaStreamBeginCapture=begin,
        cudaStreamEndCapture=end,
        cudaGraphInstantiate=lambda graph, flags: (done, graph),
        cudaGraphLaunch=launch,
        cudaGraphExecDestroy=lambda graph: (graph.clear(), done)[1:],
        cudaGraphDestroy=lambda graph: (done,),
    )
    return module


def read_address(address, shape, dtype):
    """The array at an address."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return (
        np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 1)).from_address(address))[:size].view(dtype).reshape(shape)
    )


def make_tensorrt(gpu, surface):
    """Make the module `tensorrt`. surface: the names of the real classes and their members."""
    module = ModuleType("tensorrt")
    module.__version__ = surface["tensorrt"]
    for name, members in surface["classes"].items():
        setattr(module, name, enum.Enum(name, {member: place for place, member in enumerate(members)}))
    module.NetworkDefinitionCreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": 1})
    types = {1: "FLOAT", 10: "HALF", 7: "INT64", 11: "FP8"}

    class ILogger:
        ERROR, INTERNAL_ERROR, WARNING = 1, 2, 3

    class Builder:
        def __init__(self, logger):
            self.logger = logger

        def create_network(self, flags):
            return SimpleNamespace(model=None)

        def create_builder_config(self):
            return IBuilderConfig()

        def create_optimization_profile(self):
            return IOptimizationProfile()

        def build_serialized_network(self, network, config):
            if config.limits.get(module.MemoryPoolType.WORKSPACE, 0) < 1024:
                self.logger.log(ILogger.ERROR, "OutOfMemory: requested 1024 bytes")
                return None
            gpu.counts["built"] += 1
            config.timing.entries += b"t"
            flags = [flag.name for flag in config.flags]
            profile = config.profiles[0].shapes if config.profiles else {}
            text = json.dumps({"model": network.model.hex(), "profile": profile, "flags": flags})
            return text.encode()

    class IBuilderConfig:
        def __init__(self):
            self.limits, self.flags, self.profiles, self.timing = {}, {module.BuilderFlag.TF32}, [], None

        def set_memory_pool_limit(self, pool, size):
            self.limits[pool] = size

        def set_flag(self, flag):
            self.flags.add(flag)

        def clear_flag(self, flag):
            self.flags.discard(flag)

        def add_optimization_profile(self, profile):
            self.profiles.append(profile)

        def create_timing_cache(self, content):
            return ITimingCache(content)

        def set_timing_cache(self, timing, ignore_mismatch):
            self.timing = timing
            return b"foreign" not in timing.entries

    class ITimingCache:
        def __init__(self, entries):
            self.entries = bytes(entries)

        def serialize(self):
            return self.entries

    class IOptimizationProfile:
        def __init__(self):
            self.shapes = {}

        def set_shape(self, name, least, usual, most):
            self.shapes[name] = [list(least), list(usual), list(most)]

    class OnnxParser:
        def __init__(self, network, logger):
            self.network, self.lacking = network, []

        def parse_from_file(self, path):
            model = onnx.load(path)
            self.lacking = [node for node in model.graph.node if node.op_type == "Det"]
            self.network.model = Path(path).read_bytes()
            return not self.lacking

        @property
        def num_errors(self):
            return len(self.lacking)

        def get_error(self, number):
            return ParserError(self.lacking[number])

    class ParserError:
        def __init__(self, node):
            self.node_name, self.node_operator = lambda: node.name, lambda: node.op_type
            self.code, self.desc = lambda: module.ErrorCode.UNSUPPORTED_NODE, lambda: "no importer for Det"

    class Runtime:
        def __init__(self, logger):
            self.logger = logger

        def deserialize_cuda_engine(self, content):
            try:
                return ICudaEngine(json.loads(content))
            except ValueError:
                self.logger.log(ILogger.ERROR, "Serialization assertion failed")
                return None

    class ICudaEngine:
        device_memory_size_v2 = 4096

        def __init__(self, content):
            self.content = content
            self.session = ort.InferenceSession(bytes.fromhex(content["model"]), providers=["CPUExecutionProvider"])
            graph = onnx.load_from_string(bytes.fromhex(content["model"])).graph
            self.inputs = {value.name: value for value in graph.input}
            self.values = {**self.inputs, **{value.name: value for value in graph.output}}

        @property
        def num_io_tensors(self):
            return len(self.values)

        def get_tensor_name(self, place):
            return list(self.values)[place]

        def get_tensor_mode(self, name):
            return module.TensorIOMode.INPUT if name in self.inputs else module.TensorIOMode.OUTPUT

        def get_tensor_dtype(self, name):
            return module.DataType[types[self.values[name].type.tensor_type.elem_type]]

        def get_tensor_shape(self, name):
            axes = self.values[name].type.tensor_type.shape.dim
            return [axis.dim_value if axis.HasField("dim_value") else -1 for axis in axes]

        def get_tensor_profile_shape(self, name, number):
            return self.content["profile"][name]

        def is_shape_inference_io(self, name):
            return False

        def create_execution_context(self, strategy):
            assert strategy is module.ExecutionContextAllocationStrategy.USER_MANAGED
            return IExecutionContext(self)

        def create_engine_inspector(self):
            return EngineInspector()

    class IExecutionContext:
        def __init__(self, engine):
            self.engine, self.shapes, self.addresses, self.memory = engine, {}, {}, 0

        def set_device_memory(self, address, size):
            assert size >= self.engine.device_memory_size_v2
            self.memory = address

        def set_input_shape(self, name, shape):
            least, most = (self.engine.content["profile"][name][place] for place in (0, 2))
            fits = len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))
            self.shapes.update({name: tuple(shape)} if fits else {})
            return fits

        def infer_shapes(self):
            return [name for name in self.engine.inputs if name not in self.shapes]

        def get_tensor_shape(self, name):
            batch = next(iter(self.shapes.values()))[0]
            return [batch if size < 0 else size for size in self.engine.get_tensor_shape(name)]

        def set_tensor_address(self, name, address):
            assert address in gpu.blocks
            self.addresses[name] = address
            return True

        def execute_async_v3(self, handle):
            assert self.memory in gpu.blocks
            gpu.counts["enqueued"] += 1
            shapes, addresses, engine = dict(self.shapes), dict(self.addresses), self.engine

            def work():
                assert set(addresses.values()) <= set(gpu.blocks), "a buffer was released"
                assert shapes == self.shapes, "the context was given other shapes"
                found = engine.session.run(
                    None, {name: read_address(addresses[name], shapes[name], np.float32) for name in engine.inputs}
                )
                for value, answer in zip(engine.session.get_outputs(), found, strict=True):
                    read_address(addresses[value.name], answer.shape, answer.dtype)[...] = answer

            gpu.enqueue(gpu.streams[handle], work)
            return True

    class EngineInspector:
        def get_engine_information(self, form):
            assert form is module.LayerInformationFormat.JSON
            layer = {"LayerType": "gemm", "Inputs": [{"DataType": "Float"}], "Metadata": "[ONNX Layer: fc/MatMul]"}
            return json.dumps({"Layers": [layer]})

    made = {name: each for name, each in locals().items() if isinstance(each, type)}
    for name, each in made.items():
        public = {member for member in vars(each) if not member.startswith("_")}
        assert public <= set(surface["classes"][name]), f"{name} has no {public - set(surface['classes'][name])}"
    module.__dict__.update(made)
    return module


class RecordingBinding(ort.IOBinding):
    """A binding of ONNX Runtime that remembers what was bound."""

    def __init__(self, session):
        super().__init__(session)
        self.inputs, self.outputs = {}, {}

    def bind_input(self, name, *given):
        self.inputs[name] = given
        super().bind_input(name, *given)

    def bind_output(self, name, *given):
        self.outputs[name] = given
        super().bind_output(name, *given)


def make_capturing_session(gpu):
    """Make the class of a session on the CPU provider that captures what is bound, by the number of its CUDA graph, and
    runs that again whatever is bound later, as the CUDA provider does."""

    class CapturingSession(ort.InferenceSession):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.graphs, self.refuses = {}, False

        def io_binding(self):
            return RecordingBinding(self)

        def run_with_iobinding(self, binding, options):
            number = options.get_run_config_entry("gpu_graph_id")
            if number == "-1":
                return super().run_with_iobinding(binding, options)
            if self.refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            if number not in self.graphs:
                self.graphs[number] = dict(binding.inputs), dict(binding.outputs)
                gpu.counts["captured"] += 1
            inputs, outputs = self.graphs[number]
            assert {given[-1] for given in (*inputs.values(), *outputs.values())} <= set(gpu.blocks), "released"
            replayed = ort.IOBinding(self)
            for name, given in inputs.items():
                replayed.bind_input(name, *given)
            for name, given in outputs.items():
                replayed.bind_output(name, *given)
            gpu.counts["launched"] += 1
            return super().run_with_iobinding(replayed, options)

    return CapturingSession
