"""Simulated loops visit only the chunks that differ from one another, and count one for all that are like it."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from train.offload.chunked_loops import ChunkIteration
from train.offload.memory_accounting import count_repeatedly

T = TypeVar("T")


class SampledIteration(ChunkIteration):
    """Visits a sample of the chunks. Peak memory is that of all of them; operations are counted with their number."""

    def uniform(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the first item, counted for all."""
        if len(items) < 2:
            yield from items
            return
        with count_repeatedly(len(items)):
            yield items[0]

    def accumulating(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the first item, the second, counted for all but the first and the last, and the last."""
        if len(items) <= 3:
            yield from items
            return
        yield items[0]
        with count_repeatedly(len(items) - 2):
            yield items[1]
        yield items[-1]
