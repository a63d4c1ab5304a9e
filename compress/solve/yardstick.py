"""How fast the machine is at this moment: a layer that is always the same, timed beside whatever is timed."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compress.solve.cell import Cell
from compress.solve.single import write
from laconic.artifact import make_runtime
from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.plan import Plan
from laconic.record import code_version, hash_of
from laconic.runtimes.runtime import Session
from laconic.tensor import Array
from laconic.trial import Option

LAYER = Cell("linear", (8, 128, 384), (384, 384))
"""A millisecond or two of one core."""

WARMUP = 2
RUNS = 30
PATIENCE = 0.05
"""Seconds for the runs of whatever is timed, where RUNS of them would take longer."""


@dataclass(frozen=True)
class Yardstick:
    """Of one engine. What else runs on the machine slows a layer and the yardstick alike: the same layer took 1.5
    times as long while tests ran on the other core, and a search then foretold that every cut was too slow."""

    option: Option
    cache: Cache

    def timed(self, session: Session, inputs: Mapping[str, Array]) -> float:
        """Seconds of the processor for one run: as many yardsticks as it took, each as long as the first time."""
        with self.opened() as (own, given):
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
            with self.opened() as (own, given):
                for _ in range(WARMUP):
                    own.run(given)
                return min(once(own, given) for _ in range(RUNS))

        version = make_runtime(self.option.runtime).version()
        key = hash_of("yardstick", self.option.name, version, this_machine().model_dump(), code_version())
        return float(self.cache.json(f"yardstick-{key}", measure))

    @contextmanager
    def opened(self) -> Iterator[tuple[Session, Mapping[str, Array]]]:
        """The layer in the engine, one thread, and what goes into it."""
        with tempfile.TemporaryDirectory() as folder:
            graph = write(LAYER, Path(folder))
            model = Path(folder) / "model.onnx"
            self.option.build(graph, Plan({layer.node: "float32" for layer in graph.layers}), model)
            with self.option.open(model, 1) as session:
                yield session, {"x": np.random.default_rng(0).uniform(-1, 1, LAYER.shape).astype(np.float32)}


def once(session: Session, inputs: Mapping[str, Array]) -> float:
    """Seconds of the processor for a run."""
    start = time.process_time()
    session.run(inputs)
    return time.process_time() - start
