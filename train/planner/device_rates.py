"""The measured speed of a device: seconds of matrix products, elementwise passes and copies, by size."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import hash_of, library_digest
from laconic.models.torch_session import use_threads
from train.device_clock import make_clock

MATRIX_SIDES = {"cpu": (32, 128, 512, 1024), "cuda": (128, 512, 2048, 8192)}
"""Sides of the square matrices that are multiplied."""
ARRAY_BYTES = {"cpu": (2**14, 2**20, 2**24, 2**26), "cuda": (2**16, 2**22, 2**26, 2**30)}
"""Bytes of the arrays of elementwise passes, and of copies between host and device."""
YARDSTICK_SIDE = 256
"""Side of the FP32 matrices whose product alternates with whatever is timed."""
SECONDS, REPEATS, LIMIT = 0.05, 3, 0.3
"""Of a measurement: its least duration and number of repetitions, and the duration after which two are enough."""
LONGEST = 0.2
"""Seconds of the longest call that is timed; larger amounts are extrapolated."""
QUIET = 0.85
"""The share of the processor that is got on a machine with nothing else to do is at least this."""
SERIAL = 3e-5
"""Seconds below which a call is taken to use one thread, where that cannot be measured."""
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
        """Return the seconds for an amount: constant below the measured amounts, proportional above them."""
        if amount <= self.amounts[0]:
            return self.seconds[0]
        if amount >= self.amounts[-1]:
            return self.seconds[-1] * amount / self.amounts[-1]
        return float(np.exp(np.interp(np.log(amount), np.log(self.amounts), np.log(self.seconds))))


class DeviceRates(BaseModel):
    """The measured speed of a device.

    products: seconds of matrix products by FLOPs, for each dtype. passes: seconds of elementwise operations by bytes
    read and written. copies: seconds of copies between host and device by bytes. host: rates of the GPU's host; None
    where the device is the CPU. share: of the processor that the measurement got, 0 to 1; the rest went to other
    processes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["cpu", "cuda"]
    products: dict[str, RateCurve]
    passes: RateCurve
    copies: RateCurve
    host: "DeviceRates | None" = None
    share: float = 1.0

    @property
    def is_busy(self) -> bool:
        """Whether other processes used the processor while it was measured."""
        return self.share < QUIET

    def explain_busy(self) -> str:
        """Explain what a busy machine means for these rates, in a sentence."""
        return (
            f"other processes kept the machine busy while its speed was measured: {100 * self.share:.0f} % of the "
            f"processor was left. How much threads gain was assumed. It is measured again once the machine is less busy"
        )


@dataclass(frozen=True)
class TimedKernel:
    """A call whose time depends on a size. make: its arguments by the size. amount: FLOPs or bytes by the size."""

    sizes: tuple[int, ...]
    make: Callable[[int], tuple[Tensor, ...]]
    work: Callable[..., Any]
    amount: Callable[[int], float]


def measure_rates(device: torch.device, cache: Cache | None = None, *, again: bool = False) -> DeviceRates:
    """Measure the rates of a device in about five seconds, and keep them for each machine.

    Rates that were measured on a busy machine are measured once more when it is less busy, and the better are kept.
    again: measure, whatever is kept.
    """
    cache = cache or Cache()
    machine = this_machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.processor
    key = f"rates-{hash_of('rates', 4, machine.model_dump(), name, torch.get_num_threads(), library_digest())}"
    measure: Callable[[], Any] = lambda: _measure_rates(device, name, cache).model_dump()  # noqa: E731
    rates = DeviceRates.model_validate(cache.json(key, measure, again=again))
    if rates.is_busy and not again and measure_share() >= min(1.2 * rates.share, QUIET):
        better = _measure_rates(device, name, cache)
        if better.share > rates.share:
            rates = DeviceRates.model_validate(cache.json(key, better.model_dump, again=True))
    return rates


def _measure_rates(device: torch.device, name: str, cache: Cache) -> DeviceRates:
    share = measure_share()
    kernels = list_kernels(device)
    if device.type == "cuda":
        curves = {label: measure_curve(device, kernel) for label, kernel in kernels.items()}
        host = measure_rates(torch.device("cpu"), cache)
    else:
        with use_threads(1):
            curves = {label: measure_curve(device, kernel) for label, kernel in kernels.items()}
        # The second look tells whether the machine was busy in between.
        share, host = min(share, measure_share()), None
        curves = {label: spread_over_threads(kernels[label], curve, share) for label, curve in curves.items()}
    products = {label: curves[label] for label in DTYPES if label in curves}
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return DeviceRates(
        name=name,
        kind=kind,
        products=products,
        passes=curves["passes"],
        copies=curves["copies"],
        host=host,
        share=round(share, 2),
    )


def list_kernels(device: torch.device) -> dict[str, TimedKernel]:
    """List what is timed on a device: the products by the name of their dtype, `passes` and `copies`."""
    sides, sizes = MATRIX_SIDES[device.type], ARRAY_BYTES[device.type]
    kernels = {
        label: TimedKernel(sides, partial(make_square, dtype, device), torch.mm, lambda side: 2.0 * side**3)
        for label, dtype in DTYPES.items()
        if device.type == "cuda" or dtype is not torch.float16  # no CPU has FP16 products worth measuring
    }
    kernels["passes"] = TimedKernel(
        sizes, lambda size: (torch.ones(size // 4, device=device),), lambda a: a * 1.5, lambda size: 2.0 * size
    )
    kernels["copies"] = TimedKernel(
        sizes,
        lambda size: (torch.ones(size // 4, pin_memory=device.type == "cuda"),),
        lambda a: a.to(device, copy=True),
        float,
    )
    return kernels


def make_square(dtype: torch.dtype, device: torch.device, side: int) -> tuple[Tensor, ...]:
    """Make two square matrices of ones."""
    return (torch.ones(side, side, dtype=dtype, device=device),) * 2


def measure_curve(device: torch.device, kernel: TimedKernel) -> RateCurve:
    """Time a kernel at its sizes, in turns with a product that is always the same, the yardstick.

    This distinguishes a busy machine, which slows both, from a slow kernel. On a CPU the processor time of this thread
    is measured, which other processes do not add to. Sizes that do not fit into memory, or take long, are left out.
    """
    clock = make_clock(device)
    amounts: list[float] = []
    fastest: list[float] = []
    yardsticks: list[float] = []
    yardstick = partial(torch.mm, *make_square(torch.float32, device, YARDSTICK_SIDE))
    for size in kernel.sizes:
        amount = kernel.amount(size)
        if fastest and fastest[-1] * amount / amounts[-1] > LONGEST:
            break
        try:
            work = partial(kernel.work, *kernel.make(size))
            work()
        except (RuntimeError, MemoryError):
            if not fastest:
                raise
            break  # out of memory
        best, same = time_in_turns(work, yardstick, clock=clock)
        amounts.append(amount)
        fastest.append(best)
        yardsticks.append(same)
    least = min(yardsticks)
    seconds = [best * least / same for best, same in zip(fastest, yardsticks, strict=True)]
    # Timing is noisy, and more work never takes less time.
    return RateCurve(amounts=tuple(amounts), seconds=tuple(np.maximum.accumulate(seconds).tolist()))


def time_in_turns(*works: Callable[[], Any], clock: Callable[[], float]) -> list[float]:
    """Time calls in turns, and return the least time of each."""
    best, times, begin = [float("inf")] * len(works), 0, time.perf_counter()
    while True:
        for index, work in enumerate(works):
            start = clock()
            work()
            best[index] = min(best[index], clock() - start)
        times += 1
        passed = time.perf_counter() - begin
        if (times >= REPEATS and passed > SECONDS) or (times >= 2 and passed > LIMIT):
            return best


def spread_over_threads(kernel: TimedKernel, alone: RateCurve, share: float) -> RateCurve:
    """Derive a kernel's seconds with all threads from those with one.

    On a quiet machine it is timed. On a busy one that is impossible, since threads wait for one another: products of 32
    x 32 took 4 ms. There, calls that take long enough are taken to gain by all threads alike.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return alone
    if share < QUIET:
        seconds = [one / threads if one > SERIAL else one for one in alone.seconds]
    else:
        works = (partial(kernel.work, *kernel.make(size)) for size in kernel.sizes[: len(alone.seconds)])
        timed = [time_in_turns(work, clock=time.perf_counter)[0] for work in works]
        # Within what is possible: a moment's delay makes no kernel slower than it is on one thread.
        seconds = [min(max(both, one / threads / 2), one) for both, one in zip(timed, alone.seconds, strict=True)]
    return RateCurve(amounts=alone.amounts, seconds=tuple(np.maximum.accumulate(seconds).tolist()))


def measure_share() -> float:
    """Measure the share of the processor that this process gets now, 0 to 1, computing with all of torch's threads."""
    work = partial(torch.mm, *make_square(torch.float32, torch.device("cpu"), 2 * YARDSTICK_SIDE))
    work()
    begin, used = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - begin) < 4 * SECONDS:
        work()
    return min(1.0, (time.process_time() - used) / passed / torch.get_num_threads())


def measure_optimizer(optimizer: Any, rates: DeviceRates, cache: Cache | None = None) -> float:
    """Measure the seconds per parameter of an optimizer's step, with its settings; cached for each machine.

    It is not computed from FLOPs and bytes, since these do not give the time of quantizing 8-bit moments. The step
    alternates with an elementwise pass and is stored as a multiple of it: timed alone on a busy machine, a step took
    125 ns a parameter instead of 14.
    """
    settings = optimizer.model_dump(mode="json", exclude={"lr", "weight_decay", "betas", "eps"})
    machine = this_machine().model_dump()
    threads, kind = torch.get_num_threads(), type(optimizer).__name__
    key = hash_of("optimizer", 4, kind, settings, machine, rates.name, threads, library_digest())
    passes = float(
        (cache or Cache()).json(f"optimizer-{key}", lambda: _measure_step(optimizer, torch.device(rates.kind)))
    )
    return passes * rates.passes(2.0 * PASS_BYTES) / prod(PARAMETER_SHAPE)


def _measure_step(optimizer: Any, device: torch.device) -> float:
    """Measure the duration of a step, in elementwise passes over PASS_BYTES."""
    weight = torch.nn.Parameter(torch.ones(PARAMETER_SHAPE, device=device))
    weight.grad = torch.full_like(weight, 1e-3)
    stepper = optimizer.build([{"params": [weight]}])
    stepper.step()  # allocates the state
    array = torch.ones(PASS_BYTES // 4, device=device)
    # Into memory that is mapped already: pages that are mapped anew take five times as long.
    one = partial(torch.mul, array, 1.5, out=torch.empty_like(array))
    with use_threads(1):
        step, same = time_in_turns(stepper.step, one, clock=make_clock(device))
    return step / same
