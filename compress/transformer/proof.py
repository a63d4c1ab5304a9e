"""The proof of a structural cut: the smaller model computes what the larger one does with the cut parts silenced."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compress.statistics.gram import forward_batches
from compress.transformer.anatomy import Site
from compress.transformer.surgery import columns
from laconic.data.dataset import Dataset
from laconic.errors import PruningError
from laconic.models.signature import call
from laconic.tasks.task import Task

TOLERANCE = 1e-5
"""Of the largest answer, in FP32: both sum the same numbers, in another order."""
SAMPLES = 8


@contextmanager
def silenced(module: nn.Module, kept: Mapping[str, tuple[Site, Sequence[int]]]) -> Iterator[None]:
    """In the body, only these units of each site, by its consumer's path, are heard."""
    handles = []
    for path, (site, units) in kept.items():
        layer = module.get_submodule(path)
        heard = torch.zeros(site.units * site.width)
        heard[columns(site, units)] = 1

        def hook(layer: nn.Module, args: tuple[Tensor, ...], heard: Tensor = heard) -> tuple[Tensor, ...]:
            return (args[0] * heard.to(args[0]), *args[1:])

        handles.append(layer.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def skipped(module: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """In the body, the blocks at these paths give back what goes into them."""
    handles = []
    for path in paths:

        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            into = args[0] if args else kwargs["hidden_states"]
            return (into, *out[1:]) if isinstance(out, tuple) else into

        handles.append(module.get_submodule(path).register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def prove(
    larger: nn.Module,
    silence: Callable[[], Any],
    smaller: nn.Module,
    task: Task,
    dataset: Dataset,
    *,
    tolerance: float = TOLERANCE,
) -> float:
    """The largest difference of the two models' answers to a few of the samples, as a share of the largest answer.

    silence: makes the context in which the larger model does without what was cut. Raises PruningError beyond the
    tolerance, or where the smaller model does not run at all.
    """
    worst = 0.0
    with torch.no_grad():
        for batch in forward_batches(task, dataset.take(SAMPLES)):
            with silence():
                expected = call(larger, batch)
            try:
                found = call(smaller, batch)
            except (RuntimeError, ValueError, IndexError) as error:
                raise broken(f"it does not run: {str(error).splitlines()[0]}") from error
            worst = max(worst, *(distance(expected[name], found[name]) for name in expected))
    if not worst <= tolerance:
        raise broken(f"its answers differ by {worst:.2g} of the largest one, at most {tolerance:g} is expected")
    return worst


def distance(expected: Tensor, found: Tensor) -> float:
    """The largest difference, as a share of the largest value; infinite for unlike shapes, NaN where there is one."""
    if expected.shape != found.shape:
        return math.inf
    largest = float(expected.abs().max())
    return float((expected - found).abs().max()) / (largest or 1.0)


def broken(what: str) -> PruningError:
    """The error for a cut that did more than it should."""
    return PruningError(
        f"after the cut the model is not the one before it without what was cut: {what}. Leave this stage out, and "
        f"report the architecture: something in its blocks depends on what was cut"
    )
