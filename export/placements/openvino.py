"""OpenVINO's CPU plug-in: unsigned activations in front of every INT8 operator, results in float."""

from export.rules import Rules

RULES = Rules(
    symmetric=False,
    inputs=frozenset({"MatMul", "Gemm", "Conv"}),
    outputs=frozenset(),
    between=frozenset({"Add", "MaxPool", "AveragePool", "Concat"}),
    merged=frozenset({"Relu", "Clip", "HardSwish"}),
)
