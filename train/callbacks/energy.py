"""Utilization and energy of an NVIDIA device, from its management library (NVML)."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from laconic.registry import missing_package
from train.callbacks.callback import RunLog, StepReport

PERIOD = 0.1
"""Seconds between two samples; the driver's own resolution is no finer."""


@dataclass(frozen=True)
class DeviceSample:
    """One reading of a device. at: seconds. busy: recent share of time with a running kernel, 0 to 1. watts. None for
    what the device does not report."""

    at: float
    busy: float | None
    watts: float | None


@dataclass(frozen=True)
class DeviceUsage:
    """Utilization and energy of a device over a run.

    busy: mean share, 0 to 1. joules: of the whole device, from its counter or integrated from power (`source`).
    joules_per_unit: per token, or per row without tokens. None for what the device does not report.
    """

    busy: float | None
    joules: float | None
    source: str | None
    joules_per_unit: float | None


class NvmlDevice:
    """A device as NVML, which must be initialized, reports it."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """nvml: the module. uuid: of the device, from CUDA, since CUDA_VISIBLE_DEVICES changes its index."""
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def joules(self) -> float | None:
        """Return the energy consumed since the driver was loaded, in joules."""
        millijoules = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if millijoules is None else millijoules / 1e3

    def sample(self) -> DeviceSample:
        """Read the device now."""
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates)
        milliwatts = self._ask(self._nvml.nvmlDeviceGetPowerUsage)
        return DeviceSample(
            at=time.monotonic(),
            busy=None if rates is None else rates.gpu / 100,
            watts=None if milliwatts is None else milliwatts / 1e3,
        )

    def close(self) -> None:
        """Shut NVML down."""
        self._nvml.nvmlShutdown()

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return what NVML answers; None where it cannot: older devices count no energy, MIG slices report little."""
        try:
            return question(self._handle)
        except self._nvml.NVMLError:
            return None


class Energy(RunLog):
    """An observer that samples the device ten times a second in a thread of its own.

    usage: set by `close`; None where the device cannot be read, and `reason` says why.
    """

    def __init__(self, nvml: NvmlDevice | None, reason: str = "") -> None:
        self.usage: DeviceUsage | None = None
        self.reason = reason
        self._nvml = nvml
        self._units = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="energy", daemon=True)
        if nvml:
            self._start = nvml.joules()
            self._samples = [nvml.sample()]
            self._read = 0
            self._thread.start()

    @classmethod
    def of(cls, device: torch.device) -> "Energy":
        """Make the observer of a device. Raises MissingPackage where it is CUDA and nvidia-ml-py is not installed."""
        if device.type != "cuda":
            return cls(None, f"energy and utilisation are read from NVIDIA devices, and this run is on {device.type!r}")
        try:
            import pynvml
        except ModuleNotFoundError as error:
            raise missing_package("pynvml") from error
        try:
            pynvml.nvmlInit()
            return cls(NvmlDevice(pynvml, str(torch.cuda.get_device_properties(device).uuid)))
        except pynvml.NVMLError as error:
            return cls(None, f"the device's management library (NVML) does not answer: {error}")

    def _watch(self) -> None:
        while self._nvml and not self._closed.wait(PERIOD):
            self._samples.append(self._nvml.sample())

    def step(self, report: StepReport) -> None:
        self._units += report.count

    def close(self) -> None:
        if self._nvml is None or self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._samples.append(self._nvml.sample())
        end = self._nvml.joules()
        self._nvml.close()
        counted = None if self._start is None or end is None else end - self._start
        self.usage = summarize(self._samples, counted, self._units)

    def read_busy(self) -> float | None:
        """Return the mean share of the time, 0 to 1, with a running kernel since it was last read; None where the
        device reports none, or was not sampled meanwhile."""
        if self._nvml is None:
            return None
        latest = self._samples[self._read :]
        self._read += len(latest)
        busy = [sample.busy for sample in latest if sample.busy is not None]
        return fmean(busy) if busy else None

    def describe(self) -> str:
        """Describe the usage in a line as "device busy 91 % of the time, 1200 J (counter)", or why there is none."""
        usage = self.usage
        if usage is None:
            return self.reason
        figures = [
            None if usage.busy is None else f"device busy {100 * usage.busy:.0f} % of the time",
            None if usage.joules is None else f"{usage.joules:.0f} J ({usage.source})",
            None if usage.joules_per_unit is None else f"{1e3 * usage.joules_per_unit:.2f} mJ for each token or row",
        ]
        return ", ".join(filter(None, figures))


def summarize(samples: list[DeviceSample], counted: float | None, units: int) -> DeviceUsage:
    """Summarize the usage over consecutive samples. counted: joules by the device's counter. units: tokens or rows."""
    power = [(sample.at, sample.watts) for sample in samples if sample.watts is not None]
    busy = [sample.busy for sample in samples[1:] if sample.busy is not None]
    joules, source = counted, "counter"
    if joules is None and len(power) > 1:
        times, watts = zip(*power, strict=True)
        joules, source = float(np.trapezoid(watts, times)), "power"
    return DeviceUsage(
        busy=fmean(busy) if busy else None,
        joules=joules,
        source=None if joules is None else source,
        joules_per_unit=joules / units if joules is not None and units else None,
    )
