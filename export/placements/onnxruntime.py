"""ONNX Runtime's CPU kernels: unsigned activations, signed weights; an INT8 convolution needs an INT8 result as well.

With signed activations only a third of the kernels of a ResNet were INT8, and they ran at a twelfth of the speed.
"""

from export.rules import Rules

RULES = Rules(
    symmetric=False,
    inputs=frozenset({"MatMul", "Gemm", "Conv"}),
    outputs=frozenset({"Conv"}),
    between=frozenset({"Add", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat"}),
    merged=frozenset({"Relu", "Clip"}),
)
