"""What a model is taught: from samples to a batch, and from a batch to the sum of its losses."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laconic.data.dataset import Dataset
from laconic.models.signature import call
from laconic.tasks.task import Task

if TYPE_CHECKING:
    from laconic.training.step.parts import Kit

Batch = dict[str, Tensor]
"""Tensors by name; the first axis of each is the rows."""

TARGETS = "targets"


class Objective(ABC):
    """The loss of a batch is a sum of terms, one per row or per token, so that parts of a batch add up to the same
    mean whatever their sizes."""

    splits: bool = True
    """Whether a batch may be taken apart: false where rows are compared with one another."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @classmethod
    def of(cls, task: Task, dataset: Dataset | None = None) -> "Objective":
        """The objective for these data, of which a task may take several kinds. Raises DataError for none."""
        return cls(task)

    @abstractmethod
    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        """One batch of samples and their labels, as `laconic.data.dataset` gives them. Raises DataError."""

    @abstractmethod
    def terms(self, batch: Batch) -> int:
        """How many terms the sum of this batch has."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The sum of the batch's losses, [] float32."""

    @abstractmethod
    def example(self, rows: int, length: int) -> Batch:
        """A batch of the shapes that training has, full to the last token: to simulate and to time with."""

    def join(self, kit: "Kit") -> None:  # noqa: B027 - most learn nothing beside the module
        """Called when every technique is applied, before the optimizer is made: what is learned beside the module is
        put into it here, and taken out by `kit.undo`."""

    def tokens(self, batch: Batch) -> int:
        """What the batch counts for in tokens per second: real tokens of a text, rows of anything else."""
        mask = batch.get("attention_mask")
        return next(iter(batch.values())).shape[0] if mask is None else int(mask.sum())

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """The batch in parts of at most `rows` rows."""
        count = next(iter(batch.values())).shape[0]
        if rows is None or rows >= count:
            return [batch]
        pieces = {name: torch.split(tensor, rows) for name, tensor in batch.items()}
        return [{name: pieces[name][part] for name in batch} for part in range(-(-count // rows))]


class Lesson(nn.Module):
    """A module and its objective: a batch in, the sum of its losses out. What data parallelism and compilation wrap."""

    def __init__(self, module: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.module = module
        self.objective = objective

    def forward(self, batch: Batch) -> Tensor:
        """[] float32; 0 of a batch without rows, which a rank may have where others have some."""
        if next(iter(batch.values())).shape[0] == 0:
            return self.objective.loss(self.module, idle(batch)) * 0
        return self.objective.loss(self.module, batch)


def idle(batch: Batch) -> Batch:
    """A row that means nothing, in the place of none, which few models can take."""
    rows = {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
    return rows | {name: torch.ones_like(row) for name, row in rows.items() if name == "attention_mask"}


def tensors(arrays: dict[str, Any]) -> Batch:
    """Numpy arrays as tensors that own their memory."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def answer(module: nn.Module, batch: Batch) -> Tensor:
    """The module's first output for the batch's inputs."""
    inputs = {name: tensor for name, tensor in batch.items() if name != TARGETS}
    return next(iter(call(module, inputs).values()))
