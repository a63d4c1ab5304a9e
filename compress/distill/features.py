"""Feature distillation: the teacher's hidden states as targets."""

from typing import ClassVar

from compress.distill.distill_stage import DistillStage
from compress.distill.distillation_loss import (
    DistillationLoss,
)
from compress.distill.losses import HiddenStateLoss, Layers
from laconic.tasks.task import Task


class FeatureDistillation(DistillStage):
    """Train on the hidden states of the original's layers.

    layers: all, or the last. project: train projections between the widths, as in `HiddenStateLoss`.
    """

    name: ClassVar[str] = "distill.features"

    layers: Layers = "all"
    project: bool | None = None

    def losses(self, task: Task, layers: int) -> list[DistillationLoss]:
        return [HiddenStateLoss(self.layers, self.project)]
