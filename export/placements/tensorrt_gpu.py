"""TensorRT 11: strongly typed, so the graph says the precision of every tensor; INT8 is signed and symmetric.

The rules follow NVIDIA's documentation (TensorRT 11 developer guide, "Working with Quantized Types"); no graph of these
rules has been timed on a GPU yet.
"""

from export.placements.rules import HALF_ERROR_PRONE, PlacementRules
from laconic.runtimes.runtime import Compute

HALF = PlacementRules(
    inputs=frozenset({"MatMul", "Gemm", "Conv"}),
    outputs=frozenset(),
    between=frozenset({"Add", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat"}),
    fused=frozenset({"Relu", "Clip", "HardSwish"}),
    # The fused attention kernels are those of FP16 and BF16.
    attention=False,
    normalization=False,
    weight="dequantize",
    int4="dequantize",
    int4_group_size=128,
    signed=True,
    # With Q/DQ between a convolution and the addition after it there are two kernels; with the other input in float as
    # well.
    fused_add=True,
    float8=frozenset({"MatMul"}),
    # There is no dynamic INT8 in its ONNX parser, and INT8 is no type of a table whose rows are looked up.
    instead={"int8-dynamic": "float32", "int8-weight": "float32"},
    explicit=True,
    float32=HALF_ERROR_PRONE,
)

RULES: dict[Compute, PlacementRules] = {"float16": HALF, "bfloat16": HALF}
