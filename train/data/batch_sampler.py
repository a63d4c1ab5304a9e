"""Which rows are in which batch: shuffled anew for each epoch, a pure function of the seed and the step."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from laconic.arrays import Array
from laconic.data.dataset import Dataset
from laconic.errors import DataError, RecipeError

WINDOW = 50
"""Batches of shuffled rows that are sorted by length together."""


class BatchSampler:
    """The rows of each step's batch, for any number of steps. They depend on the step alone, so resuming is free."""

    def __init__(
        self,
        count: int,
        rows: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        lengths: Sequence[int] | None = None,
        fewest: int = 1,
    ) -> None:
        """count: rows of the dataset. rows: of a batch, all ranks together. fewest: rows of a rank's batch; a smaller
        last one of an epoch takes rows of the one before, or has them too. lengths: of each row. Where they are given,
        rows of similar length are batched together, which saves padding: each WINDOW batches of the shuffled rows are
        sorted by length, and the batches are shuffled again. Rows that fill no batch are any rows, and not the longest.

        Raises DataError where there is no row; RecipeError for a batch smaller than the ranks.
        """
        if count < 1:
            raise DataError("there are no rows to train with. Give a file that has some")
        fewest *= world
        if rows < world or not 0 <= rank < world:
            raise RecipeError(
                f"a batch of {rows} rows cannot be shared by {world} ranks. Give each rank a row at least"
            )
        self.rows, self.steps = rows, -(-count // rows)
        last = count - (self.steps - 1) * rows
        self._borrowed = max(0, fewest - last) if fewest > world and self.steps > 1 else 0
        self._given = self._borrowed if rows - self._borrowed >= fewest else 0
        self._count, self._seed, self._rank, self._world = count, seed, rank, world
        self._lengths = None if lengths is None else np.asarray(lengths)
        # Two epochs, since workers are ahead of the loop at the end of one.
        self._shuffled = lru_cache(2)(self._shuffle)

    def batch(self, step: int) -> list[int]:
        """Return the rows of a step on this rank. Ranks differ by one row at most.

        There are none where the last batch of an epoch has fewer rows than there are ranks.
        """
        epoch, number = divmod(step, self.steps)
        begin, end = (min(edge, self.steps - 1) * self.rows for edge in (number, number + 1))
        if number == self.steps - 1:
            begin, end = begin - self._borrowed, self._count
        elif number == self.steps - 2:
            end -= self._given
        rows: list[int] = self._shuffled(epoch)[begin:end].tolist()
        start, stop = (len(rows) * rank // self._world for rank in (self._rank, self._rank + 1))
        return rows[start:stop]

    def _shuffle(self, epoch: int) -> Array:
        """Shuffle all rows into the order of an epoch, [count] int64."""
        rng = np.random.default_rng((self._seed, epoch))
        rows = rng.permutation(self._count)
        if self._lengths is None:
            return rows
        size, full = WINDOW * self.rows, self._count // self.rows
        filling, rest = rows[: full * self.rows], rows[full * self.rows :]
        for start in range(0, len(filling), size):
            part = filling[start : start + size]
            filling[start : start + size] = part[np.argsort(self._lengths[part], kind="stable")]
        batches = filling.reshape(full, self.rows)[rng.permutation(full)]
        return np.concatenate([batches.reshape(-1), rest])


def row_lengths(dataset: Dataset) -> tuple[int, ...]:
    """Return the length of each row: that of its longer sample, where it has two."""
    per_row = dataset.per_row
    return tuple(max(dataset.lengths[row * per_row : (row + 1) * per_row]) for row in range(len(dataset.keys)))
