"""Training objectives: from samples to a batch, and from a batch to the sum of its losses."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.data.dataset import Dataset
from laconic.models.signature import call
from laconic.tasks.task import Task
from laconic.training.step.trained_modules import TrainedModules

Batch = dict[str, Tensor]
"""Tensors by name; the first axis of each is the rows of the batch."""

TARGETS = "targets"
"""The name of what is to be predicted; every other tensor of a batch is an input of the model."""


class Objective(ABC):
    """The loss that a model is trained with. It is a sum of terms, one per row or per token of a batch, so that the
    losses of micro-batches add up to the same mean whatever their sizes."""

    splittable: bool = True
    """Whether a batch may be split into micro-batches: false where the loss compares rows with one another."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @classmethod
    def of(cls, task: Task, dataset: Dataset | None = None) -> "Objective":
        """The objective for a dataset, since a task may take several kinds. Raises DataError where none fits."""
        return cls(task)

    @abstractmethod
    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        """The batch of some samples and their labels, as `laconic.data.reader` gives them. Raises DataError."""

    @abstractmethod
    def count_terms(self, batch: Batch) -> int:
        """The number of terms in the loss of this batch."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The sum of the batch's losses, [] float32."""

    @abstractmethod
    def make_example(self, rows: int, length: int) -> Batch:
        """A batch of the shapes that training has, without padding: to simulate and to time a step with."""

    def attach(self, modules: TrainedModules) -> None:  # noqa: B027 - most objectives train nothing else
        """Add the modules that this objective trains in addition to the model, and change the model for it.

        Called when every technique is applied, before the optimizer is made. Changes are undone by
        `modules.on_restore`.
        """

    def count_tokens(self, batch: Batch) -> int:
        """What a batch counts for in tokens per second: tokens of a text without padding, rows of anything else."""
        mask = batch.get("attention_mask")
        return next(iter(batch.values())).shape[0] if mask is None else int(mask.sum())

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """The micro-batches of at most `rows` rows; the whole batch where `rows` is None."""
        count = next(iter(batch.values())).shape[0]
        if rows is None or rows >= count:
            return [batch]
        pieces = {name: torch.split(tensor, rows) for name, tensor in batch.items()}
        return [{name: pieces[name][part] for name in batch} for part in range(-(-count // rows))]


class LossModule(nn.Module):
    """A model and its objective: a batch in, the sum of its losses out. Data parallelism and compilation wrap it."""

    def __init__(self, module: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.module = module
        self.objective = objective

    def forward(self, batch: Batch) -> Tensor:
        """The summed loss, [] float32; 0 for a batch without rows, which a rank may have where others have some."""
        if next(iter(batch.values())).shape[0] == 0:
            return self.objective.loss(self.module, fill_empty(batch)) * 0
        return self.objective.loss(self.module, batch)


def fill_empty(batch: Batch) -> Batch:
    """A batch of one meaningless row in place of one without rows, which few models accept."""
    rows = {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
    return rows | {name: torch.ones_like(row) for name, row in rows.items() if name == "attention_mask"}


def to_tensors(arrays: dict[str, Any]) -> Batch:
    """Copy numpy arrays into tensors."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def first_output(module: nn.Module, batch: Batch) -> Tensor:
    """Call a module on a batch's inputs; gives its first output."""
    inputs = {name: tensor for name, tensor in batch.items() if name != TARGETS}
    return next(iter(call(module, inputs).values()))
