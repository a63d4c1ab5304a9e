"""The proof of a structural cut: the smaller model computes what the larger one does with the removed parts masked."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from compress.statistics.layer_inputs import forward_batches
from compress.transformer.surgery import consumer_columns
from laconic.data.dataset import Dataset
from laconic.errors import PruningError
from laconic.models.anatomy import Site
from laconic.models.hooks import forward_hooks
from laconic.models.signature import call
from laconic.tasks.task import Task

TOLERANCE = 1e-5
"""Largest difference as a share of the largest output, in FP32: both models sum the same numbers, in another order."""
SAMPLES = 8


def mask_units(module: nn.Module, kept: Mapping[str, tuple[Site, Sequence[int]]]) -> AbstractContextManager[None]:
    """Zero all but the kept units of each site, by its consumer's path, inside the `with` block."""
    masks: dict[str, Tensor] = {}
    for path, (site, units) in kept.items():
        masks[path] = torch.zeros(site.units * site.width)
        masks[path][consumer_columns(site, units)] = 1

    def mask(path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0] * masks[path].to(args[0]), *args[1:]), kwargs

    return forward_hooks(module, kept, before=mask)


def skip_blocks(module: nn.Module, paths: Sequence[str]) -> AbstractContextManager[None]:
    """Make the blocks at these paths return their input inside the `with` block."""

    def skip(path: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        into = args[0] if args else kwargs["hidden_states"]
        return (into, *out[1:]) if isinstance(out, tuple) else into

    return forward_hooks(module, paths, after=skip)


def prove(
    larger: nn.Module,
    mask: Callable[[], AbstractContextManager[None]],
    smaller: nn.Module,
    task: Task,
    dataset: Dataset,
    *,
    tolerance: float = TOLERANCE,
) -> float:
    """Return the largest difference between the two models' outputs on a few samples, as a share of the largest output.

    mask: makes the context in which the larger model runs without the removed parts. Raises PruningError beyond the
    tolerance, or if the smaller model does not run at all.
    """
    worst = 0.0
    with torch.no_grad():
        for batch in forward_batches(task, dataset.take(SAMPLES)):
            with mask():
                expected = call(larger, batch)
            try:
                outputs = call(smaller, batch)
            except (RuntimeError, ValueError, IndexError) as error:
                raise broken_cut(f"it does not run: {str(error).splitlines()[0]}") from error
            worst = max(worst, *(relative_difference(expected[name], outputs[name]) for name in expected))
    if not worst <= tolerance:
        raise broken_cut(f"its outputs differ by {worst:.2g} of the largest one, at most {tolerance:g} is expected")
    return worst


def relative_difference(expected: Tensor, actual: Tensor) -> float:
    """Return the largest difference, as a share of the largest value; infinite for different shapes, NaN if any is
    NaN."""
    if expected.shape != actual.shape:
        return math.inf
    largest = float(expected.abs().max())
    return float((expected - actual).abs().max()) / (largest or 1.0)


def broken_cut(reason: str) -> PruningError:
    """Return the error for a cut that changed more than the removed parts."""
    return PruningError(
        f"after the cut the model does not compute what it did before without the removed parts: {reason}. Leave this "
        f"stage out, and report the architecture: something in its blocks depends on what was removed"
    )
