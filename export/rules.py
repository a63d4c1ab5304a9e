"""What an engine needs to run a graph in INT8: rules as data, one set per engine and arithmetic."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rules:
    """Where Q/DQ goes, and how weights are written.

    Quantized activations are unsigned with any zero point. inputs: operators with weights whose input is quantized, so
    that they run in INT8. outputs: operators with weights whose result is quantized too, since the engine's INT8 kernel
    has no float result. between: operators without weights that run in INT8 where all that goes into them is the result
    of such operators. merged: operators that the engine merges into the one before, so that a result is quantized
    behind them. attention: whether the products of attention run in INT8, signed and symmetric. normalization: whether
    a smoothed activation is best made by a second LayerNormalization. weight: how a weight of 8 bits is widened for
    float arithmetic: by DequantizeLinear, or by casts that the engine computes once, when it loads. four_bits: the same
    for 4 bits: an operator that reads blocks of them, or casts; None where the engine reads no such weight.
    """

    inputs: frozenset[str]
    outputs: frozenset[str]
    between: frozenset[str]
    merged: frozenset[str]
    attention: bool
    normalization: bool
    weight: Literal["dequantize", "cast"]
    four_bits: Literal["blocks", "cast"] | None = None
