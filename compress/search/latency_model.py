"""Latency model: predicts a candidate's latency and size from its layers, corrected by every artifact that is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median

from compress.search.layer_spec import LayerSpec
from compress.search.results import BuiltArtifact, CostPrediction
from laconic.timing.benchmark import TRIAL_BATCHES


@dataclass
class LatencyModel:
    """The latency of a model as the sum over its layers, plus a constant for each layer.

    The layers are timed one by one, without normalization and residual sums. The constant stands for these; it is
    fitted to the artifacts that were built: the baseline, in which nothing is pruned, and each later one.

    time_layers: the sum of the seconds of layers in the engine that the baseline runs on, by batch size. specs, size:
    the baseline's layers, and bytes of its weights. baseline: its artifact.
    """

    time_layers: Callable[[Sequence[LayerSpec]], dict[int, float]]
    specs: Sequence[LayerSpec]
    size: float
    baseline: BuiltArtifact
    observations: list[tuple[dict[int, float], float, Mapping[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fit(self.specs, self.baseline)

    def fit(self, specs: Sequence[LayerSpec], built: BuiltArtifact) -> None:
        """Add the measured costs of an artifact; one of another engine or precision is left out."""
        one, other = ((each.runtime, each.compute, each.precision) for each in (built, self.baseline))
        if one == other:
            self.observations.append((self.time_layers(specs), count_layers(specs), built.costs))

    def predict_costs(self, specs: Sequence[LayerSpec]) -> dict[int, float]:
        """Processor seconds of a run, by batch size."""
        totals, layers = self.time_layers(specs), count_layers(specs)
        return {batch: self._predict_cost(batch, totals[batch], layers) for batch in TRIAL_BATCHES}

    def _predict_cost(self, batch: int, total: float, layers: float) -> float:
        between = median((cost[batch] - each[batch]) / n for each, n, cost in self.observations)
        if between > 0:
            return total + between * layers
        # The engine is faster than its layers one by one.
        return total * median(cost[batch] / each[batch] for each, _, cost in self.observations)

    def predict(self, specs: Sequence[LayerSpec], size: float) -> CostPrediction:
        """Predict latency, speedup and size of a candidate with these layers. size: bytes of its weights."""
        costs = self.predict_costs(specs)
        ratios = {batch: self.baseline.costs[batch] / costs[batch] for batch in TRIAL_BATCHES}
        return CostPrediction(
            latency=self.baseline.latency / ratios[TRIAL_BATCHES[0]],
            speedup=self.baseline.speedup * geometric_mean(ratios.values()),
            size=max(self.baseline.size + size - self.size, 0.0),
        )


def count_layers(specs: Sequence[LayerSpec]) -> float:
    """The number of layers; predicted ones may count as a fraction."""
    return sum(spec.count for spec in specs)


def saved_bytes(before: Sequence[LayerSpec], after: Sequence[LayerSpec]) -> float:
    """Bytes of INT8 weights that `after` has fewer than `before`."""
    return sum(spec.parameters for spec in before) - sum(spec.parameters for spec in after)
