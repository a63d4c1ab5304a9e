"""The batches in which a dataset is run through a model."""

from collections.abc import Iterator

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.data.dataset import Dataset
from laconic.tasks.processing import Processing


def batches(dataset: Dataset, task: Processing, rows: int) -> Iterator[tuple[Array, Arrays]]:
    """Encode a dataset in batches of at most `rows` samples; yields the indices [samples] and the tensors of each.

    Samples are sorted by length, to pad little. Samples of different shapes share a batch only where the task pads.
    """
    apart = {} if task.padding else {index: str(each) for index, each in enumerate(dataset.shapes)}
    ordered = sorted(range(len(dataset)), key=lambda index: (apart.get(index, ""), dataset.lengths[index], index))
    start = 0
    while start < len(ordered):
        stop = start + 1
        alike = apart.get(ordered[start])
        while stop < min(start + rows, len(ordered)) and apart.get(ordered[stop]) == alike:
            stop += 1
        indices = ordered[start:stop]
        yield np.array(indices), task.encode([dataset.samples[index] for index in indices])
        start = stop
