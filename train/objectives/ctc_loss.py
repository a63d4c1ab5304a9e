"""What is said in a recording, wherever in it each character is spoken."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from laconic.errors import DataError
from laconic.tasks.ctc_vocabulary import CtcVocabulary
from laconic.tasks.speech_recognition import SpeechRecognition
from train.step.objective import TARGETS, Batch, Objective, first_output, to_tensors

PADDING = -1
"""Fills targets behind the last character."""


class CtcLoss(Objective):
    """Connectionist temporal classification (Graves et al., 2006) of the logits [rows, frames, tokens], which are zeros
    at frames of padding; a term for each character.

    A text that has more characters than its recording has frames cannot be aligned, and adds nothing.
    """

    ignored = PADDING

    @property
    def vocabulary(self) -> CtcVocabulary:
        """Characters of the model."""
        return cast(SpeechRecognition, self.task).characters

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if labels is None:
            raise DataError("the recordings have no labels to learn from. Give each row what is said in it, 'text'")
        ids = [self.vocabulary.encode(label) for label in labels]
        targets = np.full((len(ids), max(map(len, ids))), PADDING, np.int64)
        for row, label in zip(targets, ids, strict=True):
            row[: len(label)] = label
        return to_tensors(self.task.encode(samples) | {TARGETS: targets})

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        logits = first_output(module, batch).float()
        frames = (logits.detach() != 0).any(dim=-1).sum(dim=1)
        scores = log_softmax(logits, dim=-1).transpose(0, 1)
        targets = batch[TARGETS]
        lengths = (targets != PADDING).sum(dim=1)
        losses: Tensor = align(scores, targets.clamp(min=0), frames, lengths, self.vocabulary.blank)[0]
        return losses.sum()

    def make_example(self, rows: int, length: int) -> Batch:
        batch = to_tensors(self.task.typical(rows, length))
        return batch | {TARGETS: torch.zeros((rows, max(length // 4, 1)), dtype=torch.int64)}


@torch.library.custom_op("laconic::align_characters", mutates_args=())
def align(scores: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Compute the loss of each row, [rows], and its gradient, of the shape of the scores.

    torch's own operation does not tell the shape of its result without running, which a simulated step must know.
    scores: log probabilities [frames, rows, tokens]. targets: [rows, characters]. frames, lengths: of each row.
    """
    settings = targets, frames.tolist(), lengths.tolist()
    losses, table = torch.ops.aten._ctc_loss(scores, *settings, blank, True)
    ones = torch.ones_like(losses)
    gradient = torch.ops.aten._ctc_loss_backward(ones, scores, *settings, losses, table, blank, True)
    return torch.where(losses.isinf(), 0.0, losses), gradient


@align.register_fake
def _(scores: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    return scores.new_empty(len(targets)), torch.empty_like(scores)


def save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep the gradient for the backward pass."""
    ctx.save_for_backward(output[1])


def scale_gradient(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
    """Return the gradient of the scores. upstream: that of each row's loss."""
    (gradient,) = ctx.saved_tensors
    return gradient * upstream[None, :, None], None, None, None, None


align.register_autograd(scale_gradient, setup_context=save_gradient)
