"""Reference timer: times a session in turns with a fixed reference layer, so that other load on the machine cancels."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from compress.search.layer_spec import LayerSpec
from compress.search.single_layer import open_layer
from export.candidates.engine_option import EngineOption
from laconic.arrays import Array
from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.runtimes.runtime import Session, make_runtime

REFERENCE_LAYER, REFERENCE_BATCH = LayerSpec("linear", (1, 128, 384), (384, 384)), 8
"""A millisecond or two of one core."""

WARMUP = 2
RUNS = 30
MAX_SECONDS = 0.05
"""Seconds for the timed runs, where RUNS of them would take longer."""


@dataclass(frozen=True)
class ReferenceTimer:
    """Times sessions of one engine relative to a reference layer.

    Load on the machine slows the timed session and the reference layer alike. Without the reference, a search that ran
    beside tests predicted every mild pruning to be too slow.
    """

    option: EngineOption
    cache: Cache

    def measure(self, session: Session, inputs: Mapping[str, Array]) -> float:
        """Processor seconds of one run, as if the machine were as fast as when the reference layer was first timed."""
        with open_layer(REFERENCE_LAYER, self.option, "float32") as (reference, draw_inputs):
            reference_inputs = draw_inputs(REFERENCE_BATCH)
            times: list[float] = []
            reference_times: list[float] = []
            for _ in range(WARMUP):
                session.run(inputs)
                reference.run(reference_inputs)
            while len(times) < RUNS and sum(times) < MAX_SECONDS:
                times.append(time_run(session, inputs))
                reference_times.append(time_run(reference, reference_inputs))
        return statistics.median(times) / statistics.median(reference_times) * self.reference_seconds

    @property
    def reference_seconds(self) -> float:
        """Processor seconds of the reference layer when it was first timed on this machine, from the cache."""

        def measure() -> float:
            with open_layer(REFERENCE_LAYER, self.option, "float32") as (reference, draw_inputs):
                inputs = draw_inputs(REFERENCE_BATCH)
                for _ in range(WARMUP):
                    reference.run(inputs)
                return min(time_run(reference, inputs) for _ in range(RUNS))

        version = make_runtime(self.option.runtime).version()
        key = hash_of("reference-layer", self.option.name, version, this_machine().model_dump(), environment_digest())
        return float(self.cache.json(f"reference-layer-{key}", measure))


def time_run(session: Session, inputs: Mapping[str, Array]) -> float:
    """Processor seconds of one run."""
    start = time.process_time()
    session.run(inputs)
    return time.process_time() - start
