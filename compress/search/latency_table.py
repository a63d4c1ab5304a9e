"""Latency table: the time of a layer on this machine by shape and precision, each measured once and cached."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from compress.search.layer_spec import LayerSpec
from compress.search.reference_timer import ReferenceTimer
from compress.search.single_layer import open_layer
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


@dataclass
class LatencyTable:
    """Seconds of single layers in one engine. An entry is measured when it is first asked for.

    option: engine and compute precision. precision: of the layers.
    """

    option: EngineOption
    cache: Cache
    precision: Precision = "int8"
    measured: int = field(default=0)
    """Entries that were measured in this run, and not found in the cache."""

    def seconds(self, spec: LayerSpec, batch: int) -> float:
        """Seconds of one layer on one core, for a batch size among TRIAL_BATCHES.

        The fixed cost of a run is subtracted: a model pays it once, and not once per layer.
        """
        found = self._run(spec, self.precision)[str(batch)]
        fixed = self._run(EMPTY_LAYER, "float32")[str(TRIAL_BATCHES[0])]
        return max(found - fixed, MIN_SHARE * found)

    def _run(self, spec: LayerSpec, precision: Precision) -> dict[str, float]:
        """Seconds of a graph of this layer alone, by batch size."""
        engine = make_runtime(self.option.runtime)
        key = hash_of(
            "layer",
            spec.signature,
            TRIAL_BATCHES,
            precision,
            self.option.name,
            engine.version(),
            this_machine().model_dump(),
            environment_digest(),
        )

        def measure() -> dict[str, float]:
            self.measured += 1
            timer = ReferenceTimer(self.option, self.cache)
            with open_layer(spec, self.option, precision) as (session, draw_inputs):
                return {str(size): timer.measure(session, draw_inputs(size)) for size in TRIAL_BATCHES}

        return dict(self.cache.json(f"layer-{key}", measure))

    def total(self, specs: Sequence[LayerSpec]) -> dict[int, float]:
        """Seconds of all layers, by batch size."""
        return {batch: sum(each.count * self.seconds(each, batch) for each in specs) for batch in TRIAL_BATCHES}
