"""To which account the bytes that are born now go: told by those who know, read by those who count.

On a GPU a tensor's device says on which side it lies. Where host and device are the same memory, and in a simulation,
only who makes a tensor can say; the account says it for both, so that a prediction and a measurement count alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

Side = Literal["device", "host"]
Category = Literal["parameters", "gradients", "optimizer", "activations", "temporaries"]
CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "temporaries")


@dataclass(frozen=True)
class Account:
    """side: where the bytes lie. category: what they are for; None leaves it to the phase of the step. copying: whether
    what happens now is a copy between the two sides."""

    side: Side = "device"
    category: Category | None = None
    copying: bool = False


_PLAIN = Account()
_CURRENT: ContextVar[Account] = ContextVar("account", default=_PLAIN)


def current() -> Account:
    """The account of whatever is born now."""
    return _CURRENT.get()


@contextmanager
def accounted(
    side: Side | None = None, category: Category | None = None, *, copying: bool = False
) -> Iterator[None]:
    """Every tensor that is born in the body goes to this account; what is None stays as it is."""
    now = _CURRENT.get()
    token = _CURRENT.set(replace(now, side=side or now.side, category=category or now.category, copying=copying))
    try:
        yield
    finally:
        _CURRENT.reset(token)
