"""Each token of a text, from those before it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from laconic.arrays import Array, Arrays
from laconic.errors import DataError
from laconic.tasks.causal_lm import CausalLm
from laconic.training.step.objective import TARGETS, Batch, Objective, to_tensors

LinearCrossEntropy = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""(hidden [tokens, width], weight [vocab, width], bias [vocab] or None, targets [tokens] int64) to the summed loss,
[] float32; a target of IGNORED counts nothing."""

IGNORED = -100
FILLED = "filled"
"""How many targets each row has, [rows] int64: given where there is no mask, and not all rows are full."""


def whole_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """The logits of all tokens at once, [tokens, vocab]."""
    logits = linear(hidden, weight, bias).float()
    return cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


class NextToken(Objective):
    """Cross-entropy of each next token; a term per token that is to be predicted.

    A text's last token is never read, since nothing follows it: n tokens are n - 1 inputs and n - 1 targets. Where a
    sample has a label, the token that follows the text, it is one more target. Without padding a batch has no
    attention mask, so that the fast kernels of causal attention are taken.
    """

    def __init__(self, task: CausalLm) -> None:
        super().__init__(task)
        self.cross_entropy: LinearCrossEntropy = whole_logits
        self.layout = TextLayout()

    def __getstate__(self) -> dict[str, Any]:
        # What makes batches in another process needs no loss, which may hold the model.
        return vars(self) | {"cross_entropy": whole_logits}

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
        return to_tensors(self.layout.rows(self.texts(samples, labels)))

    def count_terms(self, batch: Batch) -> int:
        # An input that is no padding has a target, and the other way round.
        counts = batch.get("attention_mask", batch.get(FILLED))
        return batch[TARGETS].numel() if counts is None else int(counts.sum())

    def count_tokens(self, batch: Batch) -> int:
        return self.count_terms(batch)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        model: Any = module
        read = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        hidden = model.hidden(**read).flatten(0, 1)
        head = model.head
        return self.cross_entropy(hidden, head.weight, getattr(head, "bias", None), batch[TARGETS].flatten())

    def make_example(self, rows: int, length: int) -> Batch:
        ids = to_tensors(self.task.typical(rows, length))["input_ids"]
        return {"input_ids": ids, TARGETS: ids.clone()} | to_tensors(self.layout.make_example(*ids.shape))


class TextLayout:
    """A row for each text."""

    def rows(self, texts: Sequence[Array]) -> Arrays:
        """input_ids and targets, [rows, width] int64, and what else the model and `terms` must be told."""
        widths = [len(text) - 1 for text in texts]
        arrays = blank(len(texts), max(widths)) | {"attention_mask": np.zeros((len(texts), max(widths)), np.int64)}
        for row, text in enumerate(texts):
            write(arrays, text, row, 0)
            arrays["attention_mask"][row, : widths[row]] = 1
        if min(widths) == max(widths):
            del arrays["attention_mask"]
        return arrays

    def make_example(self, rows: int, width: int) -> Arrays:
        """What full rows have beside input_ids and targets."""
        return {}


def blank(rows: int, width: int) -> Arrays:
    """input_ids and targets of rows without texts."""
    return {"input_ids": np.zeros((rows, width), np.int64), TARGETS: np.full((rows, width), IGNORED, np.int64)}


def write(arrays: Arrays, text: Array, row: int, start: int) -> None:
    """Put a text's inputs and targets into a row."""
    stop = start + len(text) - 1
    arrays["input_ids"][row, start:stop], arrays[TARGETS][row, start:stop] = text[:-1], text[1:]
