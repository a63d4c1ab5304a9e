"""Per-sample gradients of a loss with respect to layer weights, which the Taylor and Fisher criteria are computed
from."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compress.statistics.layer_inputs import forward_batches
from compress.statistics.layer_weights import as_matrix
from laconic import registry
from laconic.data.dataset import Dataset
from laconic.errors import DataError
from laconic.models.signature import call
from laconic.tasks.task import Task
from train.data.batch_builder import BatchBuilder
from train.data.batch_sampler import BatchSampler

GradientLoss = Literal["objective", "likelihood", "answer"]
"""The loss that is differentiated.

objective: the task's own training loss, by the labels. likelihood: the negative log-likelihood of classes sampled from
the model's own predictions, so that the mean square is the diagonal of the Fisher information matrix. answer: v . f(x)
with v drawn from the standard normal distribution, so that the mean square is the diagonal of JT J, the Gauss-Newton
matrix of the squared change of the output.
"""

ROWS = 32
"""Rows of a batch for objectives that compare rows with one another; all others are differentiated sample by sample."""


@dataclass
class GradientStatistics:
    """Of a layer's weight, [out, in] float32 each. absolute: the mean over samples of |g|. square: the mean of g^2."""

    absolute: Tensor
    square: Tensor


def collect_gradients(
    module: nn.Module,
    task: Task,
    dataset: Dataset,
    paths: Sequence[str],
    *,
    loss: GradientLoss | None = None,
    seed: int = 0,
) -> dict[str, GradientStatistics]:
    """Return the gradients with respect to the weights of the linear or convolutional layers at these paths, over a
    dataset.

    loss: by default the objective where there are labels for it, else the likelihood of a classifier, else the answer.
    Memory: two tensors a weight, whatever the number of samples. A tied weight has the gradient of all its uses.
    Raises DataError if the objective cannot be computed on any sample.
    """
    layers = {path: module.get_submodule(path) for path in paths}
    weights: list[nn.Parameter] = [layer.weight for layer in layers.values()]  # type: ignore[misc]
    sums = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    count = 0
    with enable_gradients(weights):
        for value in LOSSES[loss or choose_loss(task, dataset)](module, task, dataset, seed):
            gradients = torch.autograd.grad(value, weights, allow_unused=True)
            for (absolute, square), gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    absolute += gradient.abs()
                    square += gradient.square()
            count += 1
    return {
        path: GradientStatistics(as_matrix(layer, absolute / count), as_matrix(layer, square / count))
        for (path, layer), (absolute, square) in zip(layers.items(), sums, strict=True)
    }


def choose_loss(task: Task, dataset: Dataset) -> GradientLoss:
    """Return the loss that is used by default. A language model's texts are their own labels."""
    return "objective" if dataset.labels is not None or task.self_supervised else task.unlabelled_gradient


@contextmanager
def enable_gradients(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Make these weights require gradients inside the `with` block."""
    before = [weight.requires_grad for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for weight, required in zip(weights, before, strict=True):
            weight.requires_grad_(required)


def objective_losses(module: nn.Module, task: Task, dataset: Dataset, seed: int) -> Iterator[Tensor]:
    """Yield the training loss of each sample, or of each batch if the objective compares rows. Samples that the
    objective refuses, such as texts of a single token, are skipped. Raises DataError if all are."""
    objective = registry.resolve("objective", task.objective).of(task, dataset)
    maker = BatchBuilder(dataset, dataset.samples, objective.collate)
    order = BatchSampler(len(dataset.keys), 1 if objective.splittable else ROWS, seed)
    refused: DataError | None = None
    accepted = False
    for number in range(order.steps):
        try:
            batch = maker.collate(order.batch(number))
        except DataError as error:
            refused = error
            continue
        accepted = True
        yield objective.loss(module, batch)
    if refused is not None and not accepted:
        raise refused


def sampled_likelihoods(module: nn.Module, task: Task, dataset: Dataset, seed: int) -> Iterator[Tensor]:
    """Yield for each sample, the cross-entropy with a class sampled from the model's own prediction."""
    for logits, generator in iterate_outputs(module, task, dataset, seed):
        drawn = torch.multinomial(logits.detach().cpu().softmax(dim=-1), 1, generator=generator)[:, 0]
        yield cross_entropy(logits, drawn.to(logits.device), reduction="sum")


def random_projections(module: nn.Module, task: Task, dataset: Dataset, seed: int) -> Iterator[Tensor]:
    """Yield for each sample, the output projected on a random direction."""
    for answer, generator in iterate_outputs(module, task, dataset, seed):
        yield (answer * torch.randn(answer.shape, generator=generator).to(answer)).sum()


def iterate_outputs(
    module: nn.Module, task: Task, dataset: Dataset, seed: int
) -> Iterator[tuple[Tensor, torch.Generator]]:
    """Yield the first output for each sample, [1, ...] float32, and the random generator to sample with."""
    generator = torch.Generator().manual_seed(seed)
    for batch in forward_batches(task, dataset, 1):
        yield next(iter(call(module, batch).values())).float(), generator


LOSSES: dict[GradientLoss, Callable[[nn.Module, Task, Dataset, int], Iterator[Tensor]]] = {
    "objective": objective_losses,
    "likelihood": sampled_likelihoods,
    "answer": random_projections,
}
