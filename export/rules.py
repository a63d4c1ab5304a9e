"""Placement rules: what an engine needs to run a graph in INT8, as data, per engine and compute precision."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlacementRules:
    """Where Q/DQ pairs are placed, and how weights are written.

    Quantized activations are unsigned and asymmetric. inputs: operators with weights whose input is quantized, so that
    they run in INT8. outputs: operators with weights whose output is quantized too, as the engine's INT8 kernel has no
    float output. between: operators without weights that run in INT8 where all their inputs are outputs of such
    operators. fused: operators that the engine fuses into their producer, so that the output is quantized after them.
    attention: whether the matrix products of attention run in INT8, signed and symmetric. normalization: whether a
    smoothed activation is best computed by a second LayerNormalization. weight: how a weight in 8 bits is dequantized
    for float arithmetic: by DequantizeLinear, or by casts that the engine computes once when it loads. int4: the same
    for 4 bits: an operator that reads blocks, or casts; None where the engine reads no such weight.
    """

    inputs: frozenset[str]
    outputs: frozenset[str]
    between: frozenset[str]
    fused: frozenset[str]
    attention: bool
    normalization: bool
    weight: Literal["dequantize", "cast"]
    int4: Literal["blocks", "cast"] | None = None
