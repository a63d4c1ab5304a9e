"""What each rank of a run does with its time, and how much it sends: measured on every rank, gathered in each step."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from train.callbacks.callback import RunLog, StepReport
from train.callbacks.energy import Energy
from train.callbacks.rank_figures import RankFigures
from train.parallel.collective_traffic import TrafficCounter, name_groups
from train.parallel.ranks import Ranks


class RankMeter(RunLog):
    """Measures its rank by the phases of the steps, and gathers the figures of all ranks; every rank needs one.

    figures: of the ranks in the step that was reported last, in their order.
    """

    def __init__(self, ranks: Ranks, energy: Energy) -> None:
        """energy: the observer of this rank's device."""
        self.figures: tuple[RankFigures, ...] = ()
        self._ranks, self._energy = ranks, energy
        self._traffic: TrafficCounter | None = None
        self._times: deque[StepTimes] = deque()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a step, and in it the schedule of a pipeline and its stages; count what the first step sends."""
        if name == "step":
            times, begin = StepTimes(self._ranks.device), time.thread_time()
            self._times.append(times)
            if self._traffic is None:
                self._traffic = TrafficCounter(name_groups(self._ranks), self._ranks.world)
                with self._traffic:
                    yield
            else:
                yield
            times.processor = time.thread_time() - begin
        elif name == "pipeline" or name.startswith("stage "):
            times = self._times[-1]
            with (times.schedule if name == "pipeline" else times.stages).measure():
                yield
        else:
            yield

    def step(self, report: StepReport) -> None:
        times, seconds = self._times.popleft(), max(report.seconds, 1e-9)
        is_processor = self._ranks.device.type == "cpu"
        busy = times.processor / seconds if is_processor else self._energy.read_busy()
        sent = self._traffic.sent if self._traffic else 0
        self.figures = self._gather(RankFigures(busy, min(report.waited / seconds, 1.0), times.bubble, round(sent)))

    def _gather(self, own: RankFigures) -> tuple[RankFigures, ...]:
        """Return the figures of all ranks. A figure that a rank does not have travels as NaN."""
        table = torch.zeros(self._ranks.world, 4, dtype=torch.float64)
        values = (own.busy, own.waited, own.bubble, own.sent)
        table[self._ranks.rank] = torch.tensor([math.nan if value is None else value for value in values])
        dist.all_reduce(table)
        rows: list[list[float]] = table.tolist()
        return tuple(
            RankFigures(drop_nan(busy), waited, drop_nan(bubble), round(sent)) for busy, waited, bubble, sent in rows
        )


class Stopwatch:
    """Adds up durations: on a CUDA device those of its work, which is done when they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the duration of the body."""
        begin = self._mark()
        yield
        self._spans.append((begin, self._mark()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        if self._device.type == "cuda":
            return float(sum(begin.elapsed_time(end) for begin, end in self._spans)) / 1e3
        return float(sum(end - begin for begin, end in self._spans))


@dataclass
class StepTimes:
    """Times of a step. processor: seconds of the thread. schedule: of a pipeline. stages: of this rank in it."""

    device: torch.device
    processor: float = 0.0
    schedule: Stopwatch = field(init=False)
    stages: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.schedule, self.stages = Stopwatch(self.device), Stopwatch(self.device)

    @property
    def bubble(self) -> float | None:
        """Share of the schedule in which no stage runs; None without one."""
        whole = self.schedule.seconds
        return max(0.0, 1 - self.stages.seconds / whole) if whole else None


def drop_nan(value: float) -> float | None:
    """Return a number, and None in place of NaN."""
    return None if math.isnan(value) else value
