"""Predict a whole dataset with a session."""

from collections.abc import Iterable, Iterator

import numpy as np

from laconic.arrays import Array, Arrays, stack_padded
from laconic.data.batches import batches
from laconic.data.dataset import Dataset
from laconic.progress import Step
from laconic.runtimes.runtime import Session
from laconic.tasks.processing import Processing

ROWS = 16
"""Samples per run. With texts sorted by length, larger batches gained nothing on two cores."""


def predict(
    session: Session, task: Processing, dataset: Dataset, step: Step | None = None, *, rows: int = ROWS
) -> Arrays:
    """Compute the outputs for every sample, in the dataset's order: [samples, ...] by name.

    rows: samples per batch. Where samples have outputs of different sizes, smaller ones are padded with zeros.
    """

    def run() -> Iterator[tuple[Array, Arrays]]:
        for indices, batch in batches(dataset, task, rows):
            yield indices, session.run(batch)
            if step:
                step.advance(len(indices))

    return gather_rows(run(), len(dataset))


def gather_rows(outputs: Iterable[tuple[Array, Arrays]], count: int) -> Arrays:
    """Put the outputs of batches in the order of `count` samples: [samples, ...] by name, padded with zeros.

    outputs: for each batch the indices of its samples, and its outputs by name.
    """
    rows: dict[str, list[Array]] = {}
    for indices, batch in outputs:
        for name, array in batch.items():
            slots = rows.setdefault(name, [np.empty(0)] * count)
            for index, row in zip(indices, array, strict=True):
                slots[index] = row
    return {name: stack_padded(slots) for name, slots in rows.items()}
