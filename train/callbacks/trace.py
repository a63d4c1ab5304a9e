"""Profiling a training run: time by torch's profiler and NVTX ranges, memory by snapshots of the CUDA allocator."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from laconic.errors import UsageError
from train.callbacks.callback import RunLog, StepReport
from train.step.train_state import PhaseContext

TRACE, TABLE = "trace.json.gz", "profile.txt"
"""The timeline for chrome://tracing or ui.perfetto.dev, and a table of the most expensive operators."""
RECORDED = 3
"""Steps that are recorded, after one that is skipped and one in which the profiler warms up."""
SILENT = "99"
"""A log level above all messages of the profiler, which else logs its start and stop to standard error."""
SNAPSHOT = "memory.pickle"
EVENTS = 100_000
"""The number of latest allocations in a snapshot, a few kB each."""


def chain_phases(*phases: PhaseContext) -> PhaseContext:
    """Make one phase context of several, entered in this order."""

    @contextmanager
    def enter_all(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for phase in phases:
                stack.enter_context(phase(name))
            yield

    return enter_all


def nvtx_phase(device: torch.device) -> PhaseContext:
    """Mark phases as NVTX ranges, for Nsight Systems; without CUDA as ranges of torch's profiler."""

    def mark(name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name) if device.type == "cuda" else record_function(name)

    return mark


class Profile(RunLog):
    """Profiles a few steps with torch.profiler, and writes TRACE and TABLE into a folder.

    Its `phase` marks the phases of steps. The recording of a run that ends early is written as far as it came.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self.files: list[Path] = []
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        plan = schedule(wait=1, warmup=1, active=RECORDED, repeat=1)
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
        self._profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    phase: PhaseContext = staticmethod(record_function)

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


class MemorySnapshot(RunLog):
    """Records every allocation on a CUDA device with its stack, and writes them when the run ends, even by an error.

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

    def close(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        dump_history(self.file)
        record_history(None)


def record_history(events: int | None) -> None:
    """Let the CUDA allocator record its latest events, at most `events`; None stops it.

    torch 2.13 documents this for users under private names only.
    """
    if events is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=events, stacks="python")


def dump_history(path: Path) -> None:
    """Write the recorded events of the allocator as a pickle for torch's viewer; Laconic never reads it."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
