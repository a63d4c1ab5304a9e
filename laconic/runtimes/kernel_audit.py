"""The audit of an engine's kernels: which arithmetic multiplies in each product of a model, and why it is not the one
that was asked for, as data."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from laconic.runtimes.product import ARITHMETIC, Product
from laconic.runtimes.runtime import Kernel, find_kernel

WITH_WEIGHTS, ATTENTION = frozenset({"linear", "convolution"}), frozenset({"attention"})
RECURRENT = frozenset({"recurrent"})
UNKNOWN = "the engine does not say why"
UNASKED = "the engine does so without being asked"
SENSITIVE = "the plan keeps it in higher precision, as one of the layers whose INT8 costs most fidelity"
NOT_CHOSEN = "the plan that was chosen multiplies nothing in INT8 or FP8"


@dataclass(frozen=True)
class Fallback:
    """One reason.

    engines, kinds: of the engines and products that it holds for. asked: what the recipe asks for. reason: a clause
    that follows the name of the product. placed: whether the placed graph asks the engine for it, which then runs
    something else; or already the placement leaves it out. planned: the arithmetic of the placed graph; empty for any.
    beside_int8: whether it holds only where the plan multiplies other products in INT8.
    """

    engines: Set[str]
    kinds: Set[str]
    asked: Set[str]
    reason: str
    placed: bool = False
    planned: str = ""
    beside_int8: bool = False


CUDA_LACKS = "ONNX Runtime's CUDA provider has no INT8 or FP8 kernels for it"
FUSED_IN_HALF = "TensorRT's fused attention kernels are those of FP16 and BF16"
BESIDE_BF16 = "INT8 in attention does not pay beside BF16"
PATTERN = (
    "attention is placed in INT8 only as query times key, an optional mask, Softmax, times value, and where the goal "
    "is met with it"
)
NO_ATTENTION = "no Q/DQ is placed in attention for ONNX Runtime"
IN_FLOAT = "OpenVINO multiplies dynamically quantized integers (MatMulInteger) in float"
LISTED = "OpenVINO runs INT8 only with Q/DQ right before an operator of its INT8 list"
NO_BF16 = "OpenVINO has no BF16 kernel for it on this processor"
UNSIGNED = "ONNX Runtime's INT8 convolution takes unsigned activations and needs an INT8 output"
SIGNED_WEIGHTS = "ONNX Runtime's INT8 product takes unsigned activations and signed weights"
EXCEEDS = "its values exceed FP16, so it stays in FP32"
WHOLE = WITH_WEIGHTS | ATTENTION
ALL = WHOLE | RECURRENT

FALLBACKS = (
    Fallback({"onnxruntime-cuda"}, WHOLE, {"int8", "int8-dynamic", "float8"}, CUDA_LACKS),
    Fallback({"tensorrt"}, WITH_WEIGHTS | RECURRENT, {"int8-dynamic"}, "TensorRT's ONNX parser knows no dynamic INT8"),
    Fallback({"tensorrt"}, {"convolution"}, {"float8"}, "FP8 is placed for linear layers alone"),
    Fallback({"tensorrt"}, ATTENTION, {"int8", "float8"}, FUSED_IN_HALF, beside_int8=True),
    Fallback({"openvino"}, ATTENTION, {"int8"}, BESIDE_BF16, planned="bfloat16", beside_int8=True),
    Fallback({"openvino"}, ATTENTION, {"int8"}, PATTERN, beside_int8=True),
    Fallback({"onnxruntime"}, ATTENTION, {"int8"}, NO_ATTENTION, beside_int8=True),
    Fallback({"openvino"}, WITH_WEIGHTS, {"int8-dynamic"}, IN_FLOAT, placed=True),
    Fallback({"openvino"}, RECURRENT, {"int8-dynamic"}, "OpenVINO has no INT8 kernel for it"),
    Fallback({"onnxruntime-cuda"}, RECURRENT, {"int8-dynamic"}, CUDA_LACKS),
    Fallback({"openvino"}, WHOLE, {"int8"}, LISTED, placed=True),
    Fallback({"openvino"}, ALL, {"bfloat16"}, NO_BF16, placed=True),
    Fallback({"onnxruntime"}, {"convolution"}, {"int8"}, UNSIGNED, placed=True),
    Fallback({"onnxruntime"}, {"linear"}, {"int8"}, SIGNED_WEIGHTS, placed=True),
    Fallback({"onnxruntime-cuda", "tensorrt"}, ALL, {"float16", "bfloat16"}, EXCEEDS, planned="float32"),
)
"""The first that matches holds."""


def find_reason(engine: str, kind: str, asked: str, planned: str, runs: str, *, quantized: bool) -> str:
    """Find the reason why a product does not run as was asked for; empty where it does, and where that is not known.

    runs: empty where the kernel is not known. quantized: whether any product of the plan multiplies in INT8 or FP8.
    """
    arithmetic = ARITHMETIC.get(asked, asked)
    if not arithmetic or arithmetic == (runs or planned):
        return ""
    if runs in ARITHMETIC.values():
        return UNASKED
    placed = arithmetic == planned
    for each in FALLBACKS:
        matches = engine in each.engines and kind in each.kinds and asked in each.asked and placed == each.placed
        if matches and each.planned in ("", planned) and (quantized or not each.beside_int8):
            return each.reason
    if placed or arithmetic not in ARITHMETIC.values():
        return UNKNOWN
    return SENSITIVE if quantized else NOT_CHOSEN


def audit_products(products: Sequence[Product], kernels: Sequence[Kernel], engine: str) -> tuple[Product, ...]:
    """Find the kernel of each product, and the reason where it is not what was asked for.

    kernels: of a session that has run; none where the engine reports none, or is not on this machine. Then `runs` stays
    empty, and the reasons are those of the plan.
    """
    quantized = any(each.planned in ARITHMETIC.values() for each in products)
    audited = []
    for each in products:
        # Beside attention's products stands the addition of a mask, which may run in another arithmetic.
        fused = each.names if each.kind == "attention" else (*each.names, f"{each.node.rpartition('/')[0]}/Add")
        kernel = find_kernel(each.node, kernels, fused)
        runs = kernel.precision if kernel else ""
        reason = find_reason(engine, each.kind, each.asked, each.planned, runs, quantized=quantized)
        update = {"runs": runs, "kernel": kernel.kind if kernel else "", "reason": reason}
        audited.append(each.model_copy(update=update))
    return tuple(audited)
