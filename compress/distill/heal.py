"""Healing: what a stage has harmed is learned again from the original, for as long as it pays."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from torch import nn

from compress.distill.distill_stage import Distil
from compress.distill.distillation_loss import Imitation
from compress.distill.embeddings import Similarities, Vectors
from compress.distill.features import Hidden
from compress.distill.healing_monitor import WHOLE, Course
from compress.distill.logits import Probabilities
from compress.distill.outputs import Outputs
from laconic.config import NamedSettings
from laconic.recipes.stage import TorchContext
from laconic.tasks.task import Task

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

LOOKS = 20
"""Into how many parts the looks part a run."""

APART = 25
"""Steps between two looks at the least: a look at 500 texts costs as much as some ten steps, and fewer say nothing."""

BESIDE = 0.3
"""The weight of the probabilities beside the hidden states, which say more about each layer. A MiniLM that tells 20
packages apart, with half of its heads and feed-forward units, after 600 steps: a divergence from the original of 0.057
so, and of 0.064 with a weight of 1; after 300 of them 0.089, 0.097, and 0.124 with 3 and no temperature."""

RATE, LONG = 2e-4, 2880
"""The rate of a long healing, and the steps from which on it is long. From weights that a cut was compensated in, a
high rate harms first, and a short run has no time to make that good. MiniLM that classifies, a quarter of its heads
and a third of its feed-forward units cut, fidelity 0.9184: after 180 steps 0.9265 at 5e-5, 0.9216 at 1e-4, and nothing
gained at 2e-4; embedding, 5e-4 took 0.963 to 0.933 in 280 of 2,800 steps."""


def gentle(steps: int | None) -> NamedSettings:
    """The optimizer for so many steps; for a long healing where their number is not given."""
    share = 1.0 if steps is None else min(steps / LONG, 1.0)
    return NamedSettings(name="adamw", config={"lr": RATE * math.sqrt(share), "weight_decay": 0.01})


class Heal(Distil):
    """Distil what suits the task: of text embedding all hidden states, the vectors and their similarities; of
    classifiers all hidden states, and the probabilities; of language models the probabilities and the last hidden
    states; of anything else the outputs.

    steps: at most. Every `look` steps the fidelity is measured on the samples to choose by, and the best
    weights are kept. In the second half it ends early where `patience` looks have made what is missing to the original
    less by no more than the share `gain`; the schedule is then brought to its end within `look` steps. minutes: no
    longer than that, the schedule brought to its end within them: what is learned then depends on the machine's speed.
    What is worse than before is thrown away. optimizer: if it is not given, AdamW at a rate that grows with the root of
    the steps, up to RATE.
    """

    name: ClassVar[str] = "distill.heal"

    steps: int | None = Field(default=1000, ge=1)
    look: int | None = Field(default=None, ge=1)
    patience: int = Field(default=3, ge=1)
    gain: float = Field(default=0.02, ge=0, lt=1)
    minutes: float | None = Field(default=None, gt=0)
    optimizer: NamedSettings = Field(default_factory=lambda given: gentle(given.get("steps")))

    def imitations(self, task: Task, layers: int) -> list[Imitation]:
        if task.name == "text-embedding":
            return [*([Hidden()] if layers else []), Vectors(), Similarities(5.0)]
        if task.name == "tensors":
            return [Outputs()]
        if task.name == "causal-lm" or not layers:
            return [Probabilities(), *([Hidden("last")] if layers else [])]
        return [Hidden(), Probabilities(weight=BESIDE)]

    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        def ask(module: nn.Module) -> float:
            return float(context.fidelity(replace(checkpoint, module=module)).mean())

        course = Course(
            checkpoint.module,
            context.work,
            ask,
            every=self.look or max(APART, self.count(len(context.train.keys)) // LOOKS),
            patience=self.patience,
            gain=self.gain,
            minutes=self.minutes,
        )
        taken = 0
        if course.before < WHOLE:
            taken = len(self.taught(checkpoint, context, (course.event,)).losses)
        figures = {
            "fidelity before": course.before,
            "fidelity after": course.looks[course.best],
            "steps": float(taken),
            "best step": float(course.best),
        }
        return checkpoint.after(self.record(checkpoint, context, figures), course.result())
