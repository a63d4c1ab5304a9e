"""Evaluating a model on a validation set: its mean loss, and the metric of its task, in one pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laconic.arrays import Array, Arrays, stack_padded
from laconic.data.dataset import Dataset
from laconic.errors import DataError, InputError
from laconic.metrics import cosine
from laconic.models.signature import name_outputs
from train.data.batch_builder import BatchBuilder
from train.data.batch_sampler import BatchSampler, row_lengths
from train.finetune.metric import Metric
from train.step.objective import Batch, Objective
from train.step.parallel_strategy import ParallelStrategy

ROWS = 32
"""Rows of a batch: larger batches are no faster on a CPU, and evaluation on a GPU is short anyway."""

Row = tuple[Array, ...]
"""The outputs of one sample."""

BatchResult = tuple[dict[str, float], list[list[Array]]]
"""The sums of a batch's figures, and for each call of the module its outputs."""

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
    strategy: ParallelStrategy | None = None,
    metrics: Mapping[str, Metric] = MappingProxyType({}),
    before_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Evaluate the mean loss and the objective's further figures, what is made of the loss (a perplexity) or else the
    task's metric, where the labels are for it, and the given metrics by name.

    The module is set to evaluation mode, and its training mode is restored. device: of its inputs. rows: of a batch; no
    more than training takes at once, so that evaluation needs no more memory than training. strategy: of the ranks that
    have the model together. before_batch: called before each; it may raise.
    """
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            compute = (strategy or ParallelStrategy()).compute
            figures, outputs = run_dataset(
                module, objective, dataset, device, rows, forward_context, compute, before_batch
            )
    finally:
        module.train(training)
    return (
        figures
        | (objective.interpret_loss(figures["loss"]) or compute_metric(objective, dataset, outputs))
        | {name: compute_named(name, metric, dataset, outputs) for name, metric in metrics.items()}
    )


def run_dataset(
    module: nn.Module,
    objective: Objective,
    dataset: Dataset,
    device: torch.device,
    rows: int,
    forward_context: ForwardContext,
    compute: Callable[[Callable[[], BatchResult]], BatchResult],
    before_batch: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], list[Row]]:
    """Return the means of the objective's figures over all terms of a dataset, and the outputs of each sample, of any
    shape.

    An objective that compares rows sees `rows` of them at a time, drawn at random; else rows of similar length are
    batched. There are no outputs where the objective does not call the module itself. compute: as of a
    `ParallelStrategy`.
    """
    lengths = row_lengths(dataset) if objective.splittable else None
    sampler = BatchSampler(len(dataset.keys), rows, seed=0, lengths=lengths)
    builder = BatchBuilder(dataset, dataset.samples, objective.collate)
    totals, terms, row_outputs = dict[str, float](), 0, dict[int, Row]()
    for number in range(sampler.steps):
        before_batch()
        members = sampler.batch(number)
        batch = {name: tensor.to(device) for name, tensor in builder.collate(members).items()}
        sums, calls = compute(partial(run_batch, module, objective, batch, forward_context))
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
        terms += int(objective.count_terms(batch))
        samples = [row * dataset.per_row + offset for row in members for offset in range(dataset.per_row)]
        for arrays in calls:
            row_outputs |= dict(zip(samples, zip(*arrays, strict=True), strict=True))
    if not terms:
        raise DataError(
            f"no row of {dataset.name} has a label that counts: all are masked, ignored or empty. Give other rows to "
            f"evaluate with"
        )
    figures = {name: total / terms for name, total in totals.items()}
    return figures, [row_outputs[index] for index in sorted(row_outputs)]


def run_batch(module: nn.Module, objective: Objective, batch: Batch, forward_context: ForwardContext) -> BatchResult:
    """Return the sums of a batch's figures, and for each call of the module the outputs that have its rows."""
    with forward_context(), record_outputs(module) as calls:
        sums = {name: float(value) for name, value in objective.measure(module, batch).items()}
    rowwise = [[output for output in outputs if output.shape[:1] == outputs[0].shape[:1]] for outputs in calls]
    return sums, [[output.float().cpu().numpy() for output in outputs] for outputs in rowwise]


@contextmanager
def record_outputs(module: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Append the outputs of the module to the yielded list whenever it is called in the body."""
    calls: list[list[Tensor]] = []

    def record(called: nn.Module, arguments: tuple[Any, ...], answer: Any) -> None:
        calls.append(list(name_outputs(answer).values()))

    handle = module.register_forward_hook(record)
    try:
        yield calls
    finally:
        handle.remove()


def compute_metric(objective: Objective, dataset: Dataset, rows: list[Row]) -> dict[str, float]:
    """Compute the metric of the task by its name; empty where there are no labels, or they do not fit it.

    rows: the outputs of each sample.
    """
    task = objective.task
    if dataset.labels is None or not rows:
        return {}
    outputs: Arrays = {str(number): stack_padded(values) for number, values in enumerate(zip(*rows, strict=True))}
    try:
        score = task.scorer(outputs, dataset.labels)
    except (InputError, DataError):
        return {}
    return {task.metric: float(score(np.arange(len(dataset))))}


def compute_named(name: str, metric: Metric, dataset: Dataset, rows: list[Row]) -> float:
    """Compute a metric on the first output. rows: the outputs of each sample. Raises DataError for other samples."""
    if dataset.labels is None or not rows:
        raise DataError(f"metrics: {name} compares the model's outputs with labels, and there are none. Leave it out")
    outputs, labels = stack_padded([row[0] for row in rows]), np.asarray(dataset.labels)
    if dataset.per_row == 2:
        outputs, labels = cosine(outputs[0::2], outputs[1::2]), labels[0::2]
    try:
        return metric.compute(outputs, labels)
    except DataError as error:
        raise DataError(f"metrics: {name}: {error}") from None
