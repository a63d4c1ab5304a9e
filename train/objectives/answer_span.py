"""Where the answer to a question begins and ends."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laconic.errors import DataError
from train.step.objective import TARGETS, Batch, Objective, first_output, to_tensors


class AnswerSpan(Objective):
    """Cross-entropy over the positions of a text, of the first and of the last token of the answer, the mean of both; a
    term per row (Devlin et al., BERT, 2018, arXiv:1810.04805)."""

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError("the samples have no answers to learn from. Give each row its 'answers'")
        positions = torch.tensor([list(label[:2]) for label in labels], dtype=torch.int64)
        return to_tensors(self.task.encode(samples)) | {TARGETS: positions}

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        logits = first_output(module, batch).float()
        logits = logits.masked_fill(batch["attention_mask"].unsqueeze(-1) == 0, torch.finfo(torch.float32).min)
        losses = [cross_entropy(logits[..., end], batch[TARGETS][:, end], reduction="sum") for end in range(2)]
        return torch.stack(losses).mean()

    def make_example(self, rows: int, length: int) -> Batch:
        return to_tensors(self.task.typical(rows, length)) | {TARGETS: torch.zeros((rows, 2), dtype=torch.int64)}
