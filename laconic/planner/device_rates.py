"""The measured speed of a device: seconds of matrix products, elementwise passes and copies, by size."""

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

MATRIX_SIDES = {"cpu": (32, 128, 512, 1536), "cuda": (128, 512, 2048, 8192)}
"""Sides of the square matrices that are multiplied."""
ARRAY_BYTES = {"cpu": (2**14, 2**20, 2**24, 2**28), "cuda": (2**16, 2**22, 2**26, 2**30)}
"""Bytes of the arrays of elementwise passes, and of copies between host and device."""
SECONDS, REPEATS = 0.05, 5
"""Least duration and number of repetitions of a measurement, of which the fastest counts."""
PARAMETER_SHAPE = (1024, 1024)
"""Shape of the parameter that optimizers are timed on."""
PASS_BYTES = 2**24
"""Bytes of the array of the elementwise pass that alternates with the optimizer's step."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RateCurve(BaseModel):
    """Seconds by the amount of work (FLOPs or bytes), measured at a few amounts and interpolated log-log in between."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, amount: float) -> float:
        """Seconds for an amount: constant below the least measured amount, proportional above the largest."""
        if amount <= self.amounts[0]:
            return self.seconds[0]
        if amount >= self.amounts[-1]:
            return self.seconds[-1] * amount / self.amounts[-1]
        return float(np.exp(np.interp(np.log(amount), np.log(self.amounts), np.log(self.seconds))))


class DeviceRates(BaseModel):
    """The measured speed of a device.

    products: seconds of matrix products by FLOPs, for each dtype. passes: seconds of elementwise operations by bytes
    read and written. copies: seconds of copies between host and device by bytes. host: rates of the GPU's host; None
    where the device is the CPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["cpu", "cuda"]
    products: dict[str, RateCurve]
    passes: RateCurve
    copies: RateCurve
    host: "DeviceRates | None" = None


def measure_rates(device: torch.device, cache: Cache | None = None) -> DeviceRates:
    """Measure the rates of a device, which takes a second or two; cached for each machine."""
    machine = this_machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.processor
    key = hash_of("rates", 3, machine.model_dump(), name, torch.get_num_threads(), torch.__version__)
    content = (cache or Cache()).json(f"rates-{key}", lambda: _measure_rates(device, name).model_dump())
    return DeviceRates.model_validate(content)


def _measure_rates(device: torch.device, name: str) -> DeviceRates:
    products = {}
    for label, dtype in DTYPES.items():
        if device.type == "cpu" and dtype is torch.float16:
            continue  # no CPU has FP16 products fast enough to be worth measuring
        products[label] = measure_curve(
            device,
            MATRIX_SIDES[device.type],
            partial(make_square, dtype, device),
            lambda a: a @ a,
            amount=lambda side: 2.0 * side**3,
        )
    passes = measure_curve(
        device,
        ARRAY_BYTES[device.type],
        lambda size: (torch.ones(size // 4, device=device),),
        lambda a: a * 1.5,
        amount=lambda size: 2.0 * size,
    )
    copies = measure_curve(
        device,
        ARRAY_BYTES[device.type],
        lambda size: (torch.ones(size // 4, pin_memory=device.type == "cuda"),),
        lambda a: a.to(device, copy=True),
        amount=float,
    )
    host = measure_rates(torch.device("cpu")) if device.type == "cuda" else None
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return DeviceRates(name=name, kind=kind, products=products, passes=passes, copies=copies, host=host)


def make_square(dtype: torch.dtype, device: torch.device, side: int) -> tuple[Tensor, ...]:
    """A square matrix."""
    return (torch.ones(side, side, dtype=dtype, device=device),)


def measure_curve(
    device: torch.device,
    sizes: tuple[int, ...],
    make: Callable[[int], tuple[Tensor, ...]],
    work: Callable[..., Any],
    *,
    amount: Callable[[int], float],
) -> RateCurve:
    """Time `work` on the arguments that `make` makes for each size.

    amount: FLOPs or bytes of a size. Larger sizes are left out where they do not fit into memory.
    """
    found: list[float] = []
    for size in sizes:
        try:
            given = make(size)
            work(*given)
        except (RuntimeError, MemoryError):
            if not found:
                raise
            break  # out of memory: larger amounts are extrapolated
        best, times, begin = float("inf"), 0, time.perf_counter()
        while times < REPEATS or time.perf_counter() - begin < SECONDS:
            times += 1
            best = min(best, time_once(partial(work, *given), device))
        found.append(best)
    # Timing is noisy, and more work never takes less time.
    return RateCurve(
        amounts=tuple(map(amount, sizes[: len(found)])), seconds=tuple(np.maximum.accumulate(found).tolist())
    )


def measure_optimizer(optimizer: Any, rates: DeviceRates, cache: Cache | None = None) -> float:
    """Measure the seconds per parameter of an optimizer's step, with its settings; cached for each machine.

    It is not computed from FLOPs and bytes, since these do not give the time of quantizing 8-bit moments. The step
    alternates with an elementwise pass and is stored as a multiple of it: timed alone on a busy machine, a step took
    125 ns a parameter instead of 14.
    """
    settings = optimizer.model_dump(mode="json", exclude={"lr", "weight_decay", "betas", "eps"})
    machine = this_machine().model_dump()
    key = hash_of("optimizer", 3, type(optimizer).__name__, settings, machine, rates.name, torch.get_num_threads())
    passes = float(
        (cache or Cache()).json(f"optimizer-{key}", lambda: _measure_step(optimizer, torch.device(rates.kind)))
    )
    return passes * rates.passes(2.0 * PASS_BYTES) / prod(PARAMETER_SHAPE)


def _measure_step(optimizer: Any, device: torch.device) -> float:
    """The duration of a step, in elementwise passes over PASS_BYTES."""
    weight = torch.nn.Parameter(torch.ones(PARAMETER_SHAPE, device=device))
    stepper = optimizer.build([{"params": [weight]}])
    array = torch.ones(PASS_BYTES // 4, device=device)
    step, one, times, begin = float("inf"), float("inf"), 0, time.perf_counter()
    while times <= REPEATS or time.perf_counter() - begin < 4 * SECONDS:
        times += 1  # the first step allocates the state, and is never the fastest
        weight.grad = torch.full_like(weight, 1e-3)
        step = min(step, time_once(stepper.step, device))
        one = min(one, time_once(partial(torch.mul, array, 1.5), device))
    return step / one


def time_once(work: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock seconds of a call, the device's work included."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
