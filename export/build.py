"""Build a plan for an engine, and see how faithful its answers are."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laconic import registry
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.errors import MissingPackage
from laconic.hardware import cores, this_machine
from laconic.hashing import code_version, hash_of
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan
from laconic.runtimes.predict import answers
from laconic.runtimes.runtime import Compute, Session, make_runtime
from laconic.tasks.task import Task
from laconic.tensor import Array, Arrays


@dataclass(frozen=True)
class Option:
    """An engine, and the arithmetic of what is not quantized. The graph is written as that engine wants it."""

    runtime: str
    compute: Compute

    @property
    def name(self) -> str:
        """As shown to people: `openvino, bfloat16`."""
        return f"{self.runtime}, {self.compute}"

    def build(self, graph: Graph, plan: Plan, path: Path) -> None:
        """Write the plan into the graph for this engine."""
        rules = registry.resolve("placement", self.runtime)[self.compute]
        registry.load("export.place:place")(graph, plan, rules, path)

    def open(self, path: Path, threads: int) -> Session:
        """Load a graph that was built for this engine."""
        return make_runtime(self.runtime).open(path, threads=threads, compute=self.compute)


PROBE_OPTION = Option("onnxruntime", "float32")
"""Where a layer's harm is measured: it is the grid's, not the engine's, and this one opens a graph fastest."""


def options(engines: tuple[str, ...]) -> list[Option]:
    """Every way to run on this machine, the preferred first. Raises MissingPackage where no engine is installed."""
    found: list[Option] = []
    absent: list[str] = []
    for name in engines:
        try:
            found += [Option(name, compute) for compute in make_runtime(name).computes()]
        except MissingPackage as error:
            absent.append(str(error))
    if not found:
        raise MissingPackage(" ".join(absent))
    return found


@dataclass(frozen=True)
class Bench:
    """Where plans are tried. reference: the source's answers, by the fingerprint of the samples."""

    graph: Graph
    task: Task
    cache: Cache
    folder: Path
    reference: dict[str, Arrays]

    def fidelity(self, plan: Plan, option: Option, dataset: Dataset) -> Array:
        """Fidelity per sample, [samples]. Kept in the cache, by everything that it depends upon."""
        key = hash_of(
            "trial",
            self.graph.key,
            sorted(plan.precision.items()),
            sorted((name, limits.low, limits.high) for name, limits in plan.ranges.items()),
            digests({name: each.factors for name, each in plan.smoothing.items()}),
            sorted((*layer, each.group_size, digests(each.arrays)) for layer, each in plan.weights.items()),
            option.name,
            make_runtime(option.runtime).version(),
            this_machine().features,
            dataset.fingerprint,
            digests(self.reference[dataset.fingerprint]),
            code_version(),
        )

        def compute() -> Arrays:
            path = self.folder / "trial.onnx"
            option.build(self.graph, plan, path)
            with option.open(path, cores()) as session:
                found = answers(session, self.task, dataset)
            return {"fidelity": self.task.fidelity(self.reference[dataset.fingerprint], found)}

        return np.asarray(self.cache.arrays(f"trial-{key}", compute)["fidelity"])


def digests(arrays: Mapping[str, Array]) -> list[tuple[str, str]]:
    """The digest of each array, by name."""
    return sorted((name, hashlib.sha256(array.tobytes()).hexdigest()) for name, array in arrays.items())
