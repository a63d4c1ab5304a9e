"""ONNX Runtime's CPU kernels: unsigned activations, signed weights; an INT8 convolution needs an INT8 output as well.

With signed activations only a third of the kernels of a ResNet were INT8, and half of MiniLM's.
"""

from export.placements.rules import PlacementRules
from laconic.runtimes.runtime import Compute

RULES: dict[Compute, PlacementRules] = {
    "float32": PlacementRules(
        inputs=frozenset({"MatMul", "Gemm", "Conv"}),
        outputs=frozenset({"Conv"}),
        between=frozenset({"Add", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat"}),
        fused=frozenset({"Relu", "Clip"}),
        attention=False,
        normalization=False,
        # Of a DequantizeLinear before a product it makes MatMulNBits, which in float has 0.6 of the speed of a plain
        # product at batch 1, and 0.9 at batch 8 (MiniLM, AVX2).
        weight="cast",
        int4="blocks",
        int8="cast",
        blocks=frozenset({"int4", "zeros"}),  # 24 times as slow in 8 bits (1.31)
        relu_as_max=True,
        fused_attention=True,
        recurrent=frozenset({"LSTM"}),  # DynamicQuantizeLSTM; there is none for GRU and RNN
    )
}
