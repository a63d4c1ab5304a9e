"""OpenVINO's CPU plug-in: unsigned activations in front of every INT8 operator, results in float."""

from dataclasses import replace

from export.rules import Rules
from laconic.runtimes.runtime import Compute

FLOAT32 = Rules(
    inputs=frozenset({"MatMul", "Gemm", "Conv"}),
    outputs=frozenset(),
    between=frozenset({"Add", "MaxPool", "AveragePool", "Concat"}),
    merged=frozenset({"Relu", "Clip", "HardSwish"}),
    # In INT8 beside FP32 attention costs MiniLM 0.0005 of its mean cosine and makes its answers independent of the
    # batch to the last bit; unsigned, it is slower than in float.
    attention=True,
    normalization=True,
    # Of a weight that it may keep compressed the engine quantizes the activations too, group by group and unasked, and
    # does not tell.
    weight="cast",
    four_bits="cast",
)

RULES: dict[Compute, Rules] = {"float32": FLOAT32, "bfloat16": replace(FLOAT32, attention=False)}
