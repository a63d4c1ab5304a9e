"""What a training run says while it goes on: reports from the loop, what follows from them, and who is told."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from laconic.training.callbacks.flops import Flops
from laconic.units import format_binary_bytes, format_clock, format_percent, format_rate

if sys.platform != "win32":
    import resource

SMOOTHING = 0.9
"""Weight of the past in a moving average: the last ten steps or so."""


@dataclass(frozen=True)
class StepReport:
    """What the loop says after a step.

    step: steps done, from 1. loss: the batch's mean. lr: the learning rate of the first group. tokens: of the batch,
    without padding; no more than the rows where these are no text. rows: of the batch. seconds: that the step took,
    waiting included. waited: seconds of these that the device had no batch. norm: of the gradient before clipping,
    where it was taken.
    """

    step: int
    loss: float
    lr: float
    tokens: int
    rows: int
    seconds: float
    waited: float
    norm: float | None = None

    @property
    def unit(self) -> str:
        """What the batch is counted in: tokens, or rows where they are no text."""
        return "tokens" if self.tokens > self.rows else "rows"

    @property
    def count(self) -> int:
        """Of the batch, in `unit`."""
        return max(self.tokens, self.rows)


class Observer(Protocol):
    """Somebody who is told of each step."""

    def step(self, report: StepReport) -> None:
        """A step is done."""

    def close(self) -> None:
        """The run is over, whatever the reason."""


@dataclass(frozen=True)
class Reading:
    """What follows from a report.

    speed: per second, of the report's `unit`. idle: share of the time, 0 to 1, that the
    device waited. mfu: model FLOPs utilisation, 0 to 1; None where nobody counts. memory: the most bytes in use so far.
    """

    speed: float
    unit: str
    idle: float
    mfu: float | None
    memory: int


class Gauge:
    """Works out the figures that every observer shows. The peak of a CUDA device counts from here on."""

    def __init__(self, device: torch.device, flops: Flops | None = None) -> None:
        self._device = device
        self._flops = flops
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self, report: StepReport) -> Reading:
        """The figures of one step."""
        seconds = max(report.seconds, 1e-9)
        return Reading(
            speed=report.count / seconds,
            unit=report.unit,
            idle=min(report.waited / seconds, 1.0),
            mfu=self._flops.utilisation(report.count, seconds) if self._flops else None,
            memory=peak_memory(self._device),
        )

    def notes(self) -> list[str]:
        """What the figures mean on this device."""
        if self._device.type == "cuda":
            memory = "peak memory: tensors on the device, as the allocator counts them"
        else:
            memory = "peak memory: all that the process holds (resident), Python and libraries included"
        return [memory, *([f"MFU: share {self._flops.peak}"] if self._flops else [])]


def peak_memory(device: torch.device) -> int:
    """The most bytes in use so far: of tensors on a CUDA device, else of the process, resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss begins with the size of the parent process; this does not
        found = [line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:")]
        if found:
            return int(found[0].split()[1]) * 1024
    if sys.platform == "win32":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Average:
    """An exponential moving average without the bias to its start (as in Adam, arXiv:1412.6980, section 3)."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> float:
        """The average with one more value; a value that is not finite is left out of it."""
        if math.isfinite(value):
            self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * value
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        return self.value

    @property
    def value(self) -> float:
        """Of the values so far; nan without any."""
        return self._sum / self._weight if self._weight else math.nan


class Progress:
    """A live line on a terminal, else a line for every tenth of the steps; on the standard error stream."""

    def __init__(
        self, total: int, gauge: Gauge, *, start: int = 0, quiet: bool = False, console: Console | None = None
    ) -> None:
        """total: steps of the whole run. start: steps that were done before it was resumed."""
        self._total, self._gauge, self._start = total, gauge, start
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._loss = Average()
        self._restart()
        for note in gauge.notes():
            self._console.print(Text(note, "dim"), soft_wrap=True)
        self._bar: progress.Progress | None = None
        if self._console.is_terminal and not self._console.quiet:
            figures = progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            bar = progress.BarColumn(bar_width=20)
            self._bar = progress.Progress(bar, progress.MofNCompleteColumn(), figures, console=self._console)
            self._task = self._bar.add_task("", total=total, completed=start)
            self._bar.start()

    def _restart(self) -> None:
        self._seconds, self._count, self._waited, self._used = Average(), Average(), Average(), Average()

    def step(self, report: StepReport) -> None:
        if report.step == self._start + 2:  # the first step warms up: it compiles, counts and allocates
            self._restart()
        reading = self._gauge.read(report)
        self._loss.add(report.loss)
        self._seconds.add(report.seconds)
        self._count.add(report.count)
        self._waited.add(report.waited)
        self._used.add(math.nan if reading.mfu is None else reading.mfu * report.seconds)
        line = self._line(report, reading)
        if self._bar:
            self._bar.update(self._task, completed=report.step, description=line)
        elif self._is_due(report.step):
            text = Text.assemble(("step", "green"), f" {report.step}/{self._total}  {line}")
            self._console.print(text, soft_wrap=True)

    def _is_due(self, step: int) -> bool:
        tenth = 10 * step // self._total > 10 * (step - 1) // self._total
        return tenth or step == self._start + 1

    def _line(self, report: StepReport, reading: Reading) -> str:
        seconds = max(self._seconds.value, 1e-9)
        loss = self._loss.value if math.isfinite(report.loss) else report.loss
        figures = [f"loss {loss:.4f}", f"{format_rate(self._count.value / seconds)} {reading.unit}/s"]
        if not math.isnan(self._used.value):
            figures.append(f"MFU {format_percent(self._used.value / seconds)}")
        figures += [
            f"peak {format_binary_bytes(reading.memory)}",
            f"waited {format_percent(self._waited.value / seconds)}",
        ]
        left = self._total - report.step
        return "  ".join([*figures, *([f"{format_clock(left * seconds)} left"] if left > 0 else [])])

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
