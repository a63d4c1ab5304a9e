"""Activation ranges learned by quantization-aware training, read from a checkpoint's history."""

from collections.abc import Sequence

from laconic.artifacts.record import Record
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Range

RANGES = "ranges"
"""The key in a record's structure: [low, high] of each layer's input, by the layer's path."""


def read_learned_ranges(history: Sequence[Record], layers: Sequence[Layer]) -> dict[str, Range]:
    """The learned ranges of the layers' inputs, by tensor, from the last training in the history.

    Where several layers read a tensor, the union of their ranges.
    """
    records = [record.structure[RANGES] for record in history if RANGES in record.structure]
    learned: dict[str, tuple[float, float]] = records[-1] if records else {}
    found: dict[str, Range] = {}
    for layer in layers:
        if layer.module in learned:
            low, high = learned[layer.module]
            other = found.get(layer.input, Range(low, high))
            found[layer.input] = Range(min(low, other.low), max(high, other.high))
    return found
