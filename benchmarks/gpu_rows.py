"""Interleaved measurement of the GPU benchmark: several ways to run one model take turns on one device."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from gpu_device import BenchmarkDevice, find_peak
from gpu_models import Network

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
HostInputs = Mapping[str, np.ndarray[Any, Any]]
OPENING, TRYING = 0.5, 0.85
"""Shares of a model's time in which ways are opened, and of a batch size's in which they are run for the first time:
capturing, building and compiling happen there. The rest is for timing."""


class NotMeasured(Exception):
    """A way that this machine cannot run; the message is the reason."""


class Runner(Protocol):
    """A model that is ready on the device."""

    def run(self, inputs: HostInputs) -> np.ndarray[Any, Any]:
        """The output in host memory, for inputs in host memory."""

    def close(self) -> None:
        """Release the memory."""


@dataclass(frozen=True)
class Variant:
    """A way to run a model in a precision.

    open: raises NotMeasured, or whatever the engine raises. peak: the precision whose peak it is compared with; empty
    for none. prepare: makes what several variants share; it is called first, and raises as `open` does.
    """

    way: str
    precision: str
    open: Callable[[], Runner]
    peak: str = ""
    prepare: Callable[[], None] | None = None


@dataclass(frozen=True)
class GpuRow:
    """A row of the table, from inputs to outputs in host memory.

    seconds: median latency, with its quartiles. speedup: the median over rounds of FP32 eager's time divided by this.
    per_second: answers, in runs one after the other. memory: bytes on the device, of weights, workspaces and caches.
    joules: of the whole device, for an answer. share: of the device's peak. error: the norm of the difference from FP32
    eager's outputs, divided by their norm; cosine: the least of any row of the batch; both None for outputs
    that are not finite. None elsewhere: not measured here.
    """

    model: str
    batch: int
    precision: str
    way: str
    seconds: float
    quartiles: tuple[float, float]
    speedup: float
    per_second: float
    memory: int | None
    joules: float | None
    share: float | None
    error: float | None
    cosine: float | None


@dataclass(frozen=True)
class LeftOut:
    """What was not measured, and why. batch: None for all."""

    model: str
    precision: str
    way: str
    batch: int | None
    reason: str


@dataclass(frozen=True)
class Effort:
    """How much is measured. rounds: at most, of the interleaved runs. window: seconds of runs one after the other, by
    which throughput and energy are found; with 0 one run. tries: runs before the timing: TensorRT records a CUDA graph
    after the third run of a shape, torch.compile in the second."""

    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int = 30
    window: float = 0.6
    tries: int = 4


@dataclass
class Pace:
    """The time that is left. costs: the shortest that each way took to get ready so far, in seconds."""

    end: float
    costs: dict[str, float] = field(default_factory=dict)

    def split(self, share: float) -> float:
        """The end of the next share of the time that is left."""
        now = time.monotonic()
        return now + share * max(self.end - now, 0)

    @contextmanager
    def spend(self, way: str, end: float) -> Iterator[None]:
        """Get a way ready. Raises NotMeasured if it is not expected to be by the end."""
        start = time.monotonic()
        if start + self.costs.get(way, 0) > end:
            raise NotMeasured("no time left (--minutes)")
        yield
        self.costs[way] = min(self.costs.get(way, math.inf), time.monotonic() - start)


@dataclass
class OpenWay:
    """A way that is open. resident: bytes that it holds on the device between runs."""

    variant: Variant
    runner: Runner
    resident: int


class NetworkRun:
    """The measurement of one model: `rows` and `left` are filled by `measure`.

    variants: the first is the reference, FP32 eager. pace: with the end of this model's time.
    """

    def __init__(
        self, network: Network, variants: Sequence[Variant], device: BenchmarkDevice, effort: Effort, pace: Pace
    ) -> None:
        self.network, self.variants, self.device, self.effort, self.pace = network, variants, device, effort, pace
        self.flops = network.count_flops()
        self.rows: list[GpuRow] = []
        self.left: list[LeftOut] = []

    def measure(self) -> None:
        """Open all ways, time them at each batch size, and close them."""
        ways: list[OpenWay] = []
        try:
            end = self.pace.split(OPENING)
            for variant in self.variants:
                with self.leaving_out(variant, None):
                    ways.append(self.open(variant, end))
            if not ways or ways[0].variant is not self.variants[0]:
                self.left += [self.leave(way.variant, None, "its reference did not run") for way in ways]
                return
            for number, batch in enumerate(self.effort.batches):
                self.measure_batch(ways, batch, self.pace.split(1 / (len(self.effort.batches) - number)))
        finally:
            for way in ways:
                way.runner.close()
            ways.clear()
            gc.collect()
            self.device.release()

    def open(self, variant: Variant, end: float) -> OpenWay:
        """Open a way, and see how much memory it takes."""
        if variant.prepare:
            with self.pace.spend(f"{variant.way}, preparation", end):
                variant.prepare()
        self.device.release()
        before = self.device.bytes_in_use()
        with self.pace.spend(variant.way, end):
            runner = variant.open()
        self.device.release()
        return OpenWay(variant, runner, difference(self.device.bytes_in_use(), before))

    def measure_batch(self, ways: Sequence[OpenWay], batch: int, end: float) -> None:
        """Run all ways for the first time, then time those that ran, interleaved."""
        inputs = {name: tensor.numpy() for name, tensor in self.network.make_inputs(batch, seed=batch).items()}
        start = time.monotonic()
        trying = start + TRYING * max(end - start, 0)
        outputs: dict[int, FloatArray] = {}
        memory: dict[int, int | None] = {}
        for number, way in enumerate(ways):
            with self.leaving_out(way.variant, batch), self.pace.spend(f"{way.variant.way}, first run", trying):
                memory[number], outputs[number] = self.try_out(way, inputs)
        if 0 not in outputs:
            self.left += [self.leave(ways[n].variant, batch, "its reference did not run") for n in outputs]
            return
        seconds = self.interleave({number: ways[number] for number in outputs}, inputs, batch, end)
        for number, times in seconds.items():
            with self.leaving_out(ways[number].variant, batch):
                rate, joules = self.run_window(ways[number].runner, inputs, batch)
                low, median, high = np.percentile(times, [25, 50, 75])
                error, cosine = compare(outputs[0], outputs[number])
                peak = find_peak(self.device.name, ways[number].variant.peak) if self.device.on_gpu else None
                self.rows.append(
                    GpuRow(
                        self.network.name, batch, ways[number].variant.precision, ways[number].variant.way,
                        seconds=float(median), quartiles=(float(low), float(high)),
                        speedup=float(np.median(np.array(seconds[0][: len(times)]) / np.array(times))),
                        per_second=rate, memory=memory[number], joules=joules,
                        share=None if peak is None else self.flops * batch / float(median) / peak,
                        error=error, cosine=cosine,
                    )
                )  # fmt: skip

    def try_out(self, way: OpenWay, inputs: HostInputs) -> tuple[int | None, FloatArray]:
        """Run a way until it is ready for these shapes. Returns the bytes that it takes, and its output as float64."""
        self.device.release()
        before = self.device.bytes_in_use()
        for _ in range(self.effort.tries):
            output = way.runner.run(inputs)
        self.device.synchronize()
        peak = self.device.bytes_in_use()
        self.device.release()
        memory = None if peak is None else way.resident + difference(peak, before)
        way.resident += difference(self.device.bytes_in_use(), before)
        return memory, output.astype(np.float64)

    def interleave(
        self, ways: Mapping[int, OpenWay], inputs: HostInputs, batch: int, end: float
    ) -> dict[int, list[float]]:
        """Seconds of each run: in every round each way runs once, in a rotating order. At least three rounds."""
        seconds: dict[int, list[float]] = {number: [] for number in ways}
        end -= self.effort.window * len(ways)
        for turn in range(self.effort.rounds):
            if turn >= 3 and time.monotonic() > end:
                break
            numbers = list(seconds)
            first = turn % len(numbers)
            for number in numbers[first:] + numbers[:first]:
                variant = ways[number].variant
                with self.leaving_out(variant, batch, drop=partial(seconds.pop, number)):
                    start = time.perf_counter()
                    ways[number].runner.run(inputs)
                    seconds[number].append(time.perf_counter() - start)
            if 0 not in seconds:
                return {}
        return seconds

    def run_window(self, runner: Runner, inputs: HostInputs, batch: int) -> tuple[float, float | None]:
        """Run for a while. Returns answers a second, and joules for an answer."""
        before, start, runs = self.device.joules(), time.perf_counter(), 0
        while not runs or time.perf_counter() - start < self.effort.window:
            runner.run(inputs)
            runs += 1
        seconds, after = time.perf_counter() - start, self.device.joules()
        joules = None if before is None or after is None else (after - before) / (runs * batch)
        return runs * batch / seconds, joules

    @contextmanager
    def leaving_out(
        self, variant: Variant, batch: int | None, drop: Callable[[], Any] = lambda: None
    ) -> Iterator[None]:
        """Turn a failure into a line of what was left out."""
        try:
            yield
        except NotMeasured as error:
            self.left.append(self.leave(variant, batch, str(error)))
            drop()
        except Exception as error:  # noqa: BLE001 - engines and compilers raise exceptions with no base class in common
            self.left.append(self.leave(variant, batch, f"{type(error).__name__}: {first_line(error)}"))
            drop()

    def leave(self, variant: Variant, batch: int | None, reason: str) -> LeftOut:
        """A line of what was left out."""
        return LeftOut(self.network.name, variant.precision, variant.way, batch, reason)


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, 300 characters at most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"


def difference(after: int | None, before: int | None) -> int:
    """Bytes that were added; 0 where they are not counted, or other programs released more."""
    return 0 if after is None or before is None else max(after - before, 0)


def compare(expected: FloatArray, found: FloatArray) -> tuple[float | None, float | None]:
    """The norm of the difference divided by that of the expected array, and the least cosine similarity of any row;
    None where something is not finite."""
    if not np.isfinite(found).all():
        return None, None
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    norms = np.linalg.norm(expected, axis=1) * np.linalg.norm(found, axis=1)
    return float(error), float(((expected * found).sum(1) / np.maximum(norms, np.finfo(np.float64).tiny)).min())
