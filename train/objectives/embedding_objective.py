"""What the objectives of text embedding share: texts to vectors of length 1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from train.step.objective import TARGETS, Batch, Objective, first_output, to_tensors


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
