"""Pairs of texts with a score: the more alike, the larger the cosine."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import DataError
from train.objectives.embedding_objective import EmbeddingObjective
from train.step.objective import TARGETS, Batch

SCALE = 20.0


class CoSent(EmbeddingObjective):
    """Log of 1 + the sum of exp(scale (cos_j - cos_i)) over all pairs i that score higher than j (CoSENT: Su, 2022,
    kexue.fm/archives/8847).

    It learns the order, which is what Spearman's correlation measures, so scores of any range will do; on STS it gives
    better vectors than the squared error of the cosine (sentence-transformers' own advice). Texts of a pair lie next
    to each other. A term per pair: a batch's one loss counts for as many terms as it has pairs.
    """

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError("the pairs have no score to learn from. Give each row a 'score'")
        return self.batch(samples, torch.tensor([float(label) for label in labels]))

    def count_terms(self, batch: Batch) -> int:
        return batch[TARGETS].shape[0] // 2

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        vectors, scores = self.vectors(module, batch), batch[TARGETS][0::2]
        cosines = (vectors[0::2] * vectors[1::2]).sum(dim=-1) * SCALE
        falling = scores[:, None] > scores[None, :]
        excess = (cosines[None, :] - cosines[:, None]).masked_fill(~falling, -torch.inf).flatten()
        return torch.cat([excess.new_zeros(1), excess]).logsumexp(dim=0) * self.count_terms(batch)

    def make_example(self, rows: int, length: int) -> Batch:
        batch = self.filled(2 * rows, length)
        return batch | {TARGETS: batch[TARGETS].float()}
