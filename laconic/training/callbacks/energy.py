"""How busy an NVIDIA device is and what it consumes, from its management library (NVML)."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from laconic.registry import missing_package
from laconic.training.callbacks.monitor import StepReport

PERIOD = 0.1
"""Seconds between two samples; the driver's own are no finer."""


@dataclass(frozen=True)
class Sample:
    """An instant. at: seconds. busy: share of the last moments in which some kernel ran, 0 to 1. watts. memory: bytes
    in use on the whole device, by anybody. None for what the device does not tell."""

    at: float
    busy: float | None
    watts: float | None
    memory: int | None


@dataclass(frozen=True)
class Usage:
    """What a device did over a run.

    busy: mean, 0 to 1. joules: of the whole device; from its counter, or else summed up from `watts` (`source`).
    joules_per_unit: per token, or per row where there are none. memory: the most bytes in use, by anybody. seconds.
    None for what the device does not tell.
    """

    seconds: float
    samples: int
    busy: float | None
    watts: float | None
    joules: float | None
    source: str | None
    joules_per_unit: float | None
    memory: int | None


class Meter:
    """One device of NVML, which is initialised."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """nvml: the module. uuid: of the device, as CUDA tells it; CUDA_VISIBLE_DEVICES changes its number."""
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def joules(self) -> float | None:
        """What the device has consumed since its driver was loaded."""
        millijoules = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if millijoules is None else millijoules / 1e3

    def sample(self) -> Sample:
        """The device at this instant."""
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates)
        milliwatts = self._ask(self._nvml.nvmlDeviceGetPowerUsage)
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo)
        return Sample(
            at=time.monotonic(),
            busy=None if rates is None else rates.gpu / 100,
            watts=None if milliwatts is None else milliwatts / 1e3,
            memory=None if memory is None else int(memory.used),
        )

    def close(self) -> None:
        """NVML is needed no longer."""
        self._nvml.nvmlShutdown()

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """None where the device does not answer: older ones count no energy, slices of one tell little."""
        try:
            return question(self._handle)
        except self._nvml.NVMLError:
            return None


class Energy:
    """An observer that samples the device ten times a second in a thread of its own.

    usage: after `close`; None where there is nothing to ask, and `reason` says why.
    """

    def __init__(self, meter: Meter | None, reason: str = "") -> None:
        self.usage: Usage | None = None
        self.reason = reason
        self._meter = meter
        self._units = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="energy", daemon=True)
        if meter:
            self._start = meter.joules()
            self._samples = [meter.sample()]
            self._thread.start()

    @classmethod
    def of(cls, device: torch.device) -> "Energy":
        """Of the device of a run. Raises MissingPackage where it is CUDA and nvidia-ml-py is not installed."""
        if device.type != "cuda":
            return cls(None, f"energy and utilisation are read from NVIDIA devices, and this run is on {device.type!r}")
        try:
            import pynvml
        except ModuleNotFoundError as error:
            raise missing_package("pynvml") from error
        try:
            pynvml.nvmlInit()
            return cls(Meter(pynvml, str(torch.cuda.get_device_properties(device).uuid)))
        except pynvml.NVMLError as error:
            return cls(None, f"the device's management library (NVML) does not answer: {error}")

    def _watch(self) -> None:
        while self._meter and not self._closed.wait(PERIOD):
            self._samples.append(self._meter.sample())

    def step(self, report: StepReport) -> None:
        self._units += report.count

    def close(self) -> None:
        if self._meter is None or self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._samples.append(self._meter.sample())
        end = self._meter.joules()
        self._meter.close()
        counted = None if self._start is None or end is None else end - self._start
        self.usage = summarise(self._samples, counted, self._units)

    def describe(self) -> str:
        """One line, as in "device busy 91 % of the time, 1.2 kJ, 0.8 mJ each"; or why there is none."""
        usage = self.usage
        if usage is None:
            return self.reason
        told = [
            None if usage.busy is None else f"device busy {100 * usage.busy:.0f} % of the time",
            None if usage.joules is None else f"{usage.joules:.0f} J ({usage.source})",
            None if usage.joules_per_unit is None else f"{1e3 * usage.joules_per_unit:.2f} mJ for each token or row",
        ]
        return ", ".join(each for each in told if each)


def summarise(samples: list[Sample], counted: float | None, units: int) -> Usage:
    """The usage over samples in their order. counted: joules by the device's counter. units: tokens or rows done."""
    integrated = integrate([(s.at, s.watts) for s in samples if s.watts is not None])
    joules = integrated if counted is None else counted
    seconds = samples[-1].at - samples[0].at
    memory = [s.memory for s in samples if s.memory is not None]
    return Usage(
        seconds=seconds,
        samples=len(samples),
        busy=mean([s.busy for s in samples[1:] if s.busy is not None]),
        watts=joules / seconds if joules is not None and seconds > 0 else None,
        joules=joules,
        source=None if joules is None else "counter" if counted is not None else "power",
        joules_per_unit=joules / units if joules is not None and units else None,
        memory=max(memory, default=None),
    )


def integrate(power: list[tuple[float, float]]) -> float | None:
    """Joules from (seconds, watts), by the trapezoidal rule; None from fewer than two."""
    if len(power) < 2:
        return None
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(power))


def mean(values: list[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None
