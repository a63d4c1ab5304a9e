"""Texts with classes: those of one class close together, those of others far off."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import DataError
from train.objectives.embedding_objective import EmbeddingObjective
from train.step.objective import TARGETS, Batch

TEMPERATURE = 0.05
"""Cosines are divided by it: 20 times, as in the objectives of pairs."""


class Contrastive(EmbeddingObjective):
    """For each text, the mean of -log p over the others of its class, p being the softmax of its cosines with all
    others of the batch (supervised contrastive: Khosla et al., 2020, arXiv:2004.11362, equation 2).

    A term per text; one that is alone with its class in a batch adds nothing to the sum, so a batch should hold several
    of each.
    """

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError(
                "the texts have no labels to learn from. Give each row a 'label', or pairs of texts that belong "
                "together as 'text1' and 'text2'"
            )
        numbers: dict[str, int] = {}
        return self.batch(samples, torch.tensor([numbers.setdefault(str(label), len(numbers)) for label in labels]))

    def count_terms(self, batch: Batch) -> int:
        return batch[TARGETS].shape[0]

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
