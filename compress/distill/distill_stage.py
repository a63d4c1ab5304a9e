"""The base of all distillation stages: the original is the teacher, in the ordinary training loop,
and each layer of the student learns from the layers of the teacher that it replaces."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from compress.distill.distillation_loss import DistillationLoss, LayerPair
from compress.distill.distillation_objective import DistillationObjective
from compress.transformer.refit_blocks import find_counterparts
from laconic import registry
from laconic.artifacts.record import Record
from laconic.config import NamedSettings
from laconic.errors import DataError, SourceError
from laconic.models.anatomy import anatomy
from laconic.models.checkpoint import Checkpoint
from laconic.models.repeated_layers import find_layer_lists
from laconic.progress import Step
from laconic.recipes.stage import Property, TorchContext, TorchStage
from laconic.tasks.task import Task
from train.callbacks.run_estimate import format_estimate
from train.observers import ObserverSettings
from train.parallel.ranks import Ranks
from train.settings import Training
from train.step.objective import Objective
from train.step.train_state import StepCallbackFactory
from train.trainer import TrainResult, train


class DistillStage(Training, TorchStage):
    """Train on the training samples to give the original's outputs, without labels (knowledge distillation).

    label_weight: the share of the task's own loss on labels, which the samples must have then. tail_weight: the
    weight of the worst quarter of each batch, which is added to the mean over the batch.
    """

    trains = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    name: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {**Training.renamed, "labels": "label_weight"}

    batch_size: int = Field(default=32, ge=1)
    epochs: float = Field(default=1.0, gt=0)
    optimizer: NamedSettings = NamedSettings(name="adamw", config={"lr": 5e-4, "weight_decay": 0.01})
    schedule: NamedSettings = NamedSettings(name="cosine")
    label_weight: float = Field(default=0.0, ge=0, lt=1)
    tail_weight: float = Field(default=0.0, ge=0)

    @abstractmethod
    def losses(self, task: Task, layers: int) -> list[DistillationLoss]:
        """Return the losses, which are added up. layers: how many layer pairs student and teacher have. Raises
        UsageError."""

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        trained = self.train(checkpoint, context)
        record = self.make_record(self.name, checkpoint, context, {"last loss": trained.last_loss})
        return checkpoint.after(record, trained.module)

    def train(
        self,
        checkpoint: Checkpoint,
        context: TorchContext,
        callbacks: tuple[StepCallbackFactory, ...] = (),
        estimate_callbacks: Callable[[int], float] = lambda left: 0.0,
    ) -> TrainResult:
        """Train a copy of the checkpoint's module. callbacks: made with the training state, called after each step.
        estimate_callbacks: the seconds that these take in so many steps."""
        # The module is trained in place, and the original is still needed.
        student = replace(checkpoint, module=copy.deepcopy(checkpoint.module))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        objective = self.objective(student, context, device)
        count = self.count_steps(len(context.train.keys))

        def report_pace(seconds: float, left: int) -> None:
            context.steps.report("estimated time", format_estimate(seconds, left, estimate_callbacks(left)))

        with context.steps.step(self.name, count) as step:
            return train(
                student,
                context.train,
                self,
                context.work,
                ranks=Ranks(device=device),
                objective=objective,
                observers=ObserverSettings(quiet=True, report_pace=report_pace),
                cache=context.cache,
                callbacks=(*callbacks, make_progress_callback(step)),
            )

    def objective(self, student: Checkpoint, context: TorchContext, device: torch.device) -> DistillationObjective:
        """Return the training objective of a student. Raises UsageError, DataError."""
        original = context.original
        teacher = original.module if device.type == "cpu" else copy.deepcopy(original.module)
        pairs = pair_layers(student.module, original.module, student.history[len(original.history) :])
        made = DistillationObjective(
            context.task,
            teacher,
            self.losses(context.task, len(pairs)),
            task_objective=self.task_objective(context),
            task_weight=self.label_weight,
            tail_weight=self.tail_weight,
        )
        made.prepare(student.module, pairs)
        return made

    def task_objective(self, context: TorchContext) -> Objective | None:
        """Return the task's own objective; None if only the teacher's outputs are learned.

        Raises DataError if labels have a weight and the samples have none."""
        task = context.task
        if (
            self.label_weight
            and not task.self_supervised
            and context.train.labels is None
            and context.train.per_row == 1
        ):
            raise DataError(
                f"label_weight: {self.label_weight:g} of the loss is for labels, and {context.train.name} has none. "
                f"Give each row a 'label', or leave label_weight out"
            )
        if not self.label_weight and not task.self_supervised:
            return None
        objective: Objective = registry.resolve("objective", task.objective).of(task, context.train)
        return objective

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Do nothing: training changes no structure."""


def make_progress_callback(step: Step) -> StepCallbackFactory:
    """Return a callback that advances the progress display by a training step."""

    def callback(done: int) -> None:
        step.advance()

    return lambda state: callback


def pair_layers(student: nn.Module, teacher: nn.Module, history: Sequence[Record] = ()) -> tuple[LayerPair, ...]:
    """Return the pairs of repeated layers, in order; none if the teacher has none, or the student's are elsewhere.

    history: of the student, since it equalled the teacher. It tells which layers were removed; otherwise the remaining
    ones are assumed to be evenly spaced. A layer also replaces the removed layers behind it, so that the next layer
    gets the input that it had (with even spacing, the mapping of TinyBERT: Jiao et al., 2020, arXiv:1909.10351).
    """
    pairs: list[LayerPair] = []
    for name in find_stacks(teacher):
        try:
            left = [child for child, _ in student.get_submodule(name).named_children()]
        except AttributeError:
            return ()
        whole = [child for child, _ in teacher.get_submodule(name).named_children()]
        ends = last_replaced(find_counterparts(history, len(whole)), len(left), len(whole))
        starts = [0, *(end + 1 for end in ends[:-1])]
        pairs += [
            LayerPair(f"{name}.{child_name}", f"{name}.{whole[start]}", f"{name}.{whole[end]}")
            for child_name, start, end in zip(left, starts, ends, strict=True)
        ]
    return tuple(pairs)


def find_stacks(module: nn.Module) -> list[str]:
    """Return the names of a model's lists of repeated layers."""
    try:
        return list(anatomy(module).stacks)
    except SourceError:
        names = {id(part): name for name, part in module.named_modules()}
        return [names[id(stack)] for stack in find_layer_lists(module)]


def last_replaced(kept: Sequence[int], count: int, whole: int) -> list[int]:
    """Return for each of a student's `own` layers, the last of the teacher's `whole` layers that it replaces.

    kept: the indices that the student's layers had in the teacher, if they are known.
    """
    if len(kept) != count:
        return [-(-(index + 1) * whole // count) - 1 for index in range(count)]
    return [*(after - 1 for after in kept[1:]), whole - 1]
