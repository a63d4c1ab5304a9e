"""Healing: a short distillation from the original after a lossy stage, as long as the fidelity improves."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from compress.distill.distill_stage import DistillStage
from compress.distill.distillation_loss import DistillationLoss, OutputLoss
from compress.distill.healing_monitor import PERFECT, HealingMonitor
from compress.distill.losses import CosineLoss, HiddenStateLoss, SimilarityLoss, SoftTargetLoss
from laconic.config import NamedSettings
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import TorchContext
from laconic.tasks.task import Task
from laconic.tasks.training_needs import HealingLoss

EVALUATIONS = 20
"""Evaluations of a run, evenly spaced, if `eval_every` is not given."""

MIN_INTERVAL = 25
"""The fewest steps between two evaluations: one on 500 texts costs as much as some ten steps, and fewer are too
noisy."""

LOSSES: dict[HealingLoss, Callable[[float], DistillationLoss]] = {
    "hidden-states": lambda weight: HiddenStateLoss(weight=weight),
    "last-hidden-state": lambda weight: HiddenStateLoss("last", weight=weight),
    "outputs": OutputLoss,
    "probabilities": lambda weight: SoftTargetLoss(weight=weight),
    "similarities": SimilarityLoss,
    "vectors": CosineLoss,
}
"""The distillation losses that a task may name, made with their weight."""

LEARNING_RATE, LONG_RUN = 2e-4, 2880
"""The learning rate of a long healing, and the steps from which on it is long. From weights that were refitted after
pruning, a high rate first lowers the fidelity, and a short run has no time to recover. MiniLM that classifies, a
quarter of its heads and a third of its FFN units pruned, fidelity 0.9184: after 180 steps 0.9265 at 5e-5, 0.9216 at
1e-4, and nothing gained at 2e-4; embedding, 5e-4 took 0.963 to 0.933 in 280 of 2,800 steps."""


def default_optimizer(steps: int | None) -> NamedSettings:
    """Return the optimizer for so many steps, with a learning rate that falls with the root of their number below
    LONG_RUN."""
    share = 1.0 if steps is None else min(steps / LONG_RUN, 1.0)
    return NamedSettings(name="adamw", config={"lr": LEARNING_RATE * math.sqrt(share), "weight_decay": 0.01})


class Heal(DistillStage):
    """Distil with the losses that suit the task: for text embedding all hidden states, the vectors and their
    similarities; for classifiers all hidden states and the soft targets; for language models the soft targets and the
    last hidden states; for anything else the outputs.

    steps: at most. eval_every: steps between two measurements of the fidelity on the selection samples; the best
    weights are kept. patience: in the second half, training ends early when so many evaluations have reduced the
    distance to the original by no more than the share min_improvement; the schedule then ends within `eval_every`
    steps. minutes: a time limit, within which the schedule ends; the result then depends on the speed of the machine. A
    result that is worse than before is discarded. optimizer: by default AdamW, with a learning rate that grows with the
    root of the steps up to LEARNING_RATE.
    """

    name: ClassVar[str] = "distill.heal"
    renamed: ClassVar[Mapping[str, str]] = {
        **DistillStage.renamed,
        "look": "eval_every",
        "gain": "min_improvement",
    }

    steps: int | None = Field(default=1000, ge=1)
    eval_every: int | None = Field(default=None, ge=1)
    patience: int = Field(default=3, ge=1)
    min_improvement: float = Field(default=0.02, ge=0, lt=1)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    minutes: float | None = Field(default=None, gt=0)
    optimizer: NamedSettings = Field(default_factory=lambda settings: default_optimizer(settings.get("steps")))

    def losses(self, task: Task, layers: int) -> list[DistillationLoss]:
        return [LOSSES[name](weight) for name, weight in task.healing_losses(layers=layers > 0).items()]

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        def measure_fidelity(module: nn.Module) -> float:
            return float(context.fidelity(replace(checkpoint, module=module)).mean())

        monitor = HealingMonitor(
            checkpoint.module,
            context.work,
            measure_fidelity,
            every=self.eval_every or max(MIN_INTERVAL, self.count_steps(len(context.train.keys)) // EVALUATIONS),
            patience=self.patience,
            min_improvement=self.min_improvement,
            minutes=self.minutes,
        )
        steps = 0
        if monitor.before < PERFECT:
            steps = len(self.train(checkpoint, context, (monitor.event,), monitor.estimate_seconds).losses)
        figures = {
            "fidelity before": monitor.before,
            "fidelity after": monitor.evaluations[monitor.best],
            "steps": float(steps),
            "best step": float(monitor.best),
        }
        return checkpoint.after(self.make_record(self.name, checkpoint, context, figures), monitor.result())
