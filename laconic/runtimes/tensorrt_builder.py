"""Building of TensorRT engines from ONNX files, and loading them again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorrt as trt

from laconic.errors import RuntimeFailure
from laconic.runtimes.engine_messages import ParserProblem, explain_builder, explain_parser
from laconic.runtimes.engine_spec import EngineSpec
from laconic.runtimes.engine_store import TIMING, EngineStore

LACKING = {
    trt.ErrorCode.UNSUPPORTED_GRAPH,
    trt.ErrorCode.UNSUPPORTED_NODE,
    trt.ErrorCode.UNSUPPORTED_NODE_ATTR,
    trt.ErrorCode.UNSUPPORTED_NODE_DATATYPE,
    trt.ErrorCode.UNSUPPORTED_NODE_DYNAMIC,
    trt.ErrorCode.UNSUPPORTED_NODE_INPUT,
    trt.ErrorCode.UNSUPPORTED_NODE_SHAPE,
}
"""Errors of the parser for operators, or uses of them, that it does not have."""


class ErrorLog(trt.ILogger):  # type: ignore[misc]
    """Collects the errors that TensorRT reports, for the message of the exception."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.messages: list[str] = []

    def log(self, severity: Any, msg: str) -> None:
        """Keep the message of an error; called by TensorRT."""
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            self.messages.append(msg)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, with the runtime and the logger that must live as long as it does."""

    engine: Any
    runtime: Any
    errors: ErrorLog


def deserialize(engine_bytes: bytes) -> LoadedEngine:
    """Load a serialized engine. Raises RuntimeFailure if TensorRT does not read it."""
    errors = ErrorLog()
    runtime = trt.Runtime(errors)
    engine = runtime.deserialize_cuda_engine(engine_bytes)
    if engine is None:
        raise RuntimeFailure(f"tensorrt: {explain_builder(errors.messages)}")
    return LoadedEngine(engine, runtime, errors)


def build_engine(model: Path, spec: EngineSpec, store: EngineStore) -> bytes:
    """Build the engine of a spec, serialized; timings of kernels are taken from the store and kept there.

    Raises RuntimeFailure, with the operator's name where there is one.
    """
    errors = ErrorLog()
    builder = trt.Builder(errors)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, errors)
    if not parser.parse_from_file(str(model)):
        problems = [describe_problem(parser.get_error(number)) for number in range(parser.num_errors)]
        raise RuntimeFailure(f"tensorrt refused {model}: {explain_parser(problems)}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, spec.workspace)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.clear_flag(trt.BuilderFlag.TF32)  # what the graph writes as FP32 is computed in FP32
    if spec.sparse:
        config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    if spec.profile:
        optimization = builder.create_optimization_profile()
        for name, shapes in spec.profile.items():
            optimization.set_shape(name, *shapes)
        config.add_optimization_profile(optimization)
    timing_name, device = f"{spec.device_key}{TIMING}", {"key": spec.device_key}
    timing = load_timing(config, store, timing_name, device)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise RuntimeFailure(f"tensorrt refused {model}: {explain_builder(errors.messages)}")
    store.write(timing_name, bytes(timing.serialize()), device)
    return bytes(serialized)


def load_timing(config: Any, store: EngineStore, name: str, device: Mapping[str, str]) -> Any:
    """Give a configuration the timing cache of this device; an empty one if there is none that can be used."""
    timing = config.create_timing_cache(store.read(name, device) or b"")
    if timing is None or not config.set_timing_cache(timing, ignore_mismatch=False):
        store.drop(name, "it was made on another device")
        timing = config.create_timing_cache(b"")
        config.set_timing_cache(timing, ignore_mismatch=False)
    return timing


def describe_problem(error: Any) -> ParserProblem:
    """Describe an error of the parser."""
    return ParserProblem(error.node_name(), error.node_operator(), error.desc(), error.code() in LACKING)
