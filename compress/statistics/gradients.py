"""The gradients of an objective by the weights, sample by sample: what Taylor's and Fisher's criteria look at."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from compress.statistics.gram import forward_batches
from laconic import registry
from laconic.data.dataset import Dataset
from laconic.errors import DataError
from laconic.models.signature import call
from laconic.tasks.classification import Classification
from laconic.tasks.task import Task
from laconic.training.data.batch_builder import BatchBuilder
from laconic.training.data.batch_sampler import BatchSampler

Aim = Literal["objective", "likelihood", "answer"]
"""objective: the task's own, by the labels. likelihood: of classes drawn from the model's own answers, so that the mean
square is the diagonal of the Fisher matrix. answer: v . f(x) with v drawn from the normal distribution, of which the
covariance is the identity, so that the mean square is the diagonal of JT J: the Gauss-Newton matrix of the squared
change of the answers."""

ROWS = 32
"""Rows of a batch, for objectives that compare rows with one another; for all others a sample is looked at alone."""


@dataclass
class Gradient:
    """Of a layer's weight, [out, in] float32. size: the mean over samples of |g|. square: the mean of g^2."""

    size: Tensor
    square: Tensor


def gradients(
    module: nn.Module,
    task: Task,
    dataset: Dataset,
    paths: Sequence[str],
    *,
    aim: Aim | None = None,
    seed: int = 0,
) -> dict[str, Gradient]:
    """The gradients by the weights of the linear or convolutional layers at these paths, over a dataset.

    aim: by default the objective where there are labels for it, else the likelihood of a classifier, else the answer.
    Two tensors a weight are kept, whatever the number of samples. A tied weight has the gradient of all its uses.
    Raises DataError where the objective can learn from none of the samples.
    """
    layers = {path: module.get_submodule(path) for path in paths}
    weights: list[nn.Parameter] = [layer.weight for layer in layers.values()]  # type: ignore[misc]
    sums = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    count = 0
    with learning(weights):
        for loss in LOSSES[aim or usual(task, dataset)](module, task, dataset, seed):
            found = torch.autograd.grad(loss, weights, allow_unused=True)
            for (size, square), gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    size += gradient.abs()
                    square += gradient.square()
            count += 1
    return {
        path: Gradient(as_matrix(layer, size / count), as_matrix(layer, square / count))
        for (path, layer), (size, square) in zip(layers.items(), sums, strict=True)
    }


def usual(task: Task, dataset: Dataset) -> Aim:
    """The aim where none is asked for. A language model's texts are their own labels."""
    if dataset.labels is not None or task.name == "causal-lm":
        return "objective"
    return "likelihood" if isinstance(task, Classification) else "answer"


@contextmanager
def learning(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients by these weights, in the body."""
    before = [weight.requires_grad for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for weight, learned in zip(weights, before, strict=True):
            weight.requires_grad_(learned)


def as_matrix(layer: nn.Module, tensor: Tensor) -> Tensor:
    """A tensor of the shape of a layer's weight as [out, in], in the order of `gram.matrix`."""
    return tensor.T if isinstance(layer, Conv1D) else tensor.flatten(1)


def by_objective(module: nn.Module, task: Task, dataset: Dataset, seed: int) -> Iterator[Tensor]:
    """The loss of each sample; of each batch, where rows are compared. What is too short to learn from is left out."""
    objective = registry.resolve("objective", task.name).of(task, dataset)
    maker = BatchBuilder(dataset, dataset.samples, objective.collate)
    order = BatchSampler(len(dataset.keys), 1 if objective.splittable else ROWS, seed)
    refused: DataError | None = None
    learned = False
    for number in range(order.steps):
        try:
            batch = maker.collate(order.batch(number))
        except DataError as error:
            refused = error
            continue
        learned = True
        yield objective.loss(module, batch)
    if refused is not None and not learned:
        raise refused


def by_likelihood(module: nn.Module, task: Task, dataset: Dataset, seed: int) -> Iterator[Tensor]:
    """For each sample, that of a class drawn from the model's own answer."""
    for logits, generator in answers(module, task, dataset, seed):
        drawn = torch.multinomial(logits.detach().cpu().softmax(dim=-1), 1, generator=generator)[:, 0]
        yield cross_entropy(logits, drawn.to(logits.device), reduction="sum")


def by_answer(module: nn.Module, task: Task, dataset: Dataset, seed: int) -> Iterator[Tensor]:
    """For each sample, its answer in a direction drawn at random."""
    for answer, generator in answers(module, task, dataset, seed):
        yield (answer * torch.randn(answer.shape, generator=generator).to(answer)).sum()


def answers(module: nn.Module, task: Task, dataset: Dataset, seed: int) -> Iterator[tuple[Tensor, torch.Generator]]:
    """The first output for each sample, [1, ...] float32, and what to draw with."""
    generator = torch.Generator().manual_seed(seed)
    for batch in forward_batches(task, dataset, 1):
        yield next(iter(call(module, batch).values())).float(), generator


LOSSES: dict[Aim, Callable[[nn.Module, Task, Dataset, int], Iterator[Tensor]]] = {
    "objective": by_objective,
    "likelihood": by_likelihood,
    "answer": by_answer,
}
