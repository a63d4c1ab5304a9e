"""OpenVINO's CPU plug-in: unsigned activations before every INT8 operator, float outputs."""

from dataclasses import replace

from export.placements.rules import PlacementRules
from laconic.runtimes.runtime import Compute

FLOAT32 = PlacementRules(
    inputs=frozenset({"MatMul", "Gemm", "Conv"}),
    outputs=frozenset(),
    between=frozenset({"Add", "MaxPool", "AveragePool", "Concat"}),
    fused=frozenset({"Relu", "Clip", "HardSwish"}),
    # With FP32 elsewhere, attention in INT8 costs MiniLM 0.0005 of its mean cosine and makes its outputs independent of
    # the batch to the last bit; unsigned, it is slower than in float.
    attention=True,
    normalization=True,
    # For a weight that may stay compressed, the engine also quantizes the activations, group by group, without being
    # asked and without reporting it.
    weight="cast",
    int4="cast",
    int8="cast",
    blocks=frozenset({"int4", "int8", "zeros"}),
)

RULES: dict[Compute, PlacementRules] = {
    "float32": FLOAT32,
    "bfloat16": replace(FLOAT32, attention=False),
    "int8-dynamic": FLOAT32,
}
