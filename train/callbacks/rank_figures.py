"""The figures of each rank in a step: what it does with its time, and how much it sends."""

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.units import format_bytes, format_percent


@dataclass(frozen=True)
class RankFigures:
    """The figures of a rank in a step.

    busy: share of the time, 0 to 1, in which it computes: the processor time of its thread, or the time with a kernel
    on its GPU, those of collectives included; None where that cannot be read. waited: share without a batch. bubble:
    share of the time in a pipeline in which no stage of the rank runs; None without one. sent: bytes to other ranks.
    """

    busy: float | None
    waited: float
    bubble: float | None
    sent: int


def describe_ranks(ranks: Sequence[RankFigures]) -> list[str]:
    """Describe the ranks of a step for the progress line: the idlest and the busiest, the largest bubble, and what the
    one that sends the most sends."""
    busy = [rank.busy for rank in ranks if rank.busy is not None]
    bubbles = [rank.bubble for rank in ranks if rank.bubble is not None]
    return [
        *([f"busy {format_percent(min(busy))} to {format_percent(max(busy))}"] if busy else []),
        *([f"bubble {format_percent(max(bubbles))}"] if bubbles else []),
        *([f"sends {format_bytes(max(rank.sent for rank in ranks))}"] if ranks else []),
    ]
