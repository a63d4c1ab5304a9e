"""Loops over chunks of a tensor or of a batch, as ordinary iterators that a simulation can shorten.

Numerical code iterates with `chunks` or `micro_batches` and knows nothing of simulation. A simulator, which wants only
memory and time, installs a `ChunkIteration` of its own with `iterate_with`, for instance one that visits a sample of
the chunks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class ChunkIteration:
    """Visits every chunk in order, as any computation of values must."""

    def uniform(self, items: Sequence[T]) -> Iterator[T]:
        """Iterate over items that all take the same memory and the same time."""
        return iter(items)

    def accumulating(self, items: Sequence[T]) -> Iterator[T]:
        """Iterate over items of which the first allocates what the others add to, and the last hands it over."""
        return iter(items)


_EVERY_CHUNK = ChunkIteration()
_ITERATION: ContextVar[ChunkIteration] = ContextVar("chunk iteration", default=_EVERY_CHUNK)


@contextmanager
def iterate_with(iteration: ChunkIteration) -> Iterator[None]:
    """Let the loops of the body be iterated by `iteration`."""
    token = _ITERATION.set(iteration)
    try:
        yield
    finally:
        _ITERATION.reset(token)


def chunks(total: int, size: int) -> Iterator[slice]:
    """Yield the slices of at most `size` elements, and at least 1, that cover `range(total)` in order.

    For loops whose iterations do the same work each, on a chunk of their own. A round must end with nothing of its
    chunk alive: a tensor that a name still holds in the next round is there twice, and a simulation of one round does
    not see it.
    """
    return _ITERATION.get().uniform(split_range(total, size))


def micro_batches(parts: Sequence[T]) -> Iterator[T]:
    """Yield the parts of a batch in order, for loops that accumulate gradients or outputs over them."""
    return _ITERATION.get().accumulating(parts)


def split_range(total: int, size: int) -> list[slice]:
    """Return the slices of at most `size` elements, and at least 1, that cover `range(total)` in order."""
    size = max(1, size)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
