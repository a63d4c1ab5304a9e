"""From a recipe to an artifact: the order of the steps."""

import platform
import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from compress.transform import Job, Transformation, faithfulness, opened, standing
from export.build import PROBE_OPTION, Bench, Option, options
from export.candidates import Candidate, climb, fastest, overall, ways
from export.evidence import question
from laconic import __version__, registry
from laconic.artifacts.artifact import MODEL, Artifact, check_destination, publish
from laconic.artifacts.record import Record
from laconic.artifacts.verdict import Verdict
from laconic.artifacts.writer import Parts, assemble
from laconic.cache import Cache
from laconic.errors import LaconicError, RuntimeFailure, UnsupportedPrecision
from laconic.hardware import this_machine
from laconic.hashing import code_version, hash_of
from laconic.models.source import Source, capture, capture_error
from laconic.progress import Step, Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, PrecisionLadder
from laconic.recipes.goal import missed, tightened, wanted
from laconic.recipes.recipe import Recipe
from laconic.recipes.stage import PlanContext, PlanStage, TorchStage, describe
from laconic.runtimes.runtime import make_runtime
from laconic.tasks.task import Task
from laconic.tensor import Array, Arrays
from laconic.timing.measurements import ORIGINAL, Measured, knee
from laconic.timing.race import BATCHES, TRIAL_BATCHES, race


@dataclass(frozen=True)
class Result:
    """An artifact, and a sentence for each part of the goal that it misses."""

    artifact: Artifact
    missed: tuple[str, ...]


def compress(
    recipe: Recipe, destination: Path, *, trust: bool = False, steps: Steps | None = None, cache: Cache | None = None
) -> Result:
    """Do what the recipe says, and write the artifact to `destination`, whole or not at all.

    An interrupted run resumes from the cache. Where the goal is missed the best artifact is written all the same, and
    the result says what it misses. Raises a LaconicError for a source, data or a recipe that is wrong.
    """
    steps, cache = steps or Steps(), cache or Cache()
    check_destination(destination)
    with opened(recipe, destination, steps, cache, trust=trust) as (source, job):
        assemble(Run(source, job).parts(), job.folder / "artifact")
        publish(job.folder / "artifact", destination)
    artifact = Artifact.load(destination)
    return Result(artifact, tuple(missed(artifact, recipe.goal)))


class Run:
    """One run over one source: what its steps share."""

    def __init__(self, source: Source, job: Job) -> None:
        self.recipe = job.recipe
        self.source = source
        self.samples = job.samples
        self.folder = job.folder
        self.steps = job.steps
        self.cache = job.cache
        self.task: Task = source.task
        self.tolerance = wanted(source.task, job.recipe.goal)
        self.line = Transformation(source, job)

    def parts(self) -> Parts:
        """All steps; what the artifact is made of."""
        stages = list(zip((step.name for step in self.recipe.stages), self.recipe.build(), strict=True))
        self.line.pass_through([(name, stage) for name, stage in stages if isinstance(stage, TorchStage)])
        source = self.line.model
        with self.steps.step("capture the graph") as step:
            graph = capture(source, self.cache)
            step.note = f"{len(graph.layers)} layers, error {capture_error(source, graph, self.cache) or 0:.1g}"
        bench = Bench(graph, self.task, self.cache, self.folder, self.references())
        found = options(self.recipe.engines)
        start = time.perf_counter()
        planned = [(name, stage) for name, stage in stages if isinstance(stage, PlanStage)]
        ladder = self.planned(planned, graph, bench)
        made = self.candidates(ladder, bench, found)
        seconds = time.perf_counter() - start
        candidates = self.raced(made, graph)
        chosen = fastest(candidates)
        for name, stage in planned:
            self.enter(name, stage, chosen, seconds)
        with self.steps.step("validate") as step:
            verdict, golden = self.validated(chosen, bench, capture_error(source, graph, self.cache))
            step.note = "passed" if verdict.passed else "; ".join(verdict.failures)
        measured = self.measured(chosen)
        manifest = self.manifest(chosen, graph, verdict)
        about = {"recipe": self.recipe, "ladder": ladder, "graph": graph, "candidates": candidates}
        report = partial(registry.load("export.report.report:render"), **about)
        return Parts(manifest, chosen.model, self.task, golden, measured, report)

    def references(self) -> dict[str, Arrays]:
        """The source's answers to all samples that something is decided or judged by."""
        sets = (self.samples.choose, self.samples.probe, self.samples.judge)
        with self.steps.step("ask the original", sum(map(len, sets))) as step:
            return {dataset.fingerprint: self.line.reference(dataset, step) for dataset in sets}

    def planned(self, stages: Sequence[tuple[str, PlanStage]], graph: Graph, bench: Bench) -> PrecisionLadder:
        """What quantization proposes; without it, the graph as it is."""
        if not stages:
            return PrecisionLadder.of(Plan({layer.node: "float32" for layer in graph.layers}))
        ((name, stage),) = stages
        trial = partial(bench.fidelity, option=PROBE_OPTION, dataset=self.samples.probe)
        context = self.line.context(name, stage)
        return stage.plan(graph, PlanContext(**vars(context), trial=trial, history=standing(self.line.history)))

    def candidates(self, ladder: PrecisionLadder, bench: Bench, found: list[Option]) -> list[Candidate]:
        """For each engine, and each way to go with it, the first plan that meets the goal, built and looked into.

        An engine that refuses the graph, or does not run what was asked for, is left out; raises its error where none
        is left.
        """
        made: dict[str, Candidate] = {}
        refused: list[LaconicError] = []
        with self.steps.step("find what meets the goal") as step:
            for number, (plans, option) in enumerate(ways(ladder, found)):
                try:
                    candidate = self.candidate(plans, bench, option, self.folder / f"candidate-{number}", step)
                    made.setdefault(candidate.name, candidate)
                except (RuntimeFailure, UnsupportedPrecision) as error:
                    refused.append(error)
            step.note = "; ".join(f"{each.name}: {each.fidelity.mean():.4f}" for each in made.values())
        if not made:
            raise refused[0]
        for reason in refused:
            self.steps.warn(str(reason))
        return list(made.values())

    def candidate(self, ladder: PrecisionLadder, bench: Bench, option: Option, folder: Path, step: Step) -> Candidate:
        """The first plan that meets the goal with one engine."""

        def trial(plan: Plan) -> Array:
            step.advance()
            return bench.fidelity(plan, option, self.samples.choose)

        plan, fidelity, met = climb(ladder, trial, tightened(self.tolerance))
        folder.mkdir()
        model = folder / MODEL
        option.build(bench.graph, plan, model)
        with option.open(model, 1) as session:
            session.run(self.task.encode(self.samples.choose.samples[:1]))
            shares = registry.load("export.audit:audit")(bench.graph, plan, session.kernels(), option.name)
        most = self.recipe.goal.max_size
        return Candidate(option, plan, model, fidelity, met and (most is None or weight(folder) <= most), shares)

    def raced(self, candidates: list[Candidate], graph: Graph) -> list[Candidate]:
        """The candidates, timed, where there is a choice. The times are kept, so that the same run gives the same
        artifact on the same machine."""
        if len(candidates) == 1:
            return candidates
        key = hash_of(
            "raced",
            self.source.key,
            graph.key,
            [(each.name, make_runtime(each.option.runtime).version()) for each in candidates],
            [sorted(each.plan.precision.items()) for each in candidates],
            this_machine().model_dump(),
            code_version(),
        )

        def compute() -> dict[str, float]:
            with self.steps.step("race the candidates", len(TRIAL_BATCHES)) as step, ExitStack() as stack:
                sessions = {each.name: stack.enter_context(each.option.open(each.model, 1)) for each in candidates}
                sessions = {ORIGINAL: stack.enter_context(self.source.open(1)), **sessions}
                # By the processor's time: what else runs on the machine must not decide.
                times = race(
                    sessions,
                    self.task,
                    baseline=ORIGINAL,
                    batches=TRIAL_BATCHES,
                    threads=1,
                    step=step,
                    clock=time.process_time,
                )
                speedups = {name: overall([each for each in times if each.engine == name]) for name in sessions}
                step.note = "; ".join(f"{name}: {speed:.2f} x" for name, speed in speedups.items() if name != ORIGINAL)
                return speedups

        speedups = self.cache.json(f"raced-{key}", compute)
        return [replace(each, speedup=speedups[each.name]) for each in candidates]

    def enter(self, name: str, stage: PlanStage, chosen: Candidate, seconds: float) -> None:
        """Quantization into the history, with what it gained and cost."""
        key = self.line.context(name, stage).key
        figures = {"bytes": weight(chosen.model.parent), **faithfulness(chosen.fidelity)}
        self.line.history.append(Record(stage=name, config=describe(stage), key=key, figures=figures))
        self.line.seconds[key] = seconds

    def validated(
        self, chosen: Candidate, bench: Bench, capture_error: float | None
    ) -> tuple[Verdict, list[tuple[Arrays, Arrays]]]:
        """The verdict, and the golden pairs."""
        evidence, golden = question(
            chosen.option,
            chosen.model,
            self.task,
            self.samples.judge,
            original=bench.reference[self.samples.judge.fingerprint],
            capture_error=capture_error,
            made_up=not self.samples.fingerprints,
            seed=self.recipe.seed,
        )
        find = registry.load("export.validate:validate")
        verdict: Verdict = find(evidence, self.task, self.tolerance, self.recipe.goal, self.recipe.seed)
        if self.line.teacher:
            drift = (each.model_copy(update={"against": f"model after {self.line.teacher}"}) for each in verdict.drift)
            verdict = verdict.model_copy(update={"drift": tuple(drift)})
        return verdict, golden

    def measured(self, chosen: Candidate) -> Measured:
        """Latency and throughput, the original beside it."""
        with self.steps.step("measure the speed", len(BATCHES)) as step, ExitStack() as stack:
            sessions = {ORIGINAL: stack.enter_context(self.source.open(1))}
            sessions[chosen.option.name] = stack.enter_context(chosen.option.open(chosen.model, 1))
            times = race(sessions, self.task, baseline=ORIGINAL, batches=BATCHES, threads=1, step=step)
            own = [time for time in times if time.engine == chosen.option.name]
            step.note = f"{max(time.speedup for time in own):.2f} x at best"
        return Measured(
            machine=this_machine(),
            timings=tuple(times),
            # By the quicker quarter of the runs: throughput is flat around the knee, and other work moves medians.
            knee=knee({time.batch: time.quartiles[0] for time in own}),
            stages=dict(self.steps.seconds),
            peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            original_size=self.source.size,
            arithmetic=chosen.arithmetic,
            seconds=self.line.seconds,
        )

    def manifest(self, chosen: Candidate, graph: Graph, verdict: Verdict) -> dict[str, Any]:
        """What the artifact is, but for the digests of its files."""
        packages = ("onnxruntime", "openvino")
        versions = {name: make_runtime(name).version() for name in packages if name == chosen.option.runtime}
        return {
            "task": self.task.name,
            "inputs": [spec.model_dump(mode="json") for spec in graph.inputs],
            "outputs": [spec.model_dump(mode="json") for spec in graph.outputs],
            "target": self.recipe.target,
            "placement": chosen.option.runtime,
            "compute": chosen.option.compute,
            "precision": dict(sorted(chosen.plan.precision.items())),
            "source": self.line.description(),
            "history": [record.model_dump(mode="json") for record in self.line.history],
            "recipe": self.recipe.model_dump(mode="json", exclude={"source", "data"}),
            "verdict": verdict.model_dump(mode="json"),
            "batching": registry.load("export.validate:is_batch_independent")(verdict),
            "versions": {"laconic": __version__, "python": platform.python_version(), **versions},
            "data": self.samples.fingerprints,
            "licence": self.source.licence,
        }


def weight(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())
