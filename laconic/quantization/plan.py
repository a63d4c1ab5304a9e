"""The result of quantization: the precision of each layer and its parameters, independent of the engine."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, overload

from laconic.arrays import Array

Precision = Literal[
    "int4-weight", "int8", "int8-dynamic", "int8-weight", "float8", "float16-weight", "bfloat16-weight", "float32"
]
"""How a layer is stored and computed.

int8, float8: weights and activations in INT8, or in FP8 (E4M3), with calibrated activation ranges. int8-dynamic: INT8
with ranges from each input at run time. int4-weight, int8-weight, float16-weight, bfloat16-weight: weight-only
quantization, arithmetic in the engine's float. float32: not quantized.
"""

BITS: dict[Precision, int] = {
    "int4-weight": 4,
    "int8": 8,
    "int8-dynamic": 8,
    "int8-weight": 8,
    "float8": 8,
    "float16-weight": 16,
    "bfloat16-weight": 16,
    "float32": 32,
}
"""Bits per weight."""

INTEGER: frozenset[Precision] = frozenset({"int8", "int8-dynamic"})
"""Precisions with integer arithmetic."""

HALF: frozenset[Precision] = frozenset({"float16-weight", "bfloat16-weight"})
"""Precisions whose weights have 16 bits."""


@dataclass(frozen=True)
class Range:
    """The interval of a tensor's values that is represented; values outside are clipped."""

    low: float
    high: float


Bits = Literal[4, 8]
"""The bits of weights whose groups of inputs have a scale each."""
Form = Literal["blocks", "dequantize", "cast"]
"""How such weights are written: as an operator that reads them, by DequantizeLinear, or by casts."""


@dataclass(frozen=True, eq=False)
class Smoothing:
    """SmoothQuant or AWQ of a tensor.

    factors: [channels] float32; the tensor is divided by them, and the weights that read it are multiplied with them.
    limits: the range of the quotient, where layers read it in INT8.
    """

    factors: Array
    limits: Range = Range(0.0, 0.0)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A layer's quantized weight for one precision, written exactly as it is here.

    integers: int8, of the weight's shape. scales: float32, [groups of inputs, output channels]. bias_correction: added
    to the layer's output so that its mean stays, [output channels] float32; only where the layer has a bias.
    group_size: inputs that share a scale, a power of two; None: all of them. zeros: what is taken from the integers
    before they are scaled, as the scales; None: nothing. The inputs of an embedding are its columns, and its rows are
    the output channels.
    """

    integers: Array
    scales: Array
    bias_correction: Array | None = None
    group_size: int | None = None
    zeros: Array | None = None

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by name."""
        arrays = {"integers": self.integers, "scales": self.scales}
        others = {"bias_correction": self.bias_correction, "zeros": self.zeros}
        return arrays | {name: array for name, array in others.items() if array is not None}


@dataclass(frozen=True, eq=False)
class Plan:
    """The quantization of a graph.

    precision: by layer (node name). ranges: of activations, by tensor. smoothing: by tensor, for the layers that read
    it in INT8, or with weights in 4 bits. weights: by layer and the precision that they are for; weights without an
    entry are rounded to nearest. attention: whether the products of attention may run in INT8 beside INT8 layers, in an
    engine that gains by it. int8_kv_cache: whether a language model keeps keys and values in 8 bits; int4_value_cache:
    and of these the values in 4.
    """

    precision: Mapping[str, Precision]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    smoothing: Mapping[str, Smoothing] = field(default_factory=dict)
    weights: Mapping[tuple[str, Precision], QuantizedWeight] = field(default_factory=dict)
    attention: bool = True
    int8_kv_cache: bool = False
    int4_value_cache: bool = False


@dataclass(frozen=True)
class PrecisionLadder:
    """Plans in order of precision, for the search for the fastest one that meets the goal.

    rungs: groups of plans, from the smallest to the largest model; within a rung from the fastest plan to the one with
    the highest fidelity. The first rung whose last plan meets the goal is taken, and of it the first plan that does.
    sensitivity: by layer, the mean divergence of outputs when this layer alone is quantized; empty as long as no plan
    needed it.
    """

    rungs: tuple[Sequence[Plan], ...]
    sensitivity: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> "PrecisionLadder":
        """Return a ladder of a single plan."""
        return cls(((plan,),))

    def keep_in_float(self, nodes: Collection[str]) -> "PrecisionLadder":
        """Return the ladder with these layers in float in each plan."""
        change = partial(keep_in_float, nodes=frozenset(nodes))
        return replace(self, rungs=tuple(ChangedRung(rung, change) for rung in self.rungs))

    def with_rounded_cache(self, *, int8: bool = True, int4_values: bool = False) -> "PrecisionLadder":
        """Return the ladder with each rung first with keys in 8 bits and values in 4, then with both in 8, as far as
        these are asked for, then as it is."""
        changes = [partial(replace, int8_kv_cache=True, int4_value_cache=True)] if int4_values else []
        changes += [partial(replace, int8_kv_cache=True)] if int8 else []
        rungs = [each for rung in self.rungs for each in (*(ChangedRung(rung, change) for change in changes), rung)]
        return replace(self, rungs=tuple(rungs))


def name_cache(int8_kv_cache: bool, int4_value_cache: bool) -> str:
    """Name the arithmetic of keys and values, for people to read; empty where they are in float."""
    if int4_value_cache:
        return "INT8 key cache, INT4 value cache"
    return "INT8 KV cache" if int8_kv_cache else ""


def keep_in_float(plan: Plan, nodes: Collection[str]) -> Plan:
    """Return a plan with some layers in float."""
    return replace(plan, precision={**plan.precision, **dict.fromkeys(nodes, "float32")})


@dataclass(frozen=True)
class ChangedRung(Sequence[Plan]):
    """A rung whose plans are changed alike. A plan is asked for only when it is read, which may measure
    sensitivities."""

    rung: Sequence[Plan]
    change: Callable[[Plan], Plan]

    def __len__(self) -> int:
        return len(self.rung)

    @overload
    def __getitem__(self, index: int) -> Plan: ...

    @overload
    def __getitem__(self, index: slice) -> "ChangedRung": ...

    def __getitem__(self, index: int | slice) -> "Plan | ChangedRung":
        return replace(self, rung=self.rung[index]) if isinstance(index, slice) else self.change(self.rung[index])
