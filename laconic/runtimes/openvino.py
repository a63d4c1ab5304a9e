"""OpenVINO on the CPU, which loads the same ONNX files."""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from laconic.arrays import Array, Arrays
from laconic.errors import RuntimeFailure
from laconic.hardware import this_machine
from laconic.runtimes.runtime import Compute, Kernel, Runtime, Session, open_row_by_row

# Importing openvino sends telemetry to Google Analytics and writes an identifier into the home folder, without consent
# (openvino/tools/ovc/__init__.py, 2026.4). If that converter cannot be imported, openvino works without it. Nothing
# here needs it, and blocking it also saves 9 MB and a third of the import time.
CONVERTER = "openvino.tools.ovc"
sys.modules.setdefault(CONVERTER, None)  # type: ignore[arg-type]

import openvino as ov  # noqa: E402
from openvino import opset13 as opset  # noqa: E402
from openvino.passes import MakeStateful, Manager  # noqa: E402

if sys.modules[CONVERTER] is None:
    del sys.modules[CONVERTER]

__all__ = ["HINTS", "MakeStateful", "Manager", "OpenVino", "OvSession", "core", "find_output_name", "opset", "ov"]

PRECISIONS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "u8": "int8", "i8": "int8"}
HINTS = {"float32": "f32", "bfloat16": "bf16", "int8-dynamic": "f32"}
WITHOUT_VNNI = frozenset({"SSE41", "AVX", "AVX2", "AVX512_CORE"})
WITHOUT_BF16 = WITHOUT_VNNI | {"AVX2_VNNI", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA that leave oneDNN no such instructions."""
DYNAMIC_GROUP = "32"
"""Inputs that share a scale in the arithmetic int8-dynamic. OpenVINO has it where the rest is in FP32 (2026.4)."""
STORED = frozenset({"u4", "i4", "u8", "i8"})
"""Types of weights that a product reads as they are stored."""


SINK = "/sink_port_0"
"""What OpenVINO appends to the name of a graph's output."""
FUSED_ATTENTION = "ScaledDotProductAttention"
"""What ONNX Runtime's MultiHeadAttention becomes. After an input of length 1 its kernel's outputs for longer inputs are
wrong (2026.4, AVX2); those of the products and the softmax in a graph that is placed for OpenVINO are not."""


@functools.cache
def core() -> ov.Core:
    """Return OpenVINO's core: one, which lives as long as the process.

    The CPU plugin of a core gives the thread that first uses it another signal stack (for AMX) and unmaps that stack
    when the core is freed (`SigAltStackSetup` in its plugin.cpp). Freed by another thread, it would leave the first one
    with a signal stack that is not there: the next signal with a handler in Python, as SIGTERM to a server that has
    unloaded a model, would end the process with SIGSEGV.
    """
    return ov.Core()


class OvSession(Session):
    """A model loaded by OpenVINO."""

    def __init__(self, compiled: ov.CompiledModel, *, is_dynamic: bool = False) -> None:
        """compiled: shared by as many sessions as it has streams. is_dynamic: whether the inputs of products with
        stored weights are rounded to INT8, of which the engine's kernels say nothing."""
        self._is_dynamic = is_dynamic
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._outputs = [find_output_name(output) for output in compiled.outputs]

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        try:
            self._request.infer(dict(inputs), share_inputs=True)
        except Exception as error:
            raise RuntimeFailure(f"openvino failed: {error}") from error
        tensors = (self._request.get_output_tensor(index).data for index in range(len(self._outputs)))
        return {name: data.copy() for name, data in zip(self._outputs, tensors, strict=True)}

    def kernels(self) -> list[Kernel]:
        kernels = []
        for node in self._compiled.get_runtime_model().get_ops():
            info = node.get_rt_info()
            kind = str(info["primitiveType"].astype(str))
            # The kernel's name gives its arithmetic; for compressed weights `runtimePrecision` is i8 even for a
            # kernel that multiplies in BF16 or FP32.
            precision = kind.rpartition("_")[2].lower()
            if self._is_dynamic and str(info["runtimePrecision"].astype(str)) in STORED:
                precision = "i8"
            for name in info["originalLayersNames"].astype(str).split(","):
                kernels.append(Kernel(name, kind, PRECISIONS.get(precision, precision)))
        return kernels

    def close(self) -> None:
        del self._request, self._compiled


def find_output_name(output: ov.ConstOutput) -> str:
    """Find the name of an output in the graph: a tensor that only passes through has several, of which `any_name` is
    any."""
    name = str(output.get_node().get_friendly_name()).removesuffix(SINK)
    return name if name in output.get_names() else str(output.any_name)


class OpenVino(Runtime):
    """OpenVINO on the CPU."""

    name = "openvino"
    package = "openvino"

    def version(self) -> str:
        return str(ov.__version__)

    def computes(self) -> tuple[Compute, ...]:
        # The capabilities are those of the processor. A model compiled for BF16 without oneDNN's kernels for it gives
        # outputs without a row (2026.4).
        capabilities = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return ("float32", "bfloat16") if "BF16" in capabilities and read_limit() not in WITHOUT_BF16 else ("float32",)

    def has_int8_dynamic(self) -> bool:
        return this_machine().has_vnni and read_limit() not in WITHOUT_VNNI

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float32") -> Session:
        return self.open_many(model, 1, threads=threads, compute=compute)[0]

    def open_many(
        self, model: Path, count: int, *, threads: int = 1, compute: Compute = "float32"
    ) -> Sequence[Session]:
        # One stream per session over one copy of the weights: a second session of MiniLM in INT8 takes 25 MB more,
        # compiled for itself 96 MB, and both give the same rows per CPU-second.
        compute = find_compute(compute)
        properties = make_properties(threads * count, compute) | {"NUM_STREAMS": str(count)}
        try:
            graph = core().read_model(model)
            fused = any(node.get_type_name() == FUSED_ATTENTION for node in graph.get_ops())
            compiled = None if fused else core().compile_model(graph, "CPU", properties)
        except Exception as error:  # the engine raises RuntimeError and its like
            raise RuntimeFailure(f"openvino refused {model}: {error}") from error
        if compiled is None:
            raise RuntimeFailure(
                f"{model} has attention as one operator, which OpenVINO computes wrongly once an input had length 1. "
                f"Open it in onnxruntime; an artifact that was placed for that engine can be built again for this one "
                f"(laconic build --engine-only openvino)"
            )
        shapes = [
            [axis.get_length() if axis.is_static else None for axis in each.get_partial_shape()]
            for each in compiled.inputs
        ]
        is_dynamic = compute == "int8-dynamic"
        return [open_row_by_row(OvSession(compiled, is_dynamic=is_dynamic), shapes) for _ in range(count)]


def find_compute(compute: Compute) -> Compute:
    """Return an arithmetic, or FP32 on a processor without its instructions: never less exact than what was
    validated."""
    engine = OpenVino()
    is_here = engine.has_int8_dynamic() if compute == "int8-dynamic" else compute in engine.computes()
    return compute if is_here else "float32"


def read_limit() -> str:
    """Read the instructions that oneDNN is held to; empty for all that the processor has."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()


def make_properties(threads: int, compute: Compute) -> dict[str, str]:
    """Make the properties of a compiled model. compute: one that this processor has (`find_compute`)."""
    return {
        "INFERENCE_PRECISION_HINT": HINTS[compute],
        "INFERENCE_NUM_THREADS": str(threads),
        # Pinned threads of two sessions, or of two servers, would share the same core.
        "ENABLE_CPU_PINNING": "NO",
        # The default cache keeps 5000 kernels generated for input shapes: 559 MB after 110 shapes of MiniLM, and 404 MB
        # with a small one. With 16, texts of eight lengths in turn take 1.37 times the time of each length by itself,
        # with 64 kernels 1.23 times, with 1024 no less (2026.4, INT8, AVX512-VNNI).
        "CPU_RUNTIME_CACHE_CAPACITY": "64",
        # By default the engine rounds the inputs of products with stored weights to INT8, without being asked: KL
        # divergence 0.008 where BF16 alone has 0.0007 (SmolLM2-135M, 2026.4).
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": DYNAMIC_GROUP if compute == "int8-dynamic" else "0",
    }
