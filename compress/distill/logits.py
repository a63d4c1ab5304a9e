"""Logit distillation: the teacher's class or token probabilities as soft targets."""

from typing import ClassVar

from pydantic import Field

from compress.distill.distill_stage import DistillStage
from compress.distill.distillation_loss import DistillationLoss
from compress.distill.losses import SoftTargetLoss
from laconic.errors import UsageError
from laconic.tasks.task import Task


class LogitDistillation(DistillStage):
    """Train on the original's probabilities: for classifiers and language models.

    temperature: softens both distributions, so that unlikely classes count.
    """

    name: ClassVar[str] = "distill.logits"

    temperature: float = Field(default=2.0, gt=0)

    def losses(self, task: Task, layers: int) -> list[DistillationLoss]:
        if not task.has_logits:
            raise UsageError(
                "distill.logits is for classes, and this model answers with vectors. Take distill.embedding"
            )
        return [SoftTargetLoss(self.temperature)]
