"""Each token of a text, from those before it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from laconic.errors import DataError
from laconic.tasks.causal_lm import CausalLm
from laconic.tensor import Array, Arrays
from laconic.training.objective import TARGETS, Batch, Objective, tensors

LinearCrossEntropy = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""(hidden [tokens, width], weight [vocab, width], bias [vocab] or None, targets [tokens] int64) to the summed loss,
[] float32; a target of IGNORED counts nothing."""

IGNORED = -100


def whole_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """The logits of all tokens at once, [tokens, vocab]."""
    logits = linear(hidden, weight, bias).float()
    return cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


class NextToken(Objective):
    """Cross-entropy of each next token; a term per token that is to be foretold.

    A text's last token is never read, since nothing follows it: n tokens are n - 1 inputs and n - 1 targets. Where a
    sample has a label, the token that follows the text, it is one more target. Without padding a batch has no
    attention mask, so that the fast kernels of causal attention are taken.
    """

    def __init__(self, task: CausalLm) -> None:
        super().__init__(task)
        self.cross_entropy: LinearCrossEntropy = whole_logits

    def texts(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> list[Array]:
        """Each sample's tokens, the last of which is only a target. Raises DataError where all are too short."""
        batch = self.task.encode(samples)
        rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        texts = [ids[: mask.sum()] for ids, mask in rows]
        if labels is not None:
            texts = [np.append(text, label) for text, label in zip(texts, labels, strict=True)]
        texts = [text for text in texts if len(text) > 1]
        if not texts:
            raise DataError(
                "no text of a batch has two tokens, so that none follows another. Give longer texts, or a larger batch"
            )
        return texts

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        texts = self.texts(samples, labels)
        arrays = padded(texts, max(map(len, texts)) - 1)
        if arrays["attention_mask"].all():
            del arrays["attention_mask"]
        return tensors(arrays)

    def terms(self, batch: Batch) -> int:
        # An input that is no padding has a target, and the other way round.
        mask = batch.get("attention_mask")
        return batch[TARGETS].numel() if mask is None else int(mask.sum())

    def tokens(self, batch: Batch) -> int:
        return self.terms(batch)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        model: Any = module
        read = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        hidden = model.hidden(**read).flatten(0, 1)
        head = model.head
        return self.cross_entropy(hidden, head.weight, getattr(head, "bias", None), batch[TARGETS].flatten())

    def example(self, rows: int, length: int) -> Batch:
        ids = tensors(self.task.typical(rows, length))["input_ids"]
        return {"input_ids": ids, TARGETS: ids.clone()}


def padded(texts: Iterable[Array], width: int) -> Arrays:
    """input_ids, attention_mask and targets, [texts, width] int64, of texts of at most width + 1 tokens."""
    texts = list(texts)
    shape = (len(texts), width)
    ids, mask, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    for row, text in enumerate(texts):
        count = len(text) - 1
        ids[row, :count], mask[row, :count], targets[row, :count] = text[:-1], 1, text[1:]
    return {"input_ids": ids, "attention_mask": mask, TARGETS: targets}
