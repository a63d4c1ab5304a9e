"""What all stages that distil share: the original teaches, on the one training loop."""

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from compress.distill.distillation import Distillation
from compress.distill.distillation_loss import Imitation
from compress.distill.layer_mapping import Pair, pairs
from laconic import registry
from laconic.artifacts.record import Record
from laconic.config import NamedSettings
from laconic.errors import DataError
from laconic.hashing import code_version, hash_of
from laconic.progress import Step
from laconic.recipes.stage import Property, TorchContext, TorchStage
from laconic.tasks.task import Task
from laconic.training.loop import Event
from laconic.training.parallel.ranks import Ranks
from laconic.training.settings import Training
from laconic.training.step.objective import Objective
from laconic.training.step.parts import Kit
from laconic.training.train import Taught, Watching, teach

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint


class Distil(Training, TorchStage):
    """Train on the samples for learning to answer as the original does, without labels.

    labels: the share in the loss of what the task learns from labels, which the samples must have then.
    """

    trains = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    name: ClassVar[str]

    batch: int = Field(default=32, ge=1)
    epochs: float = Field(default=1.0, gt=0)
    optimizer: NamedSettings = NamedSettings(name="adamw", config={"lr": 5e-4, "weight_decay": 0.01})
    schedule: NamedSettings = NamedSettings(name="cosine")
    labels: float = Field(default=0.0, ge=0, lt=1)

    @abstractmethod
    def imitations(self, task: Task, layers: int) -> list[Imitation]:
        """What is to be alike. layers: how many the student shares with its teacher. Raises UsageError."""

    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        taught = self.taught(checkpoint, context)
        return checkpoint.after(self.record(checkpoint, context, {"last loss": taught.losses[-1]}), taught.module)

    def taught(
        self, checkpoint: "Checkpoint", context: TorchContext, events: tuple[Callable[[Kit], Event], ...] = ()
    ) -> Taught:
        """A copy of the checkpoint's module, with what it has learned."""
        # What is trained is changed in place, and the original is still to be asked.
        own = replace(checkpoint, module=copy.deepcopy(checkpoint.module))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        objective = self.objective(own, context, device)
        count = self.count(len(context.train.keys))
        with context.steps.step(self.name, count) as step:
            return teach(
                own,
                context.train,
                self,
                context.work,
                ranks=Ranks(device=device),
                objective=objective,
                watching=Watching(quiet=True),
                cache=context.cache,
                events=(*events, advancing(step)),
            )

    def objective(self, student: "Checkpoint", context: TorchContext, device: torch.device) -> Distillation:
        """What the student is taught by. Raises UsageError, DataError."""
        original = context.original
        teacher = original.module if device.type == "cpu" else copy.deepcopy(original.module)
        matched = matching(student, original)
        made = Distillation(
            context.task,
            teacher,
            self.imitations(context.task, len(matched)),
            own=self.own(context),
            share=self.labels,
        )
        made.fit(student.module, matched)
        return made

    def own(self, context: TorchContext) -> Objective | None:
        """What the task is taught by from data; None where nothing is learned from them but the teacher's answers.

        Raises DataError where labels are asked for, and there are none."""
        task, language = context.task, context.task.name == "causal-lm"
        if self.labels and not language and context.train.labels is None and context.train.per_row == 1:
            raise DataError(
                f"labels: {self.labels:g} of the loss is for labels, and {context.train.name} has none. Give each row "
                f"a 'label', or leave labels out"
            )
        if not self.labels and not language:
            return None
        objective: Objective = registry.resolve("objective", task.name).of(task, context.train)
        return objective

    def record(
        self,
        checkpoint: "Checkpoint",
        context: TorchContext,
        figures: dict[str, float],
        structure: dict[str, Any] | None = None,
    ) -> Record:
        """The step in the history."""
        config = self.model_dump(mode="json")
        key = hash_of(context.key, checkpoint.key, self.name, config, code_version(), context.train.fingerprint)
        return Record(stage=self.name, config=config, key=key, figures=figures, structure=structure or {})

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Nothing: training changes no structure."""


def matching(student: "Checkpoint", original: "Checkpoint") -> tuple[Pair, ...]:
    """Which layers of a student learn from which of the original's."""
    since = student.history[len(original.history) :]
    return pairs(student.module, original.module, since)


def advancing(step: Step) -> Callable[[Kit], Event]:
    """What shows how far training is."""

    def event(done: int) -> None:
        step.advance()

    return lambda kit: event
