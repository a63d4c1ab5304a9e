"""What an engine needs to run a graph in INT8: rules as data, one set per engine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Where Q/DQ goes for one engine.

    symmetric: whether quantized activations are signed with zero point 0; else they are unsigned with any zero point.
    inputs: operators with weights whose input is quantized, so that they run in INT8. outputs: operators with weights
    whose result is quantized too, since the engine's INT8 kernel has no float result. between: operators without
    weights that run in INT8 where all that goes into them is the result of such operators. merged: operators that the
    engine merges into the one before, so that a result is quantized behind them.
    """

    symmetric: bool
    inputs: frozenset[str]
    outputs: frozenset[str]
    between: frozenset[str]
    merged: frozenset[str]
