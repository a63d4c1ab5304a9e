"""Trials of plans: how faithful an engine is with them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from export.candidates.engine_option import EngineOption
from export.candidates.plan_search import PlanTrial
from export.validation.information import Chance, measure_chance, measure_information_loss
from laconic.arrays import Array, Arrays
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.hardware import cores, this_machine
from laconic.hashing import digest_arrays, environment_digest, hash_of
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan
from laconic.quantization.plan_file import digest_plan
from laconic.recipes.goal import MARGIN
from laconic.runtimes.predict import predict
from laconic.tasks.fidelity import measure_divergence, measure_fidelity
from laconic.tasks.task import Task


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

    def try_plan(self, plan: Plan, option: EngineOption, dataset: Dataset) -> PlanTrial:
        """Compare a plan's outputs with the reference. Results are cached."""
        reference, reference_key = self._find_reference(dataset)

        def compute() -> Arrays:
            outputs = self._run(plan, option, dataset)
            chance = Chance(*self.cache.json(f"chance-{reference_key}", partial(measure_chance, self.task, reference)))
            loss = measure_information_loss(self.task, reference, outputs, dataset.labels, chance, MARGIN)
            return {
                "fidelity": measure_fidelity(self.task, reference, outputs),
                "information_loss": np.array([loss]),
                "divergence": measure_divergence(self.task, reference, outputs),
            }

        key = hash_of(*self._describe(plan, option, dataset), reference_key)
        measured = self.cache.arrays(f"trial-{key}", compute)
        divergence = float(measured["divergence"].mean())
        return PlanTrial(measured["fidelity"], float(measured["information_loss"][0]), divergence)

    def plan_divergence(
        self, plan: Plan, option: EngineOption, dataset: Dataset, run: Callable[[], Arrays] | None = None
    ) -> Array:
        """Measure the divergence of a plan's outputs from the reference alone, per sample: [samples]. Results are
        cached.

        run: computes the outputs, in place of a run of the whole graph.
        """
        reference, reference_key = self._find_reference(dataset)

        def compute() -> Arrays:
            outputs = run() if run else self._run(plan, option, dataset)
            return {"divergence": measure_divergence(self.task, reference, outputs)}

        key = hash_of(*self._describe(plan, option, dataset), reference_key)
        return np.asarray(self.cache.arrays(f"divergence-{key}", compute)["divergence"])

    def _find_reference(self, dataset: Dataset) -> tuple[Arrays, str]:
        """Find the source's outputs for these samples, and a digest of all that is compared with them."""
        reference = self.reference[dataset.fingerprint]
        return reference, hash_of(self.task.name, digest_arrays(reference), environment_digest())

    def _run(self, plan: Plan, option: EngineOption, dataset: Dataset) -> Arrays:
        """Build a plan, and compute its outputs."""
        path = self.folder / "trial.onnx"
        option.build(self.graph, plan, path)
        with option.open_for_trial(path, cores()) as session:
            return predict(session, self.task, dataset)

    def engine_fidelity(self, plan: Plan, option: EngineOption, dataset: Dataset) -> Array:
        """Measure the fidelity of an engine's outputs to those of the same graph run node by node, per sample, each run
        alone: [samples]. Results are cached."""

        def compute() -> Arrays:
            path = self.folder / "trial.onnx"
            option.build(self.graph, plan, path)
            with option.open_reference(path, cores()) as session:
                plain = predict(session, self.task, dataset, rows=1)
            with option.open(path, 1) as session:
                outputs = predict(session, self.task, dataset, rows=1)
            return {"fidelity": measure_fidelity(self.task, plain, outputs)}

        key = hash_of(*self._describe(plan, option, dataset))
        return np.asarray(self.cache.arrays(f"engine-{key}", compute)["fidelity"])

    def _describe(self, plan: Plan, option: EngineOption, dataset: Dataset) -> tuple[Any, ...]:
        """List all that the outputs of a plan depend on."""
        attention = plan.attention and option.quantizes_attention
        return (
            self.graph.key,
            digest_plan(replace(plan, attention=attention)),
            option.key,
            this_machine().features,
            dataset.fingerprint,
            environment_digest(),
        )
