"""How good a model is on data that it has not learned from."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from laconic.data.dataset import Dataset, batches
from laconic.errors import DataError, InputError
from laconic.runtimes.predict import stack_padded
from laconic.tasks.task import Task
from laconic.tensor import Array, Arrays
from laconic.training.data.batch_builder import Maker
from laconic.training.data.batch_sampler import Order
from laconic.training.step.objective import Objective, answer

ROWS = 32
"""Rows of a batch: larger ones gain nothing on a processor, and a GPU is not short of work for long."""

Passing = Callable[[], AbstractContextManager[Any]]
"""A context round each forward pass, as `Kit.passing`."""


def evaluate(
    module: nn.Module,
    objective: Objective,
    dataset: Dataset,
    device: torch.device,
    *,
    rows: int = ROWS,
    passing: Passing = nullcontext,
) -> dict[str, float]:
    """The mean loss, the perplexity of a language model, and the task's metric where the labels are for it.

    The module is in evaluation mode while it is asked, and stays where it is. device: where it takes its inputs. rows:
    of a batch; as few as training takes at once, lest to judge needs more memory than to train.
    """
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            figures = {"loss": mean_loss(module, objective, dataset, device, rows, passing)}
            if objective.task.name == "causal-lm":
                return figures | {"perplexity": math.exp(min(figures["loss"], 700.0))}
            return figures | metric(module, objective.task, dataset, device, rows, passing)
    finally:
        module.train(training)


def mean_loss(
    module: nn.Module, objective: Objective, dataset: Dataset, device: torch.device, rows: int, passing: Passing
) -> float:
    """Over all terms of the dataset; of what compares the rows of a batch, over batches of so many rows."""
    order = Order(len(dataset.keys), rows, seed=0)
    maker = Maker(dataset, dataset.samples, objective.collate)
    total, terms = 0.0, 0
    for number in range(order.steps):
        batch = {name: tensor.to(device) for name, tensor in maker.collated(order.batch(number)).items()}
        with passing():
            total += float(objective.loss(module, batch))
        terms += int(objective.terms(batch))
    return total / max(terms, 1)


def metric(
    module: nn.Module, task: Task, dataset: Dataset, device: torch.device, rows: int, passing: Passing
) -> dict[str, float]:
    """The task's own figure, by its name; nothing where the labels are not for it."""
    if dataset.labels is None:
        return {}
    slots: list[Array] = [np.empty(0)] * len(dataset)
    for indices, arrays in batches(dataset, task, rows):
        with passing():
            found = answer(module, {name: torch.from_numpy(array).to(device) for name, array in arrays.items()})
        for index, row in zip(indices, found.float().cpu().numpy(), strict=True):
            slots[index] = row
    outputs: Arrays = {"output": stack_padded(slots)}
    try:
        score = task.scorer(outputs, dataset.labels)
    except (InputError, DataError):
        return {}
    return {task.metric: float(score(np.arange(len(dataset))))}
