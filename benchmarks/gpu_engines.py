"""ONNX Runtime CUDA and TensorRT as ways of the GPU benchmark, with graphs of the project's own export."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gpu_models import POSITIONS, Network, write_attention_out
from gpu_rows import HostInputs, NotMeasured

from compress.quantize.calibration import observe_activations
from compress.quantize.ranges import minmax
from export.candidates.engine_option import EngineOption
from export.candidates.magnitudes import find_overflow
from export.candidates.reference import open_reference
from export.capture.capture import capture
from laconic.arrays import Arrays
from laconic.errors import MissingPackage
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import probe_module
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, Precision, Range
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import Compute, Session, make_runtime
from laconic.tasks.tensors import Tensors
from laconic.tensor import BATCH, TensorSpec

COMPUTES: dict[str, Compute] = {"FP16": "float16", "BF16": "bfloat16"}
"""The arithmetic of what is not quantized; FP16 for all others."""
PRECISIONS: dict[str, Precision] = {"FP8": "float8", "INT8": "int8"}
SAMPLES = 8
"""Random inputs to calibrate with, one at a time. The networks are random too, so this is about speed."""


class SessionRunner:
    """A session with one output."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, inputs: HostInputs) -> np.ndarray[Any, Any]:
        """The output."""
        (answer,) = self.session.run(inputs).values()
        return answer

    def close(self) -> None:
        """Release the session."""
        self.session.close()


class EngineGraphs:
    """The graphs of one network for the engines, made when they are first asked for.

    folder: a new one. reference: whether graphs of an engine that is not here are run node by node on the CPU.
    """

    def __init__(self, network: Network, folder: Path, *, reference: bool) -> None:
        self.network, self.folder, self.reference = network, folder, reference

    @cached_property
    def graph(self) -> Graph:
        """The captured float graph."""
        module = write_attention_out(self.network.build())
        task = Tensors(describe_inputs(self.network))
        outputs = probe_module(module, task.inputs)
        checkpoint = Checkpoint.of(module, task, outputs=outputs, source={"kind": "random"}, size=0)
        return capture(checkpoint, self.folder)

    @cached_property
    def samples(self) -> list[Arrays]:
        """Inputs to calibrate with."""
        made = [self.network.make_inputs(1, seed=1000 + number) for number in range(SAMPLES)]
        return [{name: tensor.numpy() for name, tensor in each.items()} for each in made]

    @cached_property
    def ranges(self) -> dict[str, Range]:
        """The ranges of activations."""
        seen = observe_activations(self.graph, self.samples, OnnxRuntime(), self.folder)
        return {name: minmax(histogram) for name, histogram in seen.histograms.items()}

    @cached_property
    def overflow(self) -> frozenset[str]:
        """The tensors that exceed FP16, whose nodes stay in FP32."""
        return find_overflow(self.graph, self.samples[:1], self.folder)

    def prepare(self, engine: str, precision: str) -> None:
        """Make what several engines and precisions share. Raises NotMeasured where the engine is missing."""
        self.find_engine(engine)
        if precision != "FP32":
            _ = self.overflow
        if precision in PRECISIONS:
            _ = self.ranges

    def open(self, engine: str, precision: str) -> SessionRunner:
        """The network in an engine and a precision. Raises NotMeasured where the engine is missing, or has no kernels
        of the precision; a LaconicError where it refuses the graph."""
        here = self.find_engine(engine)
        if precision == "FP32":
            graph = self.graph.path
            return SessionRunner(make_runtime(engine).open(graph) if here else open_reference(graph))
        path = self.folder / f"{engine}-{precision}.onnx"
        option = EngineOption(engine, COMPUTES.get(precision, "float16"), not here, self.overflow)
        option.build(self.graph, self.make_plan(option, precision), path)
        return SessionRunner(option.open(path, 1))

    def find_engine(self, engine: str) -> bool:
        """Whether an engine is on this machine. Raises NotMeasured if not, save where there is reference execution."""
        try:
            make_runtime(engine)
        except MissingPackage as error:
            if not self.reference:
                raise NotMeasured(str(error)) from None
            return False
        return True

    def make_plan(self, option: EngineOption, precision: str) -> Plan:
        """Every layer in the precision, tables of rows excepted. Raises NotMeasured if less than half of the layers
        would run in it."""
        wanted = PRECISIONS.get(precision, "float32")
        layers = [layer for layer in self.graph.layers if layer.kind != "Gather"]
        plan = Plan({layer.node: "float32" for layer in self.graph.layers})
        if precision not in PRECISIONS:
            return plan
        plan = Plan({**plan.precision, **{layer.node: wanted for layer in layers}}, self.ranges)
        adapted = option.adapt(self.graph, plan)
        count = sum(adapted.precision[layer.node] == wanted for layer in layers)
        if 2 * count < len(layers):
            raise NotMeasured(f"the engine has kernels of it for {count} of {len(layers)} layers with weights")
        return plan


def describe_inputs(network: Network) -> tuple[TensorSpec, ...]:
    """The signature of a network: the batch is free, and the length of texts."""
    if network.words:
        bounds = {"seq": (1, POSITIONS)}
        return tuple(
            TensorSpec(name=name, dtype="int64", shape=(BATCH, "seq"), bounds=bounds)
            for name in ("input_ids", "attention_mask")
        )
    side = network.size
    return (TensorSpec(name="image", dtype="float32", shape=(BATCH, 3, side, side)),)
