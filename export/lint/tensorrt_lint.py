"""Lint an ONNX graph for TensorRT 11: find, without a GPU, what it would refuse, and what would leave 8-bit arithmetic.

A rule is a function that yields problems, and a line in `RULES`. The rules restate NVIDIA's documentation; a graph
without findings has not been built, and may still be refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from export.lint import format_rules, layer_rules, parser_operators, scale_rules, sparsity_rules
from export.lint.lint_graph import LintGraph, Problem, Severity, open_graph

RULES: dict[str, Callable[[LintGraph], Iterator[Problem]]] = {
    "external-data": format_rules.check_external_data,
    "opset": format_rules.check_opset,
    "quantization-opset": format_rules.check_quantization_opset,
    "foreign-domain": parser_operators.check_domains,
    "unknown-operator": parser_operators.check_operators,
    "dynamic-quantization": parser_operators.check_dynamic_quantization,
    "operator-limit": parser_operators.check_limits,
    "data-dependent": parser_operators.check_data_dependence,
    "mixed-types": format_rules.check_mixed_types,
    "fp16-overflow": format_rules.check_overflow,
    "float64": format_rules.check_float64,
    "unnamed-axis": format_rules.check_axes,
    "quantized-type": scale_rules.check_quantized_type,
    "zero-point": scale_rules.check_zero_points,
    "dynamic-scale": scale_rules.check_dynamic_scales,
    "bad-scale": scale_rules.check_scales,
    "scale-mismatch": scale_rules.check_pairs,
    "activation-channels": scale_rules.check_activation_granularity,
    "weight-quantizer": scale_rules.check_weight_quantizers,
    "weight-axis": layer_rules.check_weight_axis,
    "int4-block": scale_rules.check_int4_blocks,
    "half-quantized": layer_rules.check_half_quantized,
    "quantized-bias": layer_rules.check_bias,
    "residual-add": layer_rules.check_residual_additions,
    "sparsity": sparsity_rules.check_sparsity,
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


def count_quantized(path: Path) -> layer_rules.QuantizedCount:
    """Count the linear layers and convolutions of an ONNX file whose two sides are quantized.

    Raises SourceError for a file that is not ONNX.
    """
    return layer_rules.count_layers(open_graph(path))


def count_sparse_layers(path: Path) -> sparsity_rules.SparseCount:
    """Count the linear layers and convolutions of an ONNX file with 2:4 sparse weights.

    Raises SourceError for a file that is not ONNX.
    """
    return sparsity_rules.count_sparse(open_graph(path))
