"""The memory and the time that a stage of a pipeline takes, found by simulating two micro-batches that pass it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from train.planner.step_cost import StepCost

Place = Literal["first", "middle", "last"]
"""Where a stage is: the first has the embedding, and the last the head and the loss."""
Bytes = NDArray[np.float64]
"""Bytes by category, [categories]."""


@dataclass(frozen=True)
class StageCase:
    """A stage that is simulated. layers: that it has. rows: of a micro-batch. tensor: ranks that have a part of its
    layers each, of which it is the first."""

    place: Place
    layers: int
    rows: int
    tensor: int


@dataclass(frozen=True)
class StageFootprint:
    """What a stage takes. Bytes are [categories].

    held: by its weights, buffers and the optimizer's state. gradients: when there are any. saved: for the backward pass
    of one micro-batch. forward, first_backward, backward, optimizer: at the peak of such a pass, beside what there was
    when it began; the first backward pass makes the gradients that others add to. inputs, weights: at the peak of the
    two parts of a backward pass, for the gradients of the inputs and of the weights. between: held from the one to the
    other, the gradients of what the weights' are computed from; none for the first stage, where torch leaves all to the
    second part. hidden: bytes of the hidden states of a micro-batch. passes: the cost of a pass of one micro-batch, by
    the kind of action, as in `Action`. stepping: that of the optimizer.
    """

    held: Bytes
    gradients: Bytes
    saved: Bytes
    forward: Bytes
    first_backward: Bytes
    backward: Bytes
    inputs: Bytes
    weights: Bytes
    between: Bytes
    optimizer: Bytes
    hidden: float
    passes: Mapping[str, StepCost]
    stepping: StepCost


def combine_footprints(terms: Iterable[tuple[float, StageFootprint]]) -> StageFootprint:
    """Return the weighted sum of footprints: between and beyond them, all figures are linear."""
    weights, parts = zip(*terms, strict=True)
    columns = zip(*(tuple(vars(part).values()) for part in parts), strict=True)
    totals: list[Any] = []
    for column in columns:
        pairs = list(zip(weights, column, strict=True))
        if isinstance(column[0], StepCost):
            totals.append(sum_costs(pairs))
        elif isinstance(column[0], Mapping):
            totals.append({kind: sum_costs((weight, costs[kind]) for weight, costs in pairs) for kind in column[0]})
        else:
            totals.append(sum(weight * value for weight, value in pairs))
    return StageFootprint(*totals)


def sum_costs(terms: Iterable[tuple[float, StepCost]]) -> StepCost:
    """Return the weighted sum of costs."""
    result = StepCost()
    for weight, cost in terms:
        result = result.plus(cost, weight)
    return result
