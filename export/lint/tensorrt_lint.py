"""Lint an ONNX graph for TensorRT 11: find, without a GPU, what it would refuse, and what would leave 8-bit arithmetic.

A rule is a function that yields problems, and a line in `RULES`. The rules restate NVIDIA's documentation; a graph
without findings has not been built, and may still be refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from export.lint.format_rules import (
    check_axes,
    check_external_data,
    check_float64,
    check_mixed_types,
    check_opset,
    check_overflow,
    check_quantization_opset,
)
from export.lint.layer_rules import (
    QuantizedCount,
    check_bias,
    check_half_quantized,
    check_residual_additions,
    check_weight_axis,
    count_layers,
)
from export.lint.lint_graph import LintGraph, Problem, Severity, open_graph
from export.lint.parser_operators import (
    check_data_dependence,
    check_domains,
    check_dynamic_quantization,
    check_limits,
    check_operators,
)
from export.lint.scale_rules import (
    check_activation_granularity,
    check_dynamic_scales,
    check_int4_blocks,
    check_pairs,
    check_quantized_type,
    check_scales,
    check_weight_quantizers,
    check_zero_points,
)
from export.lint.sparsity_rules import SparseCount, check_sparsity, count_sparse

RULES: dict[str, Callable[[LintGraph], Iterator[Problem]]] = {
    "external-data": check_external_data,
    "opset": check_opset,
    "quantization-opset": check_quantization_opset,
    "foreign-domain": check_domains,
    "unknown-operator": check_operators,
    "dynamic-quantization": check_dynamic_quantization,
    "operator-limit": check_limits,
    "data-dependent": check_data_dependence,
    "mixed-types": check_mixed_types,
    "fp16-overflow": check_overflow,
    "float64": check_float64,
    "unnamed-axis": check_axes,
    "quantized-type": check_quantized_type,
    "zero-point": check_zero_points,
    "dynamic-scale": check_dynamic_scales,
    "bad-scale": check_scales,
    "scale-mismatch": check_pairs,
    "activation-channels": check_activation_granularity,
    "weight-quantizer": check_weight_quantizers,
    "weight-axis": check_weight_axis,
    "int4-block": check_int4_blocks,
    "half-quantized": check_half_quantized,
    "quantized-bias": check_bias,
    "residual-add": check_residual_additions,
    "sparsity": check_sparsity,
}
"""The rules by name, in the order in which findings are listed."""


@dataclass(frozen=True)
class LintFinding:
    """What a rule found. node: the node, tensor or file that it is about; empty for the model as a whole."""

    rule: str
    severity: Severity
    node: str
    message: str


def lint_tensorrt(path: Path) -> list[LintFinding]:
    """Lint an ONNX file for TensorRT 11 on a GPU. Raises SourceError for a file that is not ONNX."""
    graph = open_graph(path)
    return [
        LintFinding(rule, severity, node, message)
        for rule, check in RULES.items()
        for severity, node, message in check(graph)
    ]


def count_quantized(path: Path) -> QuantizedCount:
    """Count the linear layers and convolutions of an ONNX file whose two sides are quantized.

    Raises SourceError for a file that is not ONNX.
    """
    return count_layers(open_graph(path))


def count_sparse_layers(path: Path) -> SparseCount:
    """Count the linear layers and convolutions of an ONNX file with 2:4 sparse weights.

    Raises SourceError for a file that is not ONNX.
    """
    return count_sparse(open_graph(path))
