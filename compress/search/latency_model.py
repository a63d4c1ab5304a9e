"""Latency model: predicts a candidate's latency and size from the times of its layers, each measured once on this
machine, and corrected by every artifact that is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import geometric_mean, median

from compress.search.layer_spec import LayerSpec
from compress.search.layer_timing import ReferenceTimer, open_layer
from compress.search.search_candidate import BuiltArtifact, CostPrediction
from export.candidates.engine_option import EngineOption
from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.quantization.plan import Precision
from laconic.runtimes.runtime import make_runtime
from laconic.timing.benchmark import TRIAL_BATCHES

EMPTY_LAYER = LayerSpec("linear", (1, 8), (8, 8))
"""A layer that costs no more than the run that it is in: 45 us in OpenVINO."""

MIN_SHARE = 0.02
"""The share of its own run that a layer costs at least."""


@dataclass(frozen=True)
class LatencyTable:
    """Seconds of single layers in one engine on this machine, measured when they are first asked for, and cached.

    option: engine and compute precision. precision: of the layers.
    """

    option: EngineOption
    cache: Cache
    precision: Precision = "int8"

    def seconds(self, spec: LayerSpec, batch: int) -> float:
        """Return the seconds of one layer on one core, for a batch size among TRIAL_BATCHES.

        The fixed cost of a run is subtracted: a model pays it once, and not once per layer.
        """
        seconds = self._time_run(spec, self.precision)[str(batch)]
        fixed = self._time_run(EMPTY_LAYER, "float32")[str(TRIAL_BATCHES[0])]
        return max(seconds - fixed, MIN_SHARE * seconds)

    @cached_property
    def _place(self) -> str:
        """Digest of the engine and the machine, which takes 10 ms to look at."""
        version = make_runtime(self.option.runtime).version()
        return hash_of(self.option.name, version, this_machine().model_dump(), environment_digest())

    @cached_property
    def _timer(self) -> ReferenceTimer:
        return ReferenceTimer(self.option, self.cache)

    def _time_run(self, spec: LayerSpec, precision: Precision) -> dict[str, float]:
        """Return the seconds of a graph of this layer alone, by batch size."""

        def measure() -> dict[str, float]:
            with open_layer(spec, self.option, precision) as (session, draw_inputs):
                return {str(size): self._timer.measure(session, draw_inputs(size)) for size in TRIAL_BATCHES}

        key = hash_of("layer", spec.signature, TRIAL_BATCHES, precision, self._place)
        return dict(self.cache.json(f"layer-{key}", measure))

    def total(self, specs: Sequence[LayerSpec]) -> dict[int, float]:
        """Return the seconds of all layers, by batch size."""
        return {batch: sum(spec.count * self.seconds(spec, batch) for spec in specs) for batch in TRIAL_BATCHES}


@dataclass(frozen=True)
class Observation:
    """An artifact that was built: seconds of its layers one by one, by batch size; their number; its costs."""

    totals: Mapping[int, float]
    layers: float
    costs: Mapping[int, float]


@dataclass(frozen=True)
class LatencyModel:
    """The latency of a model as the sum over its layers, plus a constant for each layer.

    The layers are timed one by one, without normalization and residual sums. The constant stands for these; it is
    fitted to the artifacts that were built: the baseline, in which nothing is pruned, and each later one.

    time_layers: the sum of the seconds of layers in the engine that the baseline runs on, by batch size. size: bytes of
    the baseline's weights. baseline: its artifact.
    """

    time_layers: Callable[[Sequence[LayerSpec]], dict[int, float]]
    size: float
    baseline: BuiltArtifact
    observations: tuple[Observation, ...] = ()

    def fit(self, specs: Sequence[LayerSpec], built: BuiltArtifact) -> "LatencyModel":
        """Return the model with the measured costs of an artifact, unless its engine or precision is another."""
        if built.kernels != self.baseline.kernels:
            return self
        observation = Observation(self.time_layers(specs), count_layers(specs), built.costs)
        return replace(self, observations=(*self.observations, observation))

    def predict_costs(self, specs: Sequence[LayerSpec]) -> dict[int, float]:
        """Predict the processor seconds of a run, by batch size."""
        totals, layers = self.time_layers(specs), count_layers(specs)
        return {batch: self._predict_cost(batch, totals[batch], layers) for batch in TRIAL_BATCHES}

    def _predict_cost(self, batch: int, total: float, layers: float) -> float:
        between = median((seen.costs[batch] - seen.totals[batch]) / seen.layers for seen in self.observations)
        if between > 0:
            return total + between * layers
        # The engine is faster than its layers one by one.
        return total * median(seen.costs[batch] / seen.totals[batch] for seen in self.observations)

    def predict(self, specs: Sequence[LayerSpec], size: float) -> CostPrediction:
        """Predict the costs of a candidate with these layers; the time to the first token and that of the tokens behind
        it are taken to change as the latency of one sample does. size: bytes of its weights."""
        costs, baseline = self.predict_costs(specs), self.baseline
        ratios = {batch: baseline.costs[batch] / costs[batch] for batch in TRIAL_BATCHES}
        ratio, first, rate = ratios[TRIAL_BATCHES[0]], baseline.first_token, baseline.tokens_per_second
        return CostPrediction(
            latency=baseline.latency / ratio,
            speedup=baseline.speedup * geometric_mean(ratios.values()),
            size=max(baseline.size + size - self.size, 0.0),
            first_token=None if first is None else first / ratio,
            tokens_per_second=None if rate is None else rate * ratio,
        )


def count_layers(specs: Sequence[LayerSpec]) -> float:
    """Count the layers; predicted ones may count as a fraction."""
    return sum(spec.count for spec in specs)


def saved_bytes(before: Sequence[LayerSpec], after: Sequence[LayerSpec]) -> float:
    """Return the bytes of INT8 weights that `after` has fewer than `before`."""
    return sum(spec.parameters for spec in before) - sum(spec.parameters for spec in after)
