"""Placement rules: what an engine needs to run a graph in low precision, as data, per engine and compute precision."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from laconic.errors import UnsupportedPrecision
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import HALF, Bits, Form, Plan, Precision, QuantizedWeight
from laconic.quantization.qparams import DEFAULT_GROUP_SIZE
from laconic.runtimes.runtime import Compute

BlockKind = Literal["int4", "int8", "zeros"]
"""Weights in blocks: in 4 or 8 bits, symmetric; and in 4 bits with zeros."""

HALF_ERROR_PRONE = frozenset({"Pow", "ReduceL2", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Sqrt"})
"""Operators that sum or multiply many values, and lose most in half precision."""


@dataclass(frozen=True)
class PlacementRules:
    """Where Q/DQ pairs are placed, and how weights are written.

    inputs: operators with weights whose input is quantized, so that they run in INT8 or FP8. outputs: operators with
    weights whose output is quantized too, as the engine's INT8 kernel has no float output. between: operators without
    weights that run in INT8 where all their inputs are outputs of such operators. fused: operators that the engine
    fuses into their producer, so that the output is quantized after them. attention: whether the matrix products of
    attention run in INT8, signed and symmetric. normalization: whether a smoothed activation is best computed by a
    second LayerNormalization. weight: how a weight in 8 bits is dequantized for float arithmetic: by DequantizeLinear,
    or by casts that the engine computes once when it loads. int4: the same for 4 bits: an operator that reads blocks,
    blocked DequantizeLinear, or casts; None where the engine reads no such weight. int4_group_size: inputs that share a
    scale there, where a plan does not say. int8: the same for 8 bits with a scale for each group of inputs. blocks:
    kinds of weights that the engine is fast to multiply with as they are stored.

    signed: whether quantized activations are signed and symmetric, else unsigned and asymmetric. fused_add: whether a
    convolution takes an addition after it into its kernel, so that only the other input is quantized. float8:
    operators that run in FP8. instead: for a precision that the engine has no kernels for, the one that its layers get.
    relu_as_max: whether the engine runs a product without a bias in float where a Relu reads it, so that Max takes the
    Relu's place. explicit: whether the graph itself must be in the arithmetic of the layers that are not quantized,
    since the engine does not choose it; float32: operators that stay in FP32 then. fused_attention: whether attention
    is written as the operator MultiHeadAttention. recurrent: recurrent layers that run in dynamic INT8.
    """

    inputs: frozenset[str]
    outputs: frozenset[str]
    between: frozenset[str]
    fused: frozenset[str]
    attention: bool
    normalization: bool
    weight: Literal["dequantize", "cast"]
    int4: Form | None = None
    int4_group_size: int = DEFAULT_GROUP_SIZE
    int8: Form | None = None
    blocks: frozenset[BlockKind] = frozenset()
    signed: bool = False
    fused_add: bool = False
    float8: frozenset[str] = frozenset()
    instead: Mapping[Precision, Precision] = field(default_factory=dict)
    relu_as_max: bool = False
    explicit: bool = False
    float32: frozenset[str] = frozenset()
    fused_attention: bool = False
    recurrent: frozenset[str] = frozenset()

    def precision_of(self, layer: Layer, precision: Precision, compute: Compute) -> Precision:
        """Return the precision that a layer gets in this engine where a plan asks for `precision`.

        compute: the arithmetic of the layers that are not quantized. Raises UnsupportedPrecision for FP8 in an engine
        without it.
        """
        kept = self.instead.get(precision, precision)
        if layer.stored:
            kept = self.precision_of_stored(layer, kept)
        if kept == "int4-weight" and self.int4 == "dequantize" and layer.shape[0] % self.int4_group_size:
            kept = "float32"  # a block may not reach beyond the last input
        if kept == "float8" and layer.kind not in self.float8:
            if not self.float8:
                raise UnsupportedPrecision(
                    f"{layer.module} was to run in FP8, and this engine has no kernels for it. Try --target tensorrt, "
                    f"or INT8 (quantize.static: dtype: int8)"
                )
            kept = "float32"
        return HALF_OF.get(compute, kept) if self.explicit and kept in NOT_QUANTIZED else kept

    def form_of(self, weight: QuantizedWeight, bits: Bits) -> Form | None:
        """Return how a weight whose groups of inputs have scales is written: as casts in place of blocks that the
        engine would be slow to multiply with."""
        form = self.int4 if bits == 4 else self.int8
        kind: BlockKind = "int8" if bits == 8 else "int4" if weight.zeros is None else "zeros"
        return "cast" if form == "blocks" and kind not in self.blocks else form

    def precision_of_stored(self, layer: Layer, precision: Precision) -> Precision:
        """Return the precision that a layer gets here whose arithmetic stays in float elsewhere."""
        if precision == "int8-dynamic" and layer.kind in self.recurrent and len(layer.stored) == 2:
            return precision
        return "int8-weight" if precision in BELOW_HALF else precision


BELOW_HALF: frozenset[Precision] = frozenset({"int4-weight", "int8", "int8-dynamic", "float8"})
"""Precisions in place of which a weight that is stored alone has 8 bits."""

HALF_OF: Mapping[Compute, Precision] = {"float16": "float16-weight", "bfloat16": "bfloat16-weight"}
"""The precision of a weight in the arithmetic of the layers that are not quantized."""

NOT_QUANTIZED: frozenset[Precision] = HALF | {"float32"}


def keep_compressed(rules: PlacementRules) -> PlacementRules:
    """Return the rules for a language model: each token reads all weights, so that they stay compressed in memory; and
    attention stays whole, for engines that keep its keys and values in pages."""
    return replace(rules, weight="dequantize", int4="blocks", int8="blocks", attention=False, fused_attention=False)


def adapt_plan(
    graph: Graph, plan: Plan, rules: PlacementRules, compute: Compute, overflow: Collection[str] = ()
) -> Plan:
    """Return the plan with the precisions that the engine of `rules` has kernels for.

    overflow: tensors that exceed FP16; weights among them stay in FP32.
    """
    layers = {layer.node: layer for layer in graph.layers}
    precision = {node: rules.precision_of(layers[node], each, compute) for node, each in plan.precision.items()}
    precision |= {
        node: "float32" for node, each in precision.items() if each in HALF and layers[node].weight in overflow
    }
    return replace(plan, precision=precision)
