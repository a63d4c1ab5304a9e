"""How fast and how large a candidate will be, from its layers alone; held against every one that is built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from compress.search.finish import Built, geometric
from compress.search.latency_table import Table
from compress.search.layer_spec import Cell
from laconic.timing.benchmark import TRIAL_BATCHES


@dataclass(frozen=True)
class Prediction:
    """latency: seconds for one sample. speedup: over the original. size: bytes."""

    latency: float
    speedup: float
    size: float


@dataclass
class Forecast:
    """Time is that of the layers, from the table, and of what stands between them, as much for each layer: the table
    knows no normalisation, no residual sum. How much that is, the built candidates tell: the first, in
    which nothing is cut, and each that comes after.

    table: of the engine that the first candidate runs on. cells, size: its layers, and bytes of its weights.
    """

    table: Table
    cells: Sequence[Cell]
    size: float
    first: Built
    seen: list[tuple[dict[int, float], float, Mapping[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.learn(self.cells, self.first)

    def learn(self, cells: Sequence[Cell], built: Built) -> None:
        """Take in what a built candidate really costs."""
        if (built.option, built.precision) == (self.first.option, self.first.precision):
            self.seen.append((self.table.total(cells), count(cells), built.costs))

    def costs(self, cells: Sequence[Cell]) -> dict[int, float]:
        """Seconds of the processor for a run, by batch."""
        totals, layers = self.table.total(cells), count(cells)
        return {batch: self._cost(batch, totals[batch], layers) for batch in TRIAL_BATCHES}

    def _cost(self, batch: int, total: float, layers: float) -> float:
        between = float(np.median([(cost[batch] - each[batch]) / n for each, n, cost in self.seen]))
        if between > 0:
            return total + between * layers
        # The engine is faster than its layers one by one.
        return total * float(np.median([cost[batch] / each[batch] for each, _, cost in self.seen]))

    def predict(self, cells: Sequence[Cell], size: float) -> Prediction:
        """Of a candidate with these layers. size: bytes of its weights."""
        costs = self.costs(cells)
        ratios = {batch: self.first.costs[batch] / costs[batch] for batch in TRIAL_BATCHES}
        return Prediction(
            latency=self.first.latency / ratios[TRIAL_BATCHES[0]],
            speedup=self.first.speedup * geometric(ratios),
            size=max(self.first.size + size - self.size, 0.0),
        )


def count(cells: Sequence[Cell]) -> float:
    """How many layers."""
    return sum(cell.count for cell in cells)


def slimmer(before: Sequence[Cell], after: Sequence[Cell]) -> float:
    """Bytes of weights in INT8 that are fewer."""
    return sum(cell.parameters for cell in before) - sum(cell.parameters for cell in after)
