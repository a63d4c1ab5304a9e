"""Reports of training steps, the figures derived from them, and the observer that shows progress."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from laconic.units import format_binary_bytes, format_clock, format_percent, format_rate
from train.callbacks.callback import RunLog, StepReport
from train.callbacks.flops import Flops
from train.callbacks.rank_figures import RankFigures, describe_ranks

if sys.platform != "win32":
    import resource

SMOOTHING = 0.9
"""Weight of the past in a moving average, over about ten steps."""


@dataclass(frozen=True)
class StepFigures:
    """Figures derived from the report of a step.

    speed: throughput per second, in `unit`. idle: share of the time, 0 to 1, that the device waited for data. mfu:
    model FLOPs utilization, 0 to 1; None without a counter. memory: peak bytes in use so far. ranks: figures of each
    rank; empty where there is one.
    """

    speed: float
    unit: str
    idle: float
    mfu: float | None
    memory: int
    ranks: tuple[RankFigures, ...] = ()


class StepMeter:
    """Derives the figures that all observers show. Resets the peak memory of a CUDA device."""

    def __init__(
        self,
        device: torch.device,
        flops: Flops | None = None,
        read_ranks: Callable[[], tuple[RankFigures, ...]] = tuple,
    ) -> None:
        """read_ranks: returns the figures of all ranks in the step that is reported; none where there is one."""
        self._device = device
        self._flops, self._read_ranks = flops, read_ranks
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self, report: StepReport) -> StepFigures:
        """Derive the figures of a step."""
        seconds = max(report.seconds, 1e-9)
        return StepFigures(
            speed=report.count / seconds,
            unit=report.unit,
            idle=min(report.waited / seconds, 1.0),
            mfu=self._flops.utilization(report.count, seconds) if self._flops else None,
            memory=peak_memory(self._device),
            ranks=self._read_ranks(),
        )

    def notes(self) -> list[str]:
        """Explain the figures on this device, in a line each."""
        if self._device.type == "cuda":
            memory = "peak memory: tensors on the device, as the allocator counts them"
        else:
            memory = "peak memory: all that the process holds (resident), Python and libraries included"
        return [memory, *([f"MFU: share {self._flops.peak}"] if self._flops else [])]


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes in use so far: of tensors on a CUDA device, else resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss starts at the size of the parent process; this does not
        peaks = [line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:")]
        if peaks:
            return int(peaks[0].split()[1]) * 1024
    if sys.platform == "win32":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class MovingAverage:
    """An exponential moving average with bias correction (as in Adam, arXiv:1412.6980, section 3)."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> float:
        """Add a value, and give the average; a value that is not finite is ignored."""
        if math.isfinite(value):
            self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * value
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        return self.value

    @property
    def value(self) -> float:
        """Average of the values so far; nan without any."""
        return self._sum / self._weight if self._weight else math.nan


class Progress(RunLog):
    """Shows progress on standard error: a live line on a terminal, else a line for every tenth of the steps."""

    def __init__(
        self, total: int, meter: StepMeter, *, start: int = 0, quiet: bool = False, console: Console | None = None
    ) -> None:
        """total: steps of the whole run. start: steps done before it was resumed."""
        self._total, self._meter, self._start = total, meter, start
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._loss = MovingAverage()
        self._restart()
        for note in meter.notes():
            self._console.print(Text(note, "dim"), soft_wrap=True)
        self._bar: progress.Progress | None = None
        if self._console.is_terminal and not self._console.quiet:
            figures = progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            bar = progress.BarColumn(bar_width=20)
            self._bar = progress.Progress(bar, progress.MofNCompleteColumn(), figures, console=self._console)
            self._task = self._bar.add_task("", total=total, completed=start)
            self._bar.start()

    def _restart(self) -> None:
        self._seconds, self._count, self._waited, self._used = (
            MovingAverage(),
            MovingAverage(),
            MovingAverage(),
            MovingAverage(),
        )

    def step(self, report: StepReport) -> None:
        if report.step == self._start + 2:  # the first step warms up: it compiles, counts and allocates
            self._restart()
        measured = self._meter.read(report)
        self._loss.add(report.loss)
        self._seconds.add(report.seconds)
        self._count.add(report.count)
        self._waited.add(report.waited)
        self._used.add(math.nan if measured.mfu is None else measured.mfu * report.seconds)
        line = self._line(report, measured)
        if self._bar:
            self._bar.update(self._task, completed=report.step, description=line)
        elif self._is_due(report.step):
            text = Text.assemble(("step", "green"), f" {report.step}/{self._total}  {line}")
            self._console.print(text, soft_wrap=True)

    def _is_due(self, step: int) -> bool:
        tenth = 10 * step // self._total > 10 * (step - 1) // self._total
        return tenth or step == self._start + 1

    def _line(self, report: StepReport, measured: StepFigures) -> str:
        seconds = max(self._seconds.value, 1e-9)
        loss = self._loss.value if report.is_skipped or math.isfinite(report.loss) else report.loss
        figures = [f"loss {loss:.4f}", f"{format_rate(self._count.value / seconds)} {measured.unit}/s"]
        if not math.isnan(self._used.value):
            figures.append(f"MFU {format_percent(self._used.value / seconds)}")
        figures += [
            f"peak {format_binary_bytes(measured.memory)}",
            f"waited {format_percent(self._waited.value / seconds)}",
            *describe_ranks(measured.ranks),
        ]
        left = self._total - report.step
        return "  ".join([*figures, *([f"{format_clock(left * seconds)} left"] if left > 0 else [])])

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
