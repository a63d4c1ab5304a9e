"""Why engines run a product in another arithmetic than was asked for, as data."""

from dataclasses import dataclass

from laconic.runtimes.product import ARITHMETIC

WITH_WEIGHTS = frozenset({"linear", "convolution"})
UNKNOWN = "the engine does not say why"
UNASKED = "the engine does so without being asked"
SENSITIVE = "the plan keeps it in higher precision, as one of the layers whose INT8 costs most fidelity"
NOT_CHOSEN = "the plan that was chosen multiplies nothing in INT8 or FP8"


@dataclass(frozen=True)
class Fallback:
    """One reason.

    engines, kinds: of the engines and products that it holds for. asked: what the recipe asks for. placed: whether the
    placed graph asks the engine for it, which then runs something else; or already the placement leaves it out. reason:
    a clause that follows the name of the product. planned: the arithmetic of the placed graph; empty for any.
    beside_int8: whether it holds only where the plan multiplies other products in INT8.
    """

    engines: frozenset[str]
    kinds: frozenset[str]
    asked: frozenset[str]
    placed: bool
    reason: str
    planned: str = ""
    beside_int8: bool = False


FALLBACKS = (
    Fallback(
        engines=frozenset({"onnxruntime-cuda"}),
        kinds=WITH_WEIGHTS | {"attention"},
        asked=frozenset({"int8", "int8-dynamic", "float8"}),
        placed=False,
        reason="ONNX Runtime's CUDA provider has no INT8 or FP8 kernels for it",
    ),
    Fallback(
        engines=frozenset({"tensorrt"}),
        kinds=WITH_WEIGHTS,
        asked=frozenset({"int8-dynamic"}),
        placed=False,
        reason="TensorRT's ONNX parser knows no dynamic INT8",
    ),
    Fallback(
        engines=frozenset({"tensorrt"}),
        kinds=frozenset({"convolution"}),
        asked=frozenset({"float8"}),
        placed=False,
        reason="FP8 is placed for linear layers alone",
    ),
    Fallback(
        engines=frozenset({"tensorrt"}),
        kinds=frozenset({"attention"}),
        asked=frozenset({"int8", "float8"}),
        placed=False,
        reason="TensorRT's fused attention kernels are those of FP16 and BF16",
        beside_int8=True,
    ),
    Fallback(
        engines=frozenset({"openvino"}),
        kinds=frozenset({"attention"}),
        asked=frozenset({"int8"}),
        placed=False,
        reason="INT8 in attention does not pay beside BF16",
        planned="bfloat16",
        beside_int8=True,
    ),
    Fallback(
        engines=frozenset({"openvino"}),
        kinds=frozenset({"attention"}),
        asked=frozenset({"int8"}),
        placed=False,
        reason=(
            "attention is placed in INT8 only as query times key, an optional mask, Softmax, times value, and where "
            "the goal is met with it"
        ),
        beside_int8=True,
    ),
    Fallback(
        engines=frozenset({"onnxruntime"}),
        kinds=frozenset({"attention"}),
        asked=frozenset({"int8"}),
        placed=False,
        reason="no Q/DQ is placed in attention for ONNX Runtime",
        beside_int8=True,
    ),
    Fallback(
        engines=frozenset({"openvino"}),
        kinds=WITH_WEIGHTS,
        asked=frozenset({"int8-dynamic"}),
        placed=True,
        reason="OpenVINO multiplies dynamically quantized integers (MatMulInteger) in float",
    ),
    Fallback(
        engines=frozenset({"openvino"}),
        kinds=WITH_WEIGHTS | {"attention"},
        asked=frozenset({"int8"}),
        placed=True,
        reason="OpenVINO runs INT8 only with Q/DQ right before an operator of its INT8 list",
    ),
    Fallback(
        engines=frozenset({"openvino"}),
        kinds=WITH_WEIGHTS | {"attention", "recurrent"},
        asked=frozenset({"bfloat16"}),
        placed=True,
        reason="OpenVINO has no BF16 kernel for it on this processor",
    ),
    Fallback(
        engines=frozenset({"onnxruntime"}),
        kinds=frozenset({"convolution"}),
        asked=frozenset({"int8"}),
        placed=True,
        reason="ONNX Runtime's INT8 convolution takes unsigned activations and needs an INT8 output",
    ),
    Fallback(
        engines=frozenset({"onnxruntime"}),
        kinds=frozenset({"linear"}),
        asked=frozenset({"int8"}),
        placed=True,
        reason="ONNX Runtime's INT8 product takes unsigned activations and signed weights",
    ),
    Fallback(
        engines=frozenset({"onnxruntime-cuda", "tensorrt"}),
        kinds=WITH_WEIGHTS | {"attention", "recurrent"},
        asked=frozenset({"float16", "bfloat16"}),
        placed=False,
        reason="its values exceed FP16, so it stays in FP32",
        planned="float32",
    ),
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
