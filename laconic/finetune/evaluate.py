"""Evaluating a model on a validation set: its mean loss, and the metric of its task."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from laconic.arrays import Array, Arrays
from laconic.data.batches import batches
from laconic.data.dataset import Dataset
from laconic.errors import DataError, InputError
from laconic.runtimes.predict import stack_padded
from laconic.tasks.task import Task
from laconic.training.data.batch_builder import BatchBuilder
from laconic.training.data.batch_sampler import BatchSampler
from laconic.training.step.objective import Objective, first_output

ROWS = 32
"""Rows of a batch: larger batches are no faster on a CPU, and evaluation on a GPU is short anyway."""

ForwardContext = Callable[[], AbstractContextManager[Any]]
"""A context of each forward pass, as `TrainState.forward_context`."""


def evaluate(
    module: nn.Module,
    objective: Objective,
    dataset: Dataset,
    device: torch.device,
    *,
    rows: int = ROWS,
    forward_context: ForwardContext = nullcontext,
) -> dict[str, float]:
    """The mean loss, and what the task makes of it (a perplexity) or else its metric, where the labels are for it.

    The module is set to evaluation mode, and its training mode is restored. device: of its inputs. rows: of a batch; no
    more than training takes at once, so that evaluation needs no more memory than training.
    """
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            loss = compute_loss(module, objective, dataset, device, rows, forward_context)
            figures = objective.task.figures_from_loss(loss)
            metric = figures or compute_metric(module, objective.task, dataset, device, rows, forward_context)
            return {"loss": loss} | metric
    finally:
        module.train(training)


def compute_loss(
    module: nn.Module,
    objective: Objective,
    dataset: Dataset,
    device: torch.device,
    rows: int,
    forward_context: ForwardContext,
) -> float:
    """The mean loss over all terms of the dataset. An objective that compares rows sees `rows` of them at a time."""
    sampler = BatchSampler(len(dataset.keys), rows, seed=0)
    builder = BatchBuilder(dataset, dataset.samples, objective.collate)
    total, terms = 0.0, 0
    for number in range(sampler.steps):
        batch = {name: tensor.to(device) for name, tensor in builder.collate(sampler.batch(number)).items()}
        with forward_context():
            total += float(objective.loss(module, batch))
        terms += int(objective.count_terms(batch))
    return total / max(terms, 1)


def compute_metric(
    module: nn.Module, task: Task, dataset: Dataset, device: torch.device, rows: int, forward_context: ForwardContext
) -> dict[str, float]:
    """The metric of the task by its name; empty where the labels do not fit it."""
    if dataset.labels is None:
        return {}
    slots: list[Array] = [np.empty(0)] * len(dataset)
    for indices, arrays in batches(dataset, task, rows):
        with forward_context():
            found = first_output(module, {name: torch.from_numpy(array).to(device) for name, array in arrays.items()})
        for index, row in zip(indices, found.float().cpu().numpy(), strict=True):
            slots[index] = row
    outputs: Arrays = {"output": stack_padded(slots)}
    try:
        score = task.scorer(outputs, dataset.labels)
    except (InputError, DataError):
        return {}
    return {task.metric: float(score(np.arange(len(dataset))))}
