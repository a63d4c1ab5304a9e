"""The observers of a training run: which there are, and how they are attached to it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from laconic.cache import Cache
from train.callbacks.callback import RunLog
from train.callbacks.energy import Energy
from train.callbacks.flops import Flops, device_peak
from train.callbacks.journal import Journal
from train.callbacks.monitor import Progress, StepMeter
from train.callbacks.run_estimate import ReportPace, RunEstimate
from train.callbacks.tensorboard import TensorBoard
from train.callbacks.trace import MemorySnapshot, Profile, chain_phases, nvtx_phase
from train.parallel.rank_meter import RankMeter
from train.parallel.ranks import Ranks
from train.settings import TrainingComponents
from train.step.train_state import TrainState

LOG, BOARD, TRACE = "train.jsonl", "tensorboard", "trace"


@dataclass(frozen=True)
class ObserverSettings:
    """Which observers a run has. trace: torch's profiler over a few steps. nvtx: phases of a step as NVTX ranges.
    memory: every allocation on a CUDA device. tensorboard: event files. quiet: no progress display. report_pace: called
    with the time of a step once the first ones have been timed. report_start: called before the first step with the
    number of steps that a snapshot had done, 0 without one."""

    trace: bool = False
    nvtx: bool = False
    memory: bool = False
    tensorboard: bool = False
    quiet: bool = False
    report_pace: ReportPace | None = None
    report_start: Callable[[int], None] | None = None


@contextmanager
def observe(
    state: TrainState,
    components: TrainingComponents,
    ranks: Ranks,
    folder: Path,
    settings: ObserverSettings | None,
    cache: Cache,
    *,
    start: int,
) -> Iterator[list[RunLog]]:
    """Attach the observers of a run, and of the phases of its steps, for the body; they are closed after it. The first
    rank shows and writes; of several, each measures itself.

    folder: for logs and traces. start: steps that were done before it was resumed.
    """
    settings = settings or ObserverSettings()
    with ExitStack() as stack:
        observers: list[RunLog] = []

        def add(observer: RunLog) -> None:
            observers.append(observer)
            stack.callback(observer.close)

        energy = Energy.of(state.device)
        rank_meter = RankMeter(ranks, energy)
        phases = [nvtx_phase(state.device)] if settings.nvtx else []
        add(energy)
        if ranks.world > 1:
            add(rank_meter)
            phases.insert(0, rank_meter.phase)
        if ranks.is_first:
            if settings.report_start is not None:
                settings.report_start(start)
            flops = make_flops(state, components, cache)
            phases.insert(0, flops.phase)
            if settings.trace:
                profile = Profile(folder / TRACE, state.device)
                add(profile)
                phases.append(profile.phase)
            meter = StepMeter(state.device, flops, lambda: rank_meter.figures)
            for make in list_reports(state, meter, folder, settings, start):
                add(make())
        stack.enter_context(state.observe_phases(chain_phases(*phases)))
        yield observers


def list_reports(
    state: TrainState, meter: StepMeter, folder: Path, settings: ObserverSettings, start: int
) -> Iterator[Callable[[], RunLog]]:
    """Yield what makes the observers that show the steps, or write about them."""
    yield lambda: Progress(state.scheduler.steps, meter, start=start, quiet=settings.quiet)
    yield lambda: Journal(folder / LOG, meter, start=start)
    if report_pace := settings.report_pace:
        yield lambda: RunEstimate(state.scheduler.steps, report_pace, start=start)
    if settings.tensorboard:
        yield lambda: TensorBoard(folder / BOARD, meter, start=start)
    if settings.memory:
        yield lambda: MemorySnapshot(folder, state.device)


def make_flops(state: TrainState, components: TrainingComponents, cache: Cache) -> Flops:
    """Make the counter of the run's FLOPs, for its precision and its share of trainable parameters."""
    low = any(technique.slot == "precision" for technique in components.techniques.values())
    dtype = torch.bfloat16 if low else torch.float32
    trainable = sum(parameter.numel() for parameter in state.module.parameters() if parameter.requires_grad)
    everything = sum(parameter.numel() for parameter in state.module.parameters())
    return Flops(device_peak(state.device, dtype, cache), trainable=trainable / max(everything, 1))
