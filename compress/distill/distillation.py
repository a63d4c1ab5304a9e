"""What a student is taught by its teacher."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.distill.distillation_loss import Imitation, Terms
from compress.distill.hooks import HIDDEN, Pass, watch
from compress.distill.layer_mapping import Pair
from laconic.errors import RecipeError
from laconic.layerwise.layer_stack import Stack
from laconic.tasks.task import Task
from laconic.training.objectives.next_token import IGNORED
from laconic.training.step.objective import TARGETS, Batch, Objective, to_tensors
from laconic.training.step.trained_modules import TrainedModules

PROBE = (2, 8)
"""Rows and places of the batch that is looked at before training."""
LEARNED = "imitation"


class Distillation(Objective):
    """The weighted sum of imitations of a teacher; a term per row, or per token of a language model.

    teacher: in evaluation mode, without gradients; it is run beside the student, at the student's precision. own: what
    the task is taught by from data, for batches of language models, and for labels. share: of its loss in the whole.
    Dropout is off while a student learns, since it would be noise on numbers that are to be matched.
    """

    def __init__(
        self,
        task: Task,
        teacher: nn.Module,
        imitations: Sequence[Imitation],
        *,
        own: Objective | None = None,
        share: float = 0.0,
    ) -> None:
        super().__init__(task)
        self.teacher = teacher
        self.imitations = tuple(imitations)
        self.own, self.share = own, share
        compares = any(imitation.compares for imitation in self.imitations)
        self.splittable = not compares and not (share and own is not None and not own.splittable)

    def fit(self, student: nn.Module, pairs: Sequence[Pair]) -> None:
        """Look at a pass through both models, and make what is learned beside the student. Raises UsageError."""
        batch = to_tensors(self.task.typical(*PROBE))
        for imitation in self.imitations:
            imitation.choose(student, self.teacher, pairs)
        with torch.no_grad():
            own = watch(student, batch, self.names("student"))
            theirs = watch(self.teacher, batch, self.names("teacher"))
        for imitation in self.imitations:
            imitation.fit(own, theirs)

    def names(self, whose: str) -> set[str]:
        """The layers of the student, or of the teacher, that are read."""
        return {name for imitation in self.imitations for name in getattr(imitation, whose)}

    def __getstate__(self) -> dict[str, Any]:
        # What makes batches in another process needs no models.
        return vars(self) | {"teacher": None, "imitations": ()}

    def attach(self, modules: TrainedModules) -> None:
        """Train what is learned beside the student, too. Raises RecipeError."""
        if self.names("student") and any(isinstance(part, Stack) for part in modules.model.modules()):
            raise RecipeError(
                "layerwise keeps nothing of a layer while the next one runs, so its hidden states cannot be compared "
                "with the teacher's. Take checkpoint in its place, or distil from the outputs alone"
            )
        still(modules.model)
        self.teacher.to(modules.device)
        learned = nn.ModuleList(imitation.learned for imitation in self.imitations).to(modules.device)
        if list(learned.parameters()):
            modules.add(LEARNED, learned)

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        if self.own is None:
            return to_tensors(self.task.encode(samples))
        return self.own.collate(samples, labels if self.share else None)

    def count_terms(self, batch: Batch) -> int:
        if per_place(batch) and self.own is not None:
            return self.own.count_terms(batch)
        return next(iter(batch.values())).shape[0]

    def count_tokens(self, batch: Batch) -> int:
        return super().count_tokens(batch) if self.own is None else self.own.count_tokens(batch)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = watch(self.teacher, batch, self.names("teacher"))
        runs = bool(self.share) or any(imitation.whole for imitation in self.imitations)
        found = watch(module, batch, self.names("student")) if runs else Pass(module)
        parts = [imitation.weight * imitation.loss(found, wanted, terms_of(batch)) for imitation in self.imitations]
        total = torch.stack(parts).sum()
        if self.own is None or not self.share:
            return total
        scale = self.count_terms(batch) / max(self.own.count_terms(batch), 1)
        return (1 - self.share) * total + self.share * scale * self.own.loss(Answered(found), batch)

    def make_example(self, rows: int, length: int) -> Batch:
        return to_tensors(self.task.typical(rows, length)) if self.own is None else self.own.make_example(rows, length)


class Answered(nn.Module):
    """Stands for a model that has answered already."""

    def __init__(self, found: Pass) -> None:
        super().__init__()
        self._found = found

    @property
    def head(self) -> Any:
        """A language model's layer from hidden states to logits."""
        return self._found.module.head

    def hidden(self, **inputs: Tensor) -> Tensor:
        """A language model's hidden states."""
        return self._found.answers[HIDDEN]

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The answers of the model."""
        return dict(self._found.answers)


def per_place(batch: Batch) -> bool:
    """Whether each token is a term: the targets of a language model are of the inputs' shape."""
    return TARGETS in batch and "input_ids" in batch and batch[TARGETS].shape == batch["input_ids"].shape


def terms_of(batch: Batch) -> Terms:
    """What the batch's loss is a sum of."""
    if per_place(batch):
        return Terms(batch[TARGETS] != IGNORED, per_place=True)
    mask = batch.get("attention_mask")
    return Terms(None if mask is None else mask.bool())


def still(module: nn.Module) -> None:
    """Switch off what is random in training, and leave on what learns from a batch: batch normalisation."""
    module.eval()
    for part in module.modules():
        if getattr(part, "running_mean", None) is not None or isinstance(part, nn.RNNBase):
            part.train()
