"""ONNX Runtime's CUDA kernels: FP16 and BF16, and weights in 4 bits; Q/DQ around an operator is not fused to INT8."""

from export.placements.rules import HALF_ERROR_PRONE, PlacementRules
from laconic.runtimes.runtime import Compute

HALF = PlacementRules(
    inputs=frozenset(),
    outputs=frozenset(),
    between=frozenset(),
    fused=frozenset(),
    attention=False,
    normalization=False,
    weight="dequantize",
    int4="blocks",
    blocks=frozenset({"int4"}),
    # Its CUDA provider registers no QLinearConv, no QLinearMatMul and no fusion of Q/DQ: what is quantized would be
    # dequantized before every run.
    instead=dict.fromkeys(("int8", "int8-dynamic", "int8-weight", "float8"), "float32"),
    explicit=True,
    float32=HALF_ERROR_PRONE,
)

RULES: dict[Compute, PlacementRules] = {"float16": HALF, "bfloat16": HALF}
