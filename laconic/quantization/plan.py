"""What quantization decided. It says nothing about how an engine wants it written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from laconic.tensor import Array

Precision = Literal["int4-weight", "int8", "int8-dynamic", "int8-weight", "float16-weight", "float32"]
"""How a layer is kept and computed.

int8: weights and activations in INT8, the activations' ranges calibrated. int8-dynamic: the same, with ranges taken
from each input as it comes. int4-weight, int8-weight, float16-weight: weights kept in fewer bits, arithmetic in the
engine's float. float32: as it was.
"""

BITS: dict[Precision, int] = {
    "int4-weight": 4,
    "int8": 8,
    "int8-dynamic": 8,
    "int8-weight": 8,
    "float16-weight": 16,
    "float32": 32,
}
"""Bits per weight."""

INTEGER: frozenset[Precision] = frozenset({"int8", "int8-dynamic"})
"""What is computed in integers."""


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
class Rounded:
    """A layer's weight as quantization rounded it, for one precision: what is written is exactly this.

    integers: int8, of the weight's shape. scales: float32, [groups of inputs, output channels]. shift: what is added to
    the layer's result, [output channels] float32, so that its mean stays; only where the layer adds something anyway.
    group: inputs that share a scale, a power of two; None: all of them.
    """

    integers: Array
    scales: Array
    shift: Array | None = None
    group: int | None = None

    @property
    def arrays(self) -> dict[str, Array]:
        """Its arrays, by name."""
        found = {"integers": self.integers, "scales": self.scales}
        return found if self.shift is None else {**found, "shift": self.shift}


@dataclass(frozen=True, eq=False)
class Plan:
    """precision: by layer (node name). ranges: by tensor. smoothing: by tensor, for the INT8 layers that read it.
    weights: by layer and the precision that they are for; a weight that is not there is rounded to the nearest."""

    precision: Mapping[str, Precision]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    smoothing: Mapping[str, Smoothing] = field(default_factory=dict)
    weights: Mapping[tuple[str, Precision], Rounded] = field(default_factory=dict)


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
