"""PyTorch on the CPU: weights in INT8, arithmetic in FP32 or BF16; the compiler evaluates the weights when it loads.

torch.compile of torch 2.13 takes oneDNN's INT8 products only in the forms that its own quantization writes.
"""

from export.rules import PlacementRules
from laconic.runtimes.runtime import Compute

RULES: dict[Compute, PlacementRules] = dict.fromkeys(
    ("float32", "bfloat16"),
    PlacementRules(
        inputs=frozenset(),
        outputs=frozenset(),
        between=frozenset(),
        fused=frozenset(),
        attention=False,
        normalization=False,
        weight="dequantize",
        instead={"int8": "int8-weight", "int8-dynamic": "int8-weight"},
    ),
)
