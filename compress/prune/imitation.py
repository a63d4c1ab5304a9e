"""What a pruned model is taught where the data have no labels: to answer as the original does."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.tasks.task import Task
from laconic.training.objective import Batch, Objective, answer, tensors


class Imitation(Objective):
    """The squared distance of the first output from the teacher's, the mean over a row's numbers; a term per row."""

    def __init__(self, task: Task, teacher: nn.Module) -> None:
        super().__init__(task)
        self._teacher: nn.Module | None = teacher

    def __getstate__(self) -> dict[str, Any]:
        # What makes batches in another process needs no teacher.
        return vars(self) | {"_teacher": None}

    def collate(self, samples: Sequence[Any], labels: Sequence[Any] | None) -> Batch:
        return tensors(self.task.encode(samples))

    def terms(self, batch: Batch) -> int:
        return next(iter(batch.values())).shape[0]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = answer(self.on(next(iter(batch.values())).device), batch).float()
        return (answer(module, batch).float() - wanted).square().flatten(1).mean(dim=1).sum()

    def on(self, device: torch.device) -> nn.Module:
        """The teacher on this device; a copy where it is not there already, since it is not ours to move."""
        assert self._teacher is not None
        if any(weight.device != device for weight in self._teacher.parameters()):
            self._teacher = copy.deepcopy(self._teacher).to(device)
        return self._teacher

    def example(self, rows: int, length: int) -> Batch:
        return tensors(self.task.typical(rows, length))
