"""Memory accounting: on which side, and in which category, newly allocated tensors are counted.

On a GPU a tensor's device says on which side it lies. Where host and device share one memory, and in a simulation on
fake tensors, only the code that allocates a tensor can tell. It does so with `account_as`, and whoever counts bytes or
operations reads `current_account`, so that a prediction and a measurement count alike.
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
    """How allocations and operations are counted at present.

    side: where the bytes lie. category: what they are for; None leaves it to the phase of the step. copying: whether
    the operations are copies between the two sides. times: how many executions each operation stands for.
    """

    side: Side = "device"
    category: Category | None = None
    copying: bool = False
    times: int = 1


_DEFAULT = Account()
_CURRENT: ContextVar[Account] = ContextVar("account", default=_DEFAULT)


def current_account() -> Account:
    """Return the account that an allocation or an operation of this moment belongs to."""
    return _CURRENT.get()


@contextmanager
def account_as(side: Side | None = None, category: Category | None = None, *, copying: bool = False) -> Iterator[None]:
    """Count every tensor that is allocated in the body on this side and in this category; None leaves either as is."""
    now = _CURRENT.get()
    with _account(replace(now, side=side or now.side, category=category or now.category, copying=copying)):
        yield


@contextmanager
def count_repeatedly(times: int) -> Iterator[None]:
    """Count every operation of the body as executed `times` times."""
    now = _CURRENT.get()
    with _account(replace(now, times=now.times * times)):
        yield


@contextmanager
def _account(account: Account) -> Iterator[None]:
    token = _CURRENT.set(account)
    try:
        yield
    finally:
        _CURRENT.reset(token)
