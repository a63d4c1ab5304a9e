"""The training objective of distillation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.distill.distillation_loss import (
    HIDDEN,
    DistillationLoss,
    ForwardPass,
    LayerPair,
    LossTerms,
    record_forward,
)
from laconic.errors import RecipeError
from laconic.tasks.task import Task
from laconic.tasks.token_positions import IGNORED
from train.layerwise.layer_stack import LayerStack
from train.step.objective import TARGETS, Batch, Objective, to_tensors
from train.step.trained_modules import TrainedModules

PROBE = (2, 8)
"""Rows and positions of the batch that is run before training to prepare the losses."""
AUXILIARY = "imitation"
"""The prefix of the auxiliary modules' weights in snapshots."""


class DistillationObjective(Objective):
    """The weighted sum of distillation losses; a term per row, or per token of a language model.

    teacher: in evaluation mode, without gradients; it is run beside the student, at the student's precision.
    task_objective: the task's own objective, which makes the batches of language models and computes the loss on
    labels. task_weight: the share of that loss. tail_weight: of the worst terms, as in `LossTerms`. Dropout is off
    while a student is distilled, since it would add noise to the values that are compared.
    """

    def __init__(
        self,
        task: Task,
        teacher: nn.Module,
        losses: Sequence[DistillationLoss],
        *,
        task_objective: Objective | None = None,
        task_weight: float = 0.0,
        tail_weight: float = 0.0,
    ) -> None:
        super().__init__(task)
        self.teacher = teacher
        self.losses = tuple(losses)
        self.task_objective, self.task_weight = task_objective, task_weight
        self.tail_weight = tail_weight
        compares = tail_weight > 0 or any(loss.compares_rows for loss in self.losses)
        task_compares = task_weight and task_objective is not None and not task_objective.splittable
        self.splittable = not compares and not task_compares

    def prepare(self, student: nn.Module, pairs: Sequence[LayerPair]) -> None:
        """Run both models on a small batch, and prepare the losses by it. Raises UsageError."""
        batch = to_tensors(self.task.typical(*PROBE))
        for loss in self.losses:
            loss.select_layers(student, self.teacher, pairs)
        with torch.no_grad():
            ours = record_forward(student, batch, self.names("student"))
            theirs = record_forward(self.teacher, batch, self.names("teacher"))
        for loss in self.losses:
            loss.prepare(ours, theirs)

    def names(self, whose: str) -> set[str]:
        """Return the names of the layers that are recorded; whose: `student` or `teacher`."""
        return {name for loss in self.losses for name in getattr(loss, whose)}

    def __getstate__(self) -> dict[str, Any]:
        # Workers that make batches in another process need no models.
        return vars(self) | {"teacher": None, "losses": ()}

    def attach(self, modules: TrainedModules) -> None:
        """Train the auxiliary modules, too. Raises RecipeError."""
        if self.names("student") and any(isinstance(part, LayerStack) for part in modules.model.modules()):
            raise RecipeError(
                "layerwise keeps nothing of a layer while the next one runs, so its hidden states cannot be compared "
                "with the teacher's. Use gradient-checkpointing instead, or distil from the outputs alone"
            )
        disable_dropout(modules.model)
        self.teacher.to(modules.device)
        auxiliary = nn.ModuleList(loss.auxiliary for loss in self.losses).to(modules.device)
        if list(auxiliary.parameters()):
            modules.add(AUXILIARY, auxiliary)

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if self.task_objective is None:
            return to_tensors(self.task.encode(samples))
        return self.task_objective.collate(samples, labels if self.task_weight else None)

    def count_terms(self, batch: Batch) -> int:
        if is_per_token(batch) and self.task_objective is not None:
            return self.task_objective.count_terms(batch)
        return next(iter(batch.values())).shape[0]

    def count_tokens(self, batch: Batch) -> int:
        return super().count_tokens(batch) if self.task_objective is None else self.task_objective.count_tokens(batch)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            teacher = record_forward(self.teacher, batch, self.names("teacher"))
        runs = bool(self.task_weight) or any(loss.runs_student for loss in self.losses)
        student = record_forward(module, batch, self.names("student")) if runs else ForwardPass(module)
        terms = make_terms(batch, self.tail_weight)
        parts = [loss.weight * loss.loss(student, teacher, terms) for loss in self.losses]
        total = torch.stack(parts).sum()
        if self.task_objective is None or not self.task_weight:
            return total
        scale = self.count_terms(batch) / max(self.task_objective.count_terms(batch), 1)
        return (1 - self.task_weight) * total + self.task_weight * scale * self.task_objective.loss(
            PrecomputedModel(student), batch
        )

    def make_example(self, rows: int, length: int) -> Batch:
        return (
            to_tensors(self.task.typical(rows, length))
            if self.task_objective is None
            else self.task_objective.make_example(rows, length)
        )


class PrecomputedModel(nn.Module):
    """A stand-in for a model whose outputs have been computed already."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        super().__init__()
        self._found = forward_pass

    @property
    def head(self) -> Any:
        """The head of a language model, from hidden states to logits."""
        return self._found.module.head

    @property
    def logit_cap(self) -> Any:
        """The cap of a language model's logits, or None."""
        return self._found.module.logit_cap

    def hidden(self, **inputs: Tensor) -> Tensor:
        """Return the hidden states of a language model."""
        return self._found.answers[HIDDEN]

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the model."""
        return dict(self._found.answers)


def is_per_token(batch: Batch) -> bool:
    """Whether each token is a term of the loss: the targets of a language model have the inputs' shape."""
    return TARGETS in batch and "input_ids" in batch and batch[TARGETS].shape == batch["input_ids"].shape


def make_terms(batch: Batch, tail_weight: float) -> LossTerms:
    """Return the terms that the batch's loss is summed over."""
    if is_per_token(batch):
        return LossTerms(batch[TARGETS] != IGNORED, per_position=True, tail_weight=tail_weight)
    mask = batch.get("attention_mask")
    return LossTerms(None if mask is None else mask.bool(), tail_weight=tail_weight)


def disable_dropout(module: nn.Module) -> None:
    """Disable what is random in training, but not batch normalisation, which learns from the batch."""
    module.eval()
    for part in module.modules():
        if getattr(part, "running_mean", None) is not None or isinstance(part, nn.RNNBase):
            part.train()
