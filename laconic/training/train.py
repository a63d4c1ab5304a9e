"""Train a checkpoint on a dataset: the kit, the feed, the snapshots and whoever watches, round the one loop."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from laconic import registry
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.errors import SourceError
from laconic.models.checkpoint import Checkpoint
from laconic.training.assembly import make_kit
from laconic.training.callbacks.energy import Energy
from laconic.training.callbacks.flops import Flops, device_peak
from laconic.training.callbacks.journal import Journal
from laconic.training.callbacks.monitor import Gauge, Observer, Progress
from laconic.training.callbacks.tensorboard import TensorBoard
from laconic.training.callbacks.trace import MemorySnapshot, Profile, ranges, spans
from laconic.training.data.batch_builder import Maker
from laconic.training.data.batch_loader import Feed
from laconic.training.data.batch_sampler import Order, row_lengths
from laconic.training.data.sample_store import identity
from laconic.training.loop import Event, Run, train
from laconic.training.parallel.distribute import spread
from laconic.training.parallel.ranks import Ranks
from laconic.training.settings import Parts, Training
from laconic.training.snapshots.snapshot import Snapshots
from laconic.training.step.objective import Objective
from laconic.training.step.parts import Kit
from laconic.training.step.step import step
from laconic.training.step.zero_masks import holding

LOG, BOARD, TRACE, SNAPSHOTS = "train.jsonl", "tensorboard", "trace", "snapshots"
RANK_SEEDS = 2**20
"""Between the seeds of two ranks, so that dropout is not the same in the rows of both."""

Judge = Callable[[Kit, int], None]
"""Looks at the model after so many steps: 0 (before a resumed run reads its snapshot), those of each epoch, and all."""


@dataclass(frozen=True)
class Watching:
    """What of a run is to be seen. trace: torch's profiler over a few steps. nvtx: phases as ranges. memory: every
    allocation on a CUDA device. tensorboard: event files. quiet: no progress."""

    trace: bool = False
    nvtx: bool = False
    memory: bool = False
    tensorboard: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Taught:
    """module: with what it has learned, on the CPU, the techniques taken off it. losses: of each step, those before an
    interruption included. waiting: a line on how long the device waited for data. energy: a line, where it was told.
    """

    module: nn.Module
    losses: Sequence[float]
    waiting: str
    energy: str


def teach(
    checkpoint: Checkpoint,
    dataset: Dataset,
    training: Training,
    folder: Path,
    *,
    ranks: Ranks,
    objective: Objective | None = None,
    watching: Watching | None = None,
    judge: Judge = lambda kit, done: None,
    cache: Cache | None = None,
    events: Sequence[Callable[[Kit], Event]] = (),
) -> Taught:
    """Train the module of a checkpoint, which is changed in place, and take the techniques off it again.

    folder: of this run alone; its snapshots are gone on from where there are any. events: each is made from the kit
    before the first step, and called after each step with the steps done. Weights that an earlier stage made zero, and
    no later one has broken, stay zero.
    Raises TrainingFailure, OutOfMemory, RecipeError; KeyboardInterrupt after SIGTERM, with a snapshot on the disk.
    """
    cache, watching = cache or Cache(), watching or Watching()
    objective = objective or registry.resolve("objective", checkpoint.task.objective).of(checkpoint.task, dataset)
    parts, steps = training.parts(), training.count(len(dataset.keys))
    order = Order(
        len(dataset.keys), training.batch, training.seed, ranks.rank, ranks.world, lengths=row_lengths(dataset)
    )
    made = (*holding(checkpoint, parts.techniques), *events)
    torch.manual_seed(training.seed)
    kit = make_kit(checkpoint.module, objective, parts, ranks.device, sharded=training.mesh.sharded)
    spread(kit, training, ranks)
    kit.assemble()
    schedule = kit.schedule = parts.schedule.build(kit.optimizer, steps)
    with checkpoint.task.truncated(training.length):
        judge(kit, 0)
        with Snapshots(folder / SNAPSHOTS) as snapshots:
            losses: list[float] = []
            batch = first_batch(objective, dataset, order, ranks.device)
            if snapshots.latest() is not None:
                losses = resume(kit, schedule, snapshots, batch)
            del batch
            start = len(losses)
            after = [event(kit) for event in made]
            feed = Feed(
                dataset,
                objective.collate,
                order,
                device=ranks.device,
                settings=training.feed,
                start=start,
                stop=steps,
                decoder=identity(checkpoint.task),
                cache=cache,
            )
            with feed, observed(kit, parts, ranks, folder, watching, start, steps, cache) as observers:
                run = Run(
                    steps=steps,
                    seed=training.seed + ranks.rank * RANK_SEEDS,
                    clip=training.clip,
                    every=training.every,
                    keep=keeping(snapshots, kit, schedule, losses),
                    epoch=order.steps,
                    judge=lambda done: judge(kit, done),
                    observers=observers,
                    events=after,
                )
                train(kit, feed, schedule, run, losses)
        judge(kit, steps)
    energy = next((each.describe() for each in observers if isinstance(each, Energy) and each.usage), "")
    return Taught(kit.finish().cpu(), losses, feed.report(), energy)


def keeping(
    snapshots: Snapshots, kit: Kit, schedule: LRScheduler, losses: Sequence[float]
) -> Callable[[int, bool], None]:
    """What writes a snapshot after so many steps."""
    return lambda done, wait: snapshots.save(done, state_of(kit, schedule, losses[:done]), wait=wait)


@contextmanager
def observed(
    kit: Kit, parts: Parts, ranks: Ranks, folder: Path, watching: Watching, start: int, steps: int, cache: Cache
) -> Iterator[list[Observer]]:
    """Everybody who watches the run, on its first rank; `kit.span` is theirs while it goes on."""
    if not ranks.first:
        yield []
        return
    low = any(technique.slot == "precision" for technique in parts.techniques.values())
    dtype = torch.bfloat16 if low else torch.float32
    learning = [parameter.numel() for parameter in kit.module.parameters() if parameter.requires_grad]
    everything = sum(parameter.numel() for parameter in kit.module.parameters())
    flops = Flops(device_peak(kit.device, dtype, cache), learning=sum(learning) / max(everything, 1))
    gauge = Gauge(kit.device, flops)
    profile = Profile(folder / TRACE, kit.device) if watching.trace else None
    makers: list[Callable[[], Observer]] = [lambda: profile] if profile else []
    makers += [
        lambda: Progress(steps, gauge, start=start, quiet=watching.quiet),
        lambda: Journal(folder / LOG, gauge, start=start),
        lambda: Energy.of(kit.device),
    ]
    if watching.tensorboard:
        makers.append(lambda: TensorBoard(folder / BOARD, gauge, start=start))
    if watching.memory:
        makers.append(lambda: MemorySnapshot(folder, kit.device))
    chosen = [flops.span, *([ranges(kit.device)] if watching.nvtx else []), *([profile.span] if profile else [])]
    kit.span = spans(*chosen)
    with ExitStack() as stack:
        observers: list[Observer] = []
        for make in makers:
            observers.append(make())
            stack.callback(observers[-1].close)
        yield observers


def state_of(kit: Kit, schedule: LRScheduler, losses: Sequence[float]) -> dict[str, Any]:
    """Everything that a snapshot keeps: the tensors themselves, not copies."""
    loop = {"losses": list(losses), "schedule": schedule.state_dict(), "scaler": kit.scaler.state_dict()}
    return {"model": kit.state(), "optimizer": kit.optimizer.state_dict(), "loop": {"json": json.dumps(loop)}}


def resume(kit: Kit, schedule: LRScheduler, snapshots: Snapshots, batch: dict[str, torch.Tensor]) -> list[float]:
    """Read the newest snapshot into the kit; gives the losses so far.

    An optimizer begins without a state, and so may the snapshot's have been, as that of plain SGD always is. Else one
    step is taken and forgotten, which makes the state, whatever the optimizer is, so that there is room to read into.
    """
    state = state_of(kit, schedule, [])
    try:
        snapshots.load(state)
    except SourceError:
        scaler, kit.scaler = kit.scaler, torch.amp.GradScaler(enabled=False)  # it would leave out a step that overflows
        step(kit, batch)
        kit.scaler = scaler
        state = state_of(kit, schedule, [])
        snapshots.load(state)
    for group, kept in zip(kit.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
        group.update({name: value for name, value in kept.items() if name != "params"})
    loop = json.loads(state["loop"]["json"])
    schedule.load_state_dict(loop["schedule"])
    if loop["scaler"]:
        kit.scaler.load_state_dict(loop["scaler"])
    return [float(loss) for loss in loop["losses"]]


def first_batch(objective: Objective, dataset: Dataset, order: Order, device: torch.device) -> dict[str, torch.Tensor]:
    """The batch of the first step. Raises DataError for what all rows lack, which is no one row's fault."""
    batch = Maker(dataset, dataset.samples, objective.collate).collated(order.batch(0))
    return {name: tensor.to(device) for name, tensor in batch.items()}
