"""Distillation of text embeddings: the teacher's vectors and their pairwise similarities as targets."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from compress.distill.distill_stage import DistillStage
from compress.distill.distillation_loss import DistillationLoss
from compress.distill.losses import CosineLoss, SimilarityLoss
from laconic.tasks.task import Task


class EmbeddingDistillation(DistillStage):
    """Train on the original's embeddings: their directions, and their pairwise cosine similarities within a batch.

    similarity_weight: the weight of the second.
    """

    name: ClassVar[str] = "distill.embedding"
    renamed: ClassVar[Mapping[str, str]] = {**DistillStage.renamed, "similarities": "similarity_weight"}

    similarity_weight: float = Field(default=5.0, ge=0)

    def losses(self, task: Task, layers: int) -> list[DistillationLoss]:
        return [CosineLoss(), *([SimilarityLoss(self.similarity_weight)] if self.similarity_weight else [])]
