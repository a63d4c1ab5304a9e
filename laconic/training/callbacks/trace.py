"""To look into a training run: where the time goes (torch's profiler, NVTX) and who holds the memory (a snapshot)."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from laconic.errors import UsageError
from laconic.training.callbacks.monitor import StepReport
from laconic.training.step.parts import Span

TRACE, TABLE = "trace.json.gz", "profile.txt"
"""The time-line for chrome://tracing or ui.perfetto.dev, and the operations that cost most."""
SILENT = "99"
"""Above all levels of the profiler's own log, which else tells the standard error stream when it starts and stops."""
SNAPSHOT = "memory.pickle"
EVENTS = 100_000
"""Allocations that a snapshot remembers: the last so many, a few kB each."""


def spans(*each: Span) -> Span:
    """One span of several, entered in this order."""

    @contextmanager
    def all_of_them(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for span in each:
                stack.enter_context(span(name))
            yield

    return all_of_them


def ranges(device: torch.device) -> Span:
    """Phases as NVTX ranges, which Nsight Systems shows; without CUDA as ranges of torch's profiler."""

    def span(name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name) if device.type == "cuda" else record_function(name)

    return span


class Profile:
    """Profiles a few steps with torch.profiler, and writes TRACE and TABLE into a folder.

    It is an observer of steps, and has a `span` that names their phases. The profiler is at work from the beginning,
    and records after `wait` steps and `warmup` more; a run that ends within the recording is written as far as it came.
    """

    def __init__(self, folder: Path, device: torch.device, *, wait: int = 1, warmup: int = 1, active: int = 3) -> None:
        """wait: steps to let pass; warmup: of the profiler itself; active: that are recorded."""
        if wait < 0 or min(warmup, active) < 1:
            raise UsageError(
                f"a profile cannot be of {active} steps after {wait} and {warmup} of warm-up; expected wait >= 0, "
                f"warmup >= 1 and active >= 1"
            )
        self._folder, self._device = folder, device
        self.files: list[Path] = []
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
        self._profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    span: Span = staticmethod(record_function)

    def step(self, report: StepReport) -> None:
        self._profiler.step()

    def close(self) -> None:
        self._profiler.stop()

    def _write(self, profiler: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.files = [self._folder / TRACE, self._folder / TABLE]
        profiler.export_chrome_trace(str(self.files[0]))
        order = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=48)
        self.files[1].write_text(table + "\n", encoding="utf-8")


class MemorySnapshot:
    """Every allocation on a CUDA device with the line that made it, written when the run ends, even by an error.

    `python -m torch.cuda._memory_viz trace_plot memory.pickle -o memory.html` makes a page of it. Raises UsageError on
    other devices, whose allocators keep no history.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        if device.type != "cuda":
            raise UsageError(
                f"a memory snapshot needs a CUDA device, and this run is on {device.type!r}, whose allocator keeps no "
                f"history. Use the memory time-line instead: `laconic plan` draws it for any device"
            )
        self.file = folder / SNAPSHOT
        record_history(EVENTS)

    def step(self, report: StepReport) -> None:
        """Nothing: the allocator records by itself."""

    def close(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        dump_history(self.file)
        record_history(None)


def record_history(events: int | None) -> None:
    """Let the CUDA allocator remember its last so many events; None: no longer.

    torch documents this for users under names with an underscore, and has no others (2.13).
    """
    if events is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=events, stacks="python")


def dump_history(path: Path) -> None:
    """Write what the allocator remembers, as a pickle for torch's own viewer; Laconic never reads it."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
