"""Losses of vectors: their directions, and their pairwise similarities within a batch."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from compress.distill.distillation_loss import DistillationLoss, LossTerms
from compress.distill.forward_pass import ForwardPass
from laconic.errors import UsageError


class CosineLoss(DistillationLoss):
    """1 - the cosine similarity of the student's and the teacher's vector, for each row."""

    def prepare(self, student: ForwardPass, teacher: ForwardPass) -> None:
        own, theirs = student.first.shape, teacher.first.shape
        if own != theirs or len(own) != 2:
            raise UsageError(
                f"the student's outputs have the shape {list(own[1:])} and its teacher's {list(theirs[1:])}; expected "
                f"one vector a row, of the same size. Keep the width of the model's last layer"
            )

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        found, wanted = normalize_vectors(student), normalize_vectors(teacher)
        return terms.sum_errors(1 - (found * wanted).sum(dim=1))


class SimilarityLoss(DistillationLoss):
    """The squared error of each row's cosine similarities with the other rows of the batch, the mean over those
    (similarity-preserving distillation: Tung & Mori, 2019, arXiv:1907.09682, with cosines in place of normalised dot
    products)."""

    compares_rows: ClassVar[bool] = True

    def loss(self, student: ForwardPass, teacher: ForwardPass, terms: LossTerms) -> Tensor:
        found, wanted = normalize_vectors(student), normalize_vectors(teacher)
        errors = (found @ found.T - wanted @ wanted.T).square()
        return terms.sum_errors(errors.sum(dim=1) / max(len(errors) - 1, 1))


def normalize_vectors(seen: ForwardPass) -> Tensor:
    """The first output as vectors of length 1, [rows, features] float32."""
    with torch.autocast(seen.first.device.type, enabled=False):
        return normalize(seen.first.float(), dim=-1)
