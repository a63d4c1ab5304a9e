"""PyTorch on a GPU: FP16 and BF16 as the graph is typed; torch.compile of torch 2.13 makes no INT8 of Q/DQ there."""

from export.rules import HALF_ERROR_PRONE, PlacementRules
from laconic.runtimes.runtime import Compute

RULES: dict[Compute, PlacementRules] = dict.fromkeys(
    ("float16", "bfloat16"),
    PlacementRules(
        inputs=frozenset(),
        outputs=frozenset(),
        between=frozenset(),
        fused=frozenset(),
        attention=False,
        normalization=False,
        weight="dequantize",
        instead=dict.fromkeys(("int8", "int8-dynamic", "int8-weight", "float8"), "float32"),
        explicit=True,
        float32=HALF_ERROR_PRONE,
    ),
)
