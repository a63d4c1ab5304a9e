"""Objectives of text embedding, which compare the vectors of a batch, and the choice of one for a dataset."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from laconic.data.dataset import Dataset
from laconic.errors import DataError
from laconic.tasks.task import Task
from train.step.objective import TARGETS, Batch, Objective, first_output, to_tensors

SCALE, TEMPERATURE = 20.0, 0.05
"""What cosines are multiplied by, or divided by, before a softmax, as in sentence-transformers."""


class EmbeddingObjective(Objective):
    """Compares the vectors of a batch with one another, so a batch cannot be taken apart."""

    splittable = False

    def batch(self, samples: Sequence[Any], targets: Tensor) -> Batch:
        """Encode the texts, with what is to be learned about each, [texts]."""
        return to_tensors(self.task.encode(samples)) | {TARGETS: targets}

    def vectors(self, module: nn.Module, batch: Batch) -> Tensor:
        """Embed the texts of a batch, [texts, features] float32 of length 1: their products are cosines."""
        return normalize(first_output(module, batch).float(), dim=-1)

    def filled(self, texts: int, length: int) -> Batch:
        """Make an example of so many texts, each with a target of its own."""
        return to_tensors(self.task.typical(texts, length)) | {TARGETS: torch.arange(texts)}


class Contrastive(EmbeddingObjective):
    """For each text, the mean of -log p over the others of its class, p being the softmax of its cosines with all
    others of the batch (supervised contrastive: Khosla et al., 2020, arXiv:2004.11362, equation 2).

    A term per text; one that is alone with its class in a batch adds nothing, so a batch should hold several of each.
    """

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError(
                "the texts have no labels to learn from. Give each row a 'label', or pairs of texts that belong "
                "together as 'text1' and 'text2'"
            )
        return self.batch(samples, number_values([str(label) for label in labels]))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        vectors, classes = self.vectors(module, batch), batch[TARGETS]
        itself = torch.eye(len(classes), dtype=torch.bool, device=classes.device)
        logits = (vectors @ vectors.T / TEMPERATURE).masked_fill(itself, -torch.inf)
        likely = logits.log_softmax(dim=-1)
        alike = (classes[:, None] == classes[None, :]) & ~itself
        return -(likely.masked_fill(~alike, 0.0).sum(dim=-1) / alike.sum(dim=-1).clamp(min=1)).sum()

    def make_example(self, rows: int, length: int) -> Batch:
        batch = self.filled(rows, length)
        return batch | {TARGETS: batch[TARGETS] // 2}


class PairObjective(EmbeddingObjective):
    """Learns from pairs of texts, which lie next to each other in a batch; a term per pair."""

    def count_terms(self, batch: Batch) -> int:
        return batch[TARGETS].shape[0] // 2

    def make_example(self, rows: int, length: int) -> Batch:
        return self.filled(2 * rows, length)


class CoSent(PairObjective):
    """Log of 1 + the sum of exp(scale (cos_j - cos_i)) over all pairs i that score higher than j (CoSENT: Su, 2022,
    kexue.fm/archives/8847).

    It learns the order, which is what Spearman's correlation measures, so scores of any range will do; on STS it gives
    better vectors than the squared error of the cosine (sentence-transformers' own advice). A batch's one loss counts
    for as many terms as it has pairs.
    """

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError("the pairs have no score to learn from. Give each row a 'score'")
        return self.batch(samples, torch.tensor([float(label) for label in labels]))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        vectors, scores = self.vectors(module, batch), batch[TARGETS][0::2]
        cosines = (vectors[0::2] * vectors[1::2]).sum(dim=-1) * SCALE
        falling = scores[:, None] > scores[None, :]
        excess = (cosines[None, :] - cosines[:, None]).masked_fill(~falling, -torch.inf).flatten()
        return torch.cat([excess.new_zeros(1), excess]).logsumexp(dim=0) * self.count_terms(batch)

    def make_example(self, rows: int, length: int) -> Batch:
        batch = super().make_example(rows, length)
        return batch | {TARGETS: batch[TARGETS].float()}


class Ranking(PairObjective):
    """Cross-entropy of the scaled cosines of each first text with all second ones, its own being the right one
    (multiple negatives ranking: Henderson et al., 2017, arXiv:1705.00652; the scale is sentence-transformers').

    A second text that is there twice is no wrong answer for either.
    """

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        return self.batch(samples, number_values(samples))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        vectors, texts = self.vectors(module, batch), batch[TARGETS][1::2]
        logits = vectors[0::2] @ vectors[1::2].T * SCALE
        partners = torch.arange(len(texts), device=texts.device)
        twin = (texts[:, None] == texts[None, :]) & (partners[:, None] != partners[None, :])
        return cross_entropy(logits.masked_fill(twin, -torch.inf), partners, reduction="sum")


class TextEmbeddingObjective(Ranking):
    """Pairs that belong together, unless the data are something else."""

    @classmethod
    def of(cls, task: Task, dataset: Dataset | None = None) -> Objective:
        """Choose the order for scored pairs, the rank for pairs without scores or of score 1, the class for texts."""
        if dataset is None:
            return Ranking(task)
        if dataset.per_row == 2:
            scores = set(dataset.labels or (1.0,))
            if len(scores) == 1 and scores != {1.0}:
                raise DataError(
                    f"all pairs of {dataset.name} have the score {scores.pop():g}: none is more alike than another. "
                    f"Give pairs of several scores, or the score 1 to pairs that belong together"
                )
            return CoSent(task) if len(scores) > 1 else Ranking(task)
        if dataset.labels is None:
            raise DataError(
                f"{dataset.name} holds single samples without labels, which teach an embedding nothing. Give each row "
                f"a 'label', or pairs as 'text1' and 'text2'"
            )
        if len({str(label) for label in dataset.labels}) == 1:
            raise DataError(
                f"all samples of {dataset.name} have the label {dataset.labels[0]!r}. Give samples of several classes"
            )
        return Contrastive(task)


def number_values(values: Sequence[Any]) -> Tensor:
    """Number values in the order in which they first occur, [values] int64; equal ones alike."""
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in values])
