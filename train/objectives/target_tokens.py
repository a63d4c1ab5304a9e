"""Each token of the text that is to be written for a source, from those before it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laconic.errors import DataError
from laconic.tasks.decoder_tensors import DECODER_ATTENTION_MASK, DECODER_INPUT_IDS, PAST, SEQUENCES
from laconic.tasks.token_positions import IGNORED
from laconic.tasks.written_text import WrittenText
from train.objectives.logit_gradients import sum_cross_entropy
from train.step.objective import TARGETS, Batch, Objective, to_tensors


class TargetTokens(Objective):
    """Cross-entropy of the target's tokens, each behind the target's own earlier ones (teacher forcing); a term for
    each token."""

    ignored = IGNORED
    task: WrittenText

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError("the samples have no targets to learn from. Give each row the text to write, as 'target'")
        batch = self.task.encode(samples)
        targets = np.full_like(batch[DECODER_INPUT_IDS], IGNORED)
        for row, label in zip(targets, labels, strict=True):
            row[: len(label)] = label
        targets[batch[DECODER_ATTENTION_MASK] == 0] = IGNORED  # padding, and forced tokens
        del batch[PAST]
        return to_tensors(batch | {TARGETS: targets})

    def count_tokens(self, batch: Batch) -> int:
        return super().count_tokens(batch) + int(batch[DECODER_ATTENTION_MASK].sum())

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        model: Any = module
        inputs = {name: tensor for name, tensor in batch.items() if name not in (TARGETS, DECODER_ATTENTION_MASK)}
        return sum_cross_entropy(model.logits(**inputs).flatten(0, 1), batch[TARGETS].flatten())

    def answer(self, module: nn.Module, samples: Sequence[Any], device: torch.device) -> list[dict[str, str]]:
        model: Any = module
        encoded = to_tensors(self.task.select_source(self.task.encode(samples)))
        source = {name: tensor.to(device) for name, tensor in encoded.items()}
        written = model.generate(source, self.task.settings).cpu().numpy()
        answers = self.task.decode({SEQUENCES: written}, samples)
        return [
            {"given": str(sample), "answer": answer["text"], "wanted": self.task.write(sample.target)}
            for sample, answer in zip(samples, answers, strict=True)
        ]

    def make_example(self, rows: int, length: int) -> Batch:
        batch = to_tensors(self.task.typical(rows, length))
        del batch[PAST]
        return batch | {TARGETS: torch.zeros_like(batch[DECODER_INPUT_IDS])}
