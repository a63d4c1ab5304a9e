"""Train a checkpoint on a dataset: the step, the batches, the snapshots and the observers around the training loop."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from laconic import registry
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.models.adapter import Adapter
from laconic.models.checkpoint import Checkpoint
from laconic.tasks.task import Task
from train.callbacks.callback import RunLog
from train.callbacks.energy import Energy
from train.data.batch_builder import BatchBuilder
from train.data.batch_loader import BatchLoader, most_workers
from train.data.batch_sampler import WINDOW, BatchSampler, row_lengths
from train.data.dali_images import DaliImages
from train.data.sample_store import decoder_key
from train.loop import LoopSettings, run_steps
from train.observers import ObserverSettings, observe
from train.parallel.pipeline import PipelineSettings, make_pipeline
from train.parallel.ranks import Ranks
from train.reference_rows import complete_rows
from train.run_snapshot import open_snapshots, resume, save_snapshot
from train.settings import Training
from train.snapshots.snapshot import Snapshots
from train.step.objective import Batch, Objective
from train.step.sparsity_masks import mask_weights, must_keep_zeros
from train.step.train_state import StepCallback, StepCallbackFactory, TrainState
from train.step_assembly import distribute_step, make_step_parts

log = logging.getLogger("laconic.train")

SNAPSHOTS = "snapshots"
LEAST_WINDOWS = 2
"""Rows are grouped by length where they fill so many of the sampler's windows. In a smaller set the same rows would
meet in every epoch."""
RANK_SEEDS = 2**20
"""Distance between the seeds of two ranks with rows of their own, so that these have different dropout."""

Evaluate = Callable[[TrainState, int], bool]
"""Evaluates the model after a number of steps, 0 before a resumed run loads its snapshot; True ends the run. A resumed
run evaluates once more after the step that it resumes from, so that a run which was over stays so."""


@dataclass(frozen=True)
class TrainResult:
    """module: the trained model, on the CPU, without the techniques. losses: of each step, those before an interruption
    included; NaN for a batch that had no loss term and was skipped. waiting: how long the device waited for data, in a
    line. energy: what the device consumed, in a line; empty where it was not measured. adapter: what was trained, where
    it is kept apart from the weights of its model."""

    module: nn.Module
    losses: Sequence[float]
    waiting: str
    energy: str
    adapter: Adapter | None = None

    @property
    def skipped(self) -> int:
        """Number of batches that had no loss term."""
        return sum(map(math.isnan, self.losses))

    @property
    def last_loss(self) -> float:
        """Loss of the last batch that had one."""
        return next(loss for loss in reversed(self.losses) if not math.isnan(loss))


def train(
    checkpoint: Checkpoint,
    dataset: Dataset,
    training: Training,
    folder: Path,
    *,
    ranks: Ranks,
    objective: Objective | None = None,
    observers: ObserverSettings | None = None,
    evaluate: Evaluate = lambda state, steps: False,
    eval_every: int | None = None,
    conclude: Callable[[TrainState, int], None] = lambda state, steps: None,
    cache: Cache | None = None,
    callbacks: Sequence[StepCallbackFactory] = (),
    logs: Sequence[RunLog] = (),
) -> TrainResult:
    """Train the module of a checkpoint, which is changed in place.

    folder: of this run alone, which is resumed from the snapshots in it. objective: the task's by default. eval_every:
    steps between two evaluations; an epoch by default. conclude: called with the steps done before the techniques are
    removed. logs: told of each step. Raises TrainingFailure, OutOfMemory, RecipeError; KeyboardInterrupt on SIGTERM.
    """
    cache, task, components = cache or Cache(), checkpoint.task, training.components()
    objective = objective or registry.resolve("objective", task.objective).of(task, dataset)
    with task.truncated(training.max_length):
        dataset = objective.prepare_rows(dataset)
    sampler, images = make_sampler(checkpoint, dataset, training, ranks), open_images(task, dataset, training, ranks)
    steps, every = training.count_steps(len(dataset.keys)), eval_every or sampler.steps
    is_pruned = must_keep_zeros(checkpoint.history, components.techniques, training.mesh.zero)
    with task.truncated(training.max_length), task.padded(components.padding_multiple):
        first = first_batch(objective, dataset, sampler)
        pipeline = make_pipeline(training.mesh, ranks, first)
        state = start_training(checkpoint.module, objective, training, ranks, steps, pipeline)
        dataset = complete_rows(state, dataset, folder, training.batch_size)
        masks = [mask_weights(state)] if is_pruned else []
        evaluate(state, 0)
        with open_snapshots(folder / SNAPSHOTS) as snapshots:
            losses = resume(state, snapshots, {name: tensor.to(ranks.device) for name, tensor in first.items()})
            ended = bool(losses) and len(losses) < steps and len(losses) % every == 0 and evaluate(state, len(losses))
            after = [*masks, *(make(state) for make in callbacks)]
            settings = make_loop_settings(state, training, ranks, snapshots, losses, evaluate, every, after)
            with (
                make_loader(state, task, dataset, sampler, training, cache, images, start=len(losses)) as loader,
                observe(state, components, ranks, folder, observers, cache, start=len(losses)) as seen,
            ):
                if not ended:
                    run_steps(state, loader, settings, losses, [*seen, *logs])
            state.keep_averages()
            conclude(state, len(losses))
    return make_result(state, losses, loader.report(), seen, ranks)


def make_result(
    state: TrainState, losses: Sequence[float], waiting: str, observers: Sequence[RunLog], ranks: Ranks
) -> TrainResult:
    """Make the result of a run that has ended, without the techniques; warn of batches that were skipped."""
    energy = next(
        (observer.describe() for observer in observers if isinstance(observer, Energy) and observer.usage), ""
    )
    result = TrainResult(state.finish().cpu(), losses, waiting, energy, state.modules.adapter)
    if result.skipped and ranks.is_first:
        log.warning(
            f"{result.skipped} of {len(losses)} batches had no loss term (all labels masked, ignored or empty), and "
            f"were skipped"
        )
    return result


def start_training(
    module: nn.Module,
    objective: Objective,
    training: Training,
    ranks: Ranks,
    steps: int,
    pipeline: PipelineSettings | None = None,
) -> TrainState:
    """Make the training state before the first of `steps` steps: techniques applied, optimizer and scheduler made."""
    components = training.components()
    torch.manual_seed(training.seed)
    parts = make_step_parts(
        module,
        objective,
        components,
        ranks.device,
        sharded=training.mesh.is_sharded,
        tensor=ranks.select_axes("tensor"),
        sequence=training.mesh.sequence,
        context=ranks.context,
        pipeline=pipeline,
    )
    distribute_step(parts, training, ranks)
    state = parts.assemble()
    state.scheduler = components.schedule.build(state.optimizer, steps)
    return state


def make_sampler(checkpoint: Checkpoint, dataset: Dataset, training: Training, ranks: Ranks) -> BatchSampler:
    """Make the sampler of this rank's rows, grouped by length where that is asked for and the set is large enough.
    Batch normalization needs two rows in a batch."""
    is_normalized = any(getattr(part, "running_mean", None) is not None for part in checkpoint.module.modules())
    rows, fewest = len(dataset.keys), 2 if is_normalized else 1
    grouped = training.group_by_length and rows >= LEAST_WINDOWS * WINDOW * training.batch_size
    lengths = row_lengths(dataset) if grouped else None
    return BatchSampler(rows, training.batch_size, training.seed, ranks.data_rank, ranks.data_world, lengths, fewest)


def make_loop_settings(
    state: TrainState,
    training: Training,
    ranks: Ranks,
    snapshots: Snapshots,
    losses: Sequence[float],
    evaluate: Evaluate,
    every: int,
    callbacks: Sequence[StepCallback],
) -> LoopSettings:
    """Make the settings of the loop. losses: of each step so far, which the loop appends to."""

    def save(done: int, wait: bool) -> None:
        with state.phase("snapshot"):
            save_snapshot(snapshots, state, losses[:done], wait=wait)

    return LoopSettings(
        steps=state.scheduler.steps,
        seed=training.seed + ranks.seed_rank * RANK_SEEDS,
        max_grad_norm=training.max_grad_norm,
        snapshot_every=training.snapshot_every,
        save=save,
        eval_every=every,
        evaluate=lambda done: evaluate(state, done),
        callbacks=callbacks,
    )


def open_images(task: Task, dataset: Dataset, training: Training, ranks: Ranks) -> DaliImages | None:
    """Open what decodes the images of training, where that is not the task. Raises RecipeError, MissingPackage."""
    if training.loader.image_backend == "pillow":
        return None
    return DaliImages(task, dataset, device=ranks.device, threads=most_workers())


def make_loader(
    state: TrainState,
    task: Task,
    dataset: Dataset,
    sampler: BatchSampler,
    training: Training,
    cache: Cache,
    images: DaliImages | None,
    *,
    start: int,
) -> BatchLoader:
    """Make the loader of the steps from `start` to the end of the schedule."""
    return BatchLoader(
        dataset,
        state.objective.collate,
        sampler,
        device=state.device,
        settings=training.loader,
        start=start,
        stop=state.scheduler.steps,
        decoder=decoder_key(task),
        cache=cache,
        images=images,
    )


def first_batch(objective: Objective, dataset: Dataset, sampler: BatchSampler) -> Batch:
    """Build the batch of the first step. Raises DataError for what all rows lack, which is no single row's fault."""
    return BatchBuilder(dataset, dataset.samples, objective.collate).collate(sampler.batch(0))
