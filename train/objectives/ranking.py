"""Pairs of texts that belong together: each is to find its own among all others of the batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from train.objectives.embedding_objective import EmbeddingObjective
from train.step.objective import TARGETS, Batch

SCALE = 20.0


class Ranking(EmbeddingObjective):
    """Cross-entropy of the scaled cosines of each first text with all second ones, its own being the right one
    (multiple negatives ranking: Henderson et al., 2017, arXiv:1705.00652; the scale is sentence-transformers').

    A second text that is there twice is no wrong answer for either. Texts of a pair lie next to each other. A term per
    pair.
    """

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        numbers: dict[Any, int] = {}
        return self.batch(samples, torch.tensor([numbers.setdefault(text, len(numbers)) for text in samples]))

    def count_terms(self, batch: Batch) -> int:
        return batch[TARGETS].shape[0] // 2

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        vectors, texts = self.vectors(module, batch), batch[TARGETS][1::2]
        logits = vectors[0::2] @ vectors[1::2].T * SCALE
        own = torch.arange(len(texts), device=texts.device)
        twin = (texts[:, None] == texts[None, :]) & (own[:, None] != own[None, :])
        return cross_entropy(logits.masked_fill(twin, -torch.inf), own, reduction="sum")

    def make_example(self, rows: int, length: int) -> Batch:
        return self.filled(2 * rows, length)
