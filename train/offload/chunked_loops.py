"""Loops over chunks of a tensor or of a batch, as ordinary iterators that a simulation can shorten.

Numerical code iterates with `chunks` or `micro_batches`, and knows nothing of simulation. A simulator, which wants only
memory and time, visits a sample of the chunks with `sample_chunks`: the peak is that of all of them, and an operation
counts for all the chunks that its own stands for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from train.offload.memory_accounting import count_repeatedly

T = TypeVar("T")

_IS_SAMPLED: ContextVar[bool] = ContextVar("chunks are sampled", default=False)


@contextmanager
def sample_chunks() -> Iterator[None]:
    """Let the loops of the body visit only the chunks that differ from one another."""
    token = _IS_SAMPLED.set(True)
    try:
        yield
    finally:
        _IS_SAMPLED.reset(token)


def chunks(total: int, size: int) -> Iterator[slice]:
    """Yield the slices of at most `size` elements, and at least 1, that cover `range(total)` in order.

    For loops whose iterations do the same work each, on a chunk of their own: a sample is the first. A round must end
    with nothing of its chunk alive: a tensor that a name still holds in the next round is there twice, and a simulation
    of one round does not see it.
    """
    parts = split_range(total, size)
    if _IS_SAMPLED.get() and len(parts) > 1:
        with count_repeatedly(len(parts)):
            yield parts[0]
    else:
        yield from parts


def micro_batches(parts: Sequence[T]) -> Iterator[T]:
    """Yield the parts of a batch in order, for loops that accumulate gradients or outputs over them.

    The first iteration allocates what the others add to, and the last one hands it over: a sample is these and another.
    """
    if _IS_SAMPLED.get() and len(parts) > 3:
        yield parts[0]
        with count_repeatedly(len(parts) - 2):
            yield parts[1]
        yield parts[-1]
    else:
        yield from parts


def split_range(total: int, size: int) -> list[slice]:
    """Return the slices of at most `size` elements, and at least 1, that cover `range(total)` in order."""
    size = max(1, size)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
