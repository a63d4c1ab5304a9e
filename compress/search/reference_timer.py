"""How fast the machine is at this moment: a layer that is always the same, timed beside whatever is timed."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from compress.search.layer_spec import Cell
from compress.search.single_layer import alone
from export.build import EngineOption
from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import code_version, hash_of
from laconic.runtimes.runtime import Session, make_runtime
from laconic.tensor import Array

LAYER, ROWS = Cell("linear", (1, 128, 384), (384, 384)), 8
"""A millisecond or two of one core."""

WARMUP = 2
RUNS = 30
PATIENCE = 0.05
"""Seconds for the runs of whatever is timed, where RUNS of them would take longer."""


@dataclass(frozen=True)
class Yardstick:
    """Of one engine. What else runs on the machine slows a layer and the yardstick alike. Without it, a search beside
    which tests were running foretold that every mild cut was too slow."""

    option: EngineOption
    cache: Cache

    def timed(self, session: Session, inputs: Mapping[str, Array]) -> float:
        """Seconds of the processor for one run: as many yardsticks as it took, each as long as the first time."""
        with alone(LAYER, self.option, "float32") as (own, drawn):
            given = drawn(ROWS)
            found: list[float] = []
            beside: list[float] = []
            for _ in range(WARMUP):
                session.run(inputs)
                own.run(given)
            while len(found) < RUNS and sum(found) < PATIENCE:
                found.append(once(session, inputs))
                beside.append(once(own, given))
        return statistics.median(found) / statistics.median(beside) * self.length

    @property
    def length(self) -> float:
        """Seconds of the yardstick, when it was timed first."""

        def measure() -> float:
            with alone(LAYER, self.option, "float32") as (own, drawn):
                given = drawn(ROWS)
                for _ in range(WARMUP):
                    own.run(given)
                return min(once(own, given) for _ in range(RUNS))

        version = make_runtime(self.option.runtime).version()
        key = hash_of("yardstick", self.option.name, version, this_machine().model_dump(), code_version())
        return float(self.cache.json(f"yardstick-{key}", measure))


def once(session: Session, inputs: Mapping[str, Array]) -> float:
    """Seconds of the processor for a run."""
    start = time.process_time()
    session.run(inputs)
    return time.process_time() - start
