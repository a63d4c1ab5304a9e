"""How fast a device is, measured on it: what a product of matrices, a pass over memory and a copy cost, by size."""

import time
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import hash_of

SIDES = {"cpu": (32, 128, 512, 1536), "cuda": (128, 512, 2048, 8192)}
"""Of the square matrices that are multiplied."""
BYTES = {"cpu": (2**14, 2**20, 2**24, 2**28), "cuda": (2**16, 2**22, 2**26, 2**30)}
"""Of the arrays that are passed over, and copied between host and device."""
SECONDS, TIMES = 0.05, 5
"""How long and how often each is repeated, at least; the best of the repetitions counts."""
WEIGHT = (1024, 1024)
"""Of the parameter that optimizers are timed on."""
PASSED = 2**24
"""Bytes of the array that is passed over in turns with them."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Curve(BaseModel):
    """Seconds by the amount of work, measured at a few amounts, interpolated in logarithms between them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, amount: float) -> float:
        """Seconds for this much work; below the least that was measured it costs no less, above it grows in step."""
        if amount <= self.amounts[0]:
            return self.seconds[0]
        if amount >= self.amounts[-1]:
            return self.seconds[-1] * amount / self.amounts[-1]
        return float(np.exp(np.interp(np.log(amount), np.log(self.amounts), np.log(self.seconds))))


class Rates(BaseModel):
    """What a device was measured to do. products: seconds by floating-point operations, by dtype. passes: seconds by
    bytes read and written. copies: seconds by bytes, between host and device. host: the same of the processor beside
    it; None where the device is the processor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["cpu", "cuda"]
    products: dict[str, Curve]
    passes: Curve
    copies: Curve
    host: "Rates | None" = None


def measure(device: torch.device, cache: Cache | None = None) -> Rates:
    """The rates of a device, from the cache where this machine was measured before. Takes a second or two."""
    machine = this_machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.processor
    key = hash_of("rates", 3, machine.model_dump(), name, torch.get_num_threads(), torch.__version__)
    content = (cache or Cache()).json(f"rates-{key}", lambda: _measure(device, name).model_dump())
    return Rates.model_validate(content)


def _measure(device: torch.device, name: str) -> Rates:
    products = {}
    for label, dtype in DTYPES.items():
        if device.type == "cpu" and dtype is torch.float16:
            continue  # no CPU multiplies FP16 fast enough to be worth a second of measuring
        products[label] = curve(
            device,
            SIDES[device.type],
            partial(square, dtype, device),
            lambda a: a @ a,
            amount=lambda side: 2.0 * side**3,
        )
    passes = curve(
        device,
        BYTES[device.type],
        lambda size: (torch.ones(size // 4, device=device),),
        lambda a: a * 1.5,
        amount=lambda size: 2.0 * size,
    )
    copies = curve(
        device,
        BYTES[device.type],
        lambda size: (torch.ones(size // 4, pin_memory=device.type == "cuda"),),
        lambda a: a.to(device, copy=True),
        amount=float,
    )
    host = measure(torch.device("cpu")) if device.type == "cuda" else None
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return Rates(name=name, kind=kind, products=products, passes=passes, copies=copies, host=host)


def square(dtype: torch.dtype, device: torch.device, side: int) -> tuple[Tensor, ...]:
    """A matrix to multiply by itself."""
    return (torch.ones(side, side, dtype=dtype, device=device),)


def curve(
    device: torch.device,
    sizes: tuple[int, ...],
    make: Callable[[int], tuple[Tensor, ...]],
    work: Callable[..., Any],
    *,
    amount: Callable[[int], float],
) -> Curve:
    """Time `work` on what `make` makes of each size."""
    found: list[float] = []
    for size in sizes:
        try:
            given = make(size)
            work(*given)
        except (RuntimeError, MemoryError):
            if not found:
                raise
            break  # there is no room for so much: what was measured goes on in step
        best, times, begin = float("inf"), 0, time.perf_counter()
        while times < TIMES or time.perf_counter() - begin < SECONDS:
            times += 1
            best = min(best, seconds(partial(work, *given), device))
        found.append(best)
    # Timing is noisy; more work never takes less time.
    return Curve(amounts=tuple(map(amount, sizes[: len(found)])), seconds=tuple(np.maximum.accumulate(found).tolist()))


def per_parameter(optimizer: Any, rates: Rates, cache: Cache | None = None) -> float:
    """Seconds that an optimizer, as a recipe configures it, takes for each parameter of a step, on a device of these
    rates; from the cache where this machine was measured before.

    Measured and not worked out: how long the codes of an 8-bit moment take is not to be told from their bytes. It is
    timed in turns with a pass over memory, and kept as so many of those: timed alone in a busy moment, a step took 125
    ns a parameter, and otherwise 14.
    """
    settings = optimizer.model_dump(mode="json", exclude={"lr", "weight_decay", "betas", "eps"})
    machine = this_machine().model_dump()
    key = hash_of("optimizer", 3, type(optimizer).__name__, settings, machine, rates.name, torch.get_num_threads())
    passes = float((cache or Cache()).json(f"optimizer-{key}", lambda: _step(optimizer, torch.device(rates.kind))))
    return passes * rates.passes(2.0 * PASSED) / prod(WEIGHT)


def _step(optimizer: Any, device: torch.device) -> float:
    """How many passes over memory a step takes as long as."""
    weight = torch.nn.Parameter(torch.ones(WEIGHT, device=device))
    stepper = optimizer.build([{"params": [weight]}])
    array = torch.ones(PASSED // 4, device=device)
    step, one, times, begin = float("inf"), float("inf"), 0, time.perf_counter()
    while times <= TIMES or time.perf_counter() - begin < 4 * SECONDS:
        times += 1  # the first makes the state, and is never the fastest
        weight.grad = torch.full_like(weight, 1e-3)
        step = min(step, seconds(stepper.step, device))
        one = min(one, seconds(partial(torch.mul, array, 1.5), device))
    return step / one


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Of the work, on the clock."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
