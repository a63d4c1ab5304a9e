"""To which account the bytes that are born now go: told by those who know, read by those who count.

On a GPU a tensor's device says on which side it lies. Where host and device are the same memory, and in a simulation,
only who makes a tensor can say; the account says it for both, so that a prediction and a measurement count alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

T = TypeVar("T")

Side = Literal["device", "host"]
Category = Literal["parameters", "gradients", "optimizer", "activations", "temporaries"]
CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "temporaries")


@dataclass(frozen=True)
class Account:
    """side: where the bytes lie. category: what they are for; None leaves it to the phase of the step. copying: whether
    what happens now is a copy between the two sides. simulated: whether nothing is computed, and memory and time alone
    are wanted. times: how often what happens now would happen."""

    side: Side = "device"
    category: Category | None = None
    copying: bool = False
    simulated: bool = False
    times: int = 1


_PLAIN = Account()
_CURRENT: ContextVar[Account] = ContextVar("account", default=_PLAIN)


def current() -> Account:
    """The account of whatever is born now."""
    return _CURRENT.get()


@contextmanager
def accounted(side: Side | None = None, category: Category | None = None, *, copying: bool = False) -> Iterator[None]:
    """Every tensor that is born in the body goes to this account; what is None stays as it is."""
    now = _CURRENT.get()
    token = _CURRENT.set(replace(now, side=side or now.side, category=category or now.category, copying=copying))
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def simulating() -> Iterator[None]:
    """Nothing is computed in the body, so that repetitions may be left out."""
    token = _CURRENT.set(replace(_CURRENT.get(), simulated=True))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def alike(items: Sequence[T]) -> Iterator[T]:
    """The items of a loop whose rounds take the same memory and the same time: a simulation goes round once, and counts
    that for all."""
    if not _CURRENT.get().simulated or len(items) < 2:
        yield from items
        return
    with _repeated(len(items)):
        yield items[0]


def reduced(items: Sequence[T]) -> list[T]:
    """The items of a loop whose first and last rounds are unlike the others: in a simulation the first, the second and
    the last of them."""
    few = _CURRENT.get().simulated and len(items) > 3
    return [items[0], items[1], items[-1]] if few else list(items)


def among(few: Sequence[T], count: int) -> Iterator[T]:
    """What `reduced` has left of `count` items; the second counts for all that are left out."""
    for number, item in enumerate(few):
        if number == 1 and count > len(few):
            with _repeated(count - len(few) + 1):
                yield item
        else:
            yield item


@contextmanager
def _repeated(times: int) -> Iterator[None]:
    """What happens in the body would happen so often."""
    now = _CURRENT.get()
    token = _CURRENT.set(replace(now, times=now.times * times))
    try:
        yield
    finally:
        _CURRENT.reset(token)
