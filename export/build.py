"""Build a plan for an engine, and measure the fidelity of its outputs."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export.place import place
from laconic import registry
from laconic.arrays import Array, Arrays
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.errors import MissingPackage
from laconic.hardware import cores, this_machine
from laconic.hashing import code_version, hash_of
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan
from laconic.runtimes.predict import predict
from laconic.runtimes.runtime import Compute, Session, make_runtime
from laconic.tasks.task import Task


@dataclass(frozen=True)
class EngineOption:
    """An engine, and the arithmetic of the layers that are not quantized."""

    runtime: str
    compute: Compute

    @property
    def name(self) -> str:
        """The name shown to users: `openvino, bfloat16`."""
        return f"{self.runtime}, {self.compute}"

    def build(self, graph: Graph, plan: Plan, path: Path) -> None:
        """Write the graph with the plan's Q/DQ nodes, placed by this engine's rules, to `path`."""
        rules = registry.resolve("placement", self.runtime)[self.compute]
        place(graph, plan, rules, path)

    def open(self, path: Path, threads: int) -> Session:
        """Load a graph that `build` wrote for this engine."""
        return make_runtime(self.runtime).open(path, threads=threads, compute=self.compute)


SENSITIVITY_OPTION = EngineOption("onnxruntime", "float32")
"""The option that layer sensitivity is measured with: sensitivity depends on the quantization grid and not on the
engine, and this one loads a graph fastest."""


def list_options(engines: tuple[str, ...]) -> list[EngineOption]:
    """List every engine and arithmetic that runs on this machine, the preferred first. Raises MissingPackage if no
    engine is installed."""
    found: list[EngineOption] = []
    absent: list[str] = []
    for name in engines:
        try:
            found += [EngineOption(name, compute) for compute in make_runtime(name).computes()]
        except MissingPackage as error:
            absent.append(str(error))
    if not found:
        raise MissingPackage(" ".join(absent))
    return found


@dataclass(frozen=True)
class PlanEvaluator:
    """Builds plans of one graph and measures their fidelity.

    folder: for the built models. reference: the source's outputs, by the fingerprint of the samples.
    """

    graph: Graph
    task: Task
    cache: Cache
    folder: Path
    reference: dict[str, Arrays]

    def fidelity(self, plan: Plan, option: EngineOption, dataset: Dataset) -> Array:
        """Measure the fidelity of a plan's outputs to the reference, per sample: [samples]. Results are cached."""
        key = hash_of(
            "trial",
            self.graph.key,
            sorted(plan.precision.items()),
            sorted((name, limits.low, limits.high) for name, limits in plan.ranges.items()),
            hash_arrays({name: each.factors for name, each in plan.smoothing.items()}),
            sorted((*layer, each.group_size, hash_arrays(each.arrays)) for layer, each in plan.weights.items()),
            option.name,
            make_runtime(option.runtime).version(),
            this_machine().features,
            dataset.fingerprint,
            hash_arrays(self.reference[dataset.fingerprint]),
            code_version(),
        )

        def compute() -> Arrays:
            path = self.folder / "trial.onnx"
            option.build(self.graph, plan, path)
            with option.open(path, cores()) as session:
                found = predict(session, self.task, dataset)
            return {"fidelity": self.task.fidelity(self.reference[dataset.fingerprint], found)}

        return np.asarray(self.cache.arrays(f"trial-{key}", compute)["fidelity"])


def hash_arrays(arrays: Mapping[str, Array]) -> list[tuple[str, str]]:
    """Compute the SHA-256 of each array, by name."""
    return sorted((name, hashlib.sha256(array.tobytes()).hexdigest()) for name, array in arrays.items())
