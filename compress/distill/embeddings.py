"""The teacher's vectors, and how alike they are, as targets."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from compress.distill.distill_stage import Distil
from compress.distill.distillation_loss import Imitation, Terms
from compress.distill.hooks import Pass
from laconic.errors import UsageError
from laconic.tasks.task import Task


class Vectors(Imitation):
    """1 - the cosine of the student's vector and the teacher's, for each row."""

    def fit(self, student: Pass, teacher: Pass) -> None:
        own, theirs = student.first.shape, teacher.first.shape
        if own != theirs or len(own) != 2:
            raise UsageError(
                f"the student's vectors are {list(own[1:])} numbers and its teacher's {list(theirs[1:])}; expected one "
                f"vector a row, of the same size. Keep the width of the model's last layer"
            )

    def loss(self, student: Pass, teacher: Pass, terms: Terms) -> Tensor:
        found, wanted = vectors(student), vectors(teacher)
        return terms.total(1 - (found * wanted).sum(dim=1))


class Similarities(Imitation):
    """The squared error of each row's cosines with the other rows of the batch, the mean over those (Tung and Mori,
    2019, arXiv:1907.09682, with cosines in the place of normalised products)."""

    compares: ClassVar[bool] = True

    def loss(self, student: Pass, teacher: Pass, terms: Terms) -> Tensor:
        found, wanted = vectors(student), vectors(teacher)
        errors = (found @ found.T - wanted @ wanted.T).square()
        return terms.total(errors.sum(dim=1) / max(len(errors) - 1, 1))


def vectors(seen: Pass) -> Tensor:
    """[rows, features] float32 of length 1."""
    with torch.autocast(seen.first.device.type, enabled=False):
        return normalize(seen.first.float(), dim=-1)


class Embedding(Distil):
    """Distil the original's vectors: their direction, and their cosines with one another within a batch.

    similarities: the weight of the second.
    """

    name: ClassVar[str] = "distill.embedding"

    similarities: float = Field(default=5.0, ge=0)

    def imitations(self, task: Task, layers: int) -> list[Imitation]:
        return [Vectors(), *([Similarities(self.similarities)] if self.similarities else [])]
