"""What quantization decided. It says nothing about how an engine wants it written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from laconic.tensor import Array

Precision = Literal["int8", "int8-dynamic", "int8-weight", "float16-weight", "float32"]
"""How a layer is kept and computed.

int8: weights and activations in INT8, the activations' ranges calibrated. int8-dynamic: the same, with ranges taken
from each input as it comes. int8-weight, float16-weight: weights kept in fewer bits, arithmetic in the engine's float.
float32: as it was.
"""

BITS: dict[Precision, int] = {
    "int8": 8,
    "int8-dynamic": 8,
    "int8-weight": 8,
    "float16-weight": 16,
    "float32": 32,
}
"""Bits per weight."""


@dataclass(frozen=True)
class Range:
    """The interval of a tensor's values that is worth representing."""

    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Factors [channels] float32 that a tensor is divided by before it is quantized, and the weights behind it
    multiplied with; and the range of what they leave."""

    factors: Array
    limits: Range


@dataclass(frozen=True, eq=False)
class Plan:
    """precision: by layer (node name). ranges: by tensor. smoothing: by tensor, for the INT8 layers that read it.
    weights: the initializers that quantization adjusted."""

    precision: Mapping[str, Precision]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    smoothing: Mapping[str, Smoothing] = field(default_factory=dict)
    weights: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Ladder:
    """Flights of plans, the smallest first; the plans of a flight go from the fastest to the most faithful.

    The goal decides how far up to go: the first flight whose last plan meets it, and in that the first plan that does.
    harm: by layer, the infidelity (1 - fidelity, mean over samples) that quantizing this layer alone causes.
    """

    flights: tuple[tuple[Plan, ...], ...]
    harm: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> "Ladder":
        """One plan, and no choice."""
        return cls(((plan,),))
