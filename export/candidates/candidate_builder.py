"""Building the candidates of an artifact: for each engine option, the first plan that meets the goal."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from export.candidates.candidate import EngineCandidate, pair_float_graph, pair_ladders
from export.candidates.engine_option import EngineOption, check_supported
from export.candidates.plan_evaluator import PlanEvaluator
from export.candidates.plan_search import PlanTrial, find_plan
from laconic.artifacts.manifest import MODEL
from laconic.data.dataset import Dataset
from laconic.errors import LaconicError, RuntimeFailure, UnsupportedPrecision
from laconic.files import folder_size
from laconic.hardware import this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.progress import Step
from laconic.quantization.plan import Plan, PrecisionLadder
from laconic.quantization.plan_file import digest_plan
from laconic.recipes.goal import tighten
from laconic.recipes.job import Job
from laconic.tasks.processing import Processing
from laconic.tasks.tolerance import Tolerance
from laconic.timing.benchmark import LEAST_ROUNDS, LENGTH, interleave

SOUND_SAMPLES = 16
"""Samples on which each candidate's engine is compared with the graph run node by node, which is slow. The verdict
of the chosen one compares more."""
OUTPACED = 1.5
"""How many times as long as a candidate that meets the goal an engine takes for one sample, quantized as far as asked
or not at all, whichever is faster, to be left out: no plan between the two would win the race. Searching for ONNX
Runtime's, which was 2.9 times as slow as OpenVINO's, took 40 of the 138 seconds of an OCR network."""


@dataclass(frozen=True)
class CandidateBuilder:
    """Builds candidates of one graph.

    audit: checks the kernels of a candidate. tolerance: the required fidelity to the original. engine_tolerance: that
    of the engine to the graph run node by node, on the samples of `few`.
    """

    job: Job
    evaluator: PlanEvaluator
    audit: Callable[[EngineCandidate], EngineCandidate]
    tolerance: Tolerance
    engine_tolerance: Tolerance
    few: Dataset

    def build_all(self, ladder: PrecisionLadder, options: Sequence[EngineOption]) -> list[EngineCandidate]:
        """Build, for each engine option, the first plan that meets the goal, and audit its kernels.

        An engine that refuses the graph, or does not run the requested precision, is skipped with a warning; if no
        engine is left, not even for the float graph, its error is raised. So it is if no engine has kernels for the
        smallest plan.
        """
        check_supported(self.evaluator.graph, ladder.rungs[0][0], options)
        has_race = not self.job.recipe.engine_only
        pairs = list(pair_ladders(ladder, options)) if has_race else [(ladder, option) for option in options]
        built, refused = self._build_pairs(pairs, "candidate")
        built = built or self.build_float_graph(ladder, options)
        if not built:
            raise refused[0]
        for reason in refused:
            self.job.steps.warn(str(reason))
        return built

    def build_float_graph(self, ladder: PrecisionLadder, options: Sequence[EngineOption]) -> list[EngineCandidate]:
        """Build the float graph for the engines that may take it in place of INT8 (`pair_float_graph`), as `build_all`;
        for none where there are none."""
        pairs = self.list_float_pairs(ladder, options)
        built, refused = self._build_pairs(pairs, "float") if pairs else ([], [])
        for reason in refused:
            self.job.steps.warn(str(reason))
        return built

    def list_float_pairs(
        self, ladder: PrecisionLadder, options: Sequence[EngineOption]
    ) -> list[tuple[PrecisionLadder, EngineOption]]:
        """List the float graph with the engines that may take it; none where the recipe names the engine."""
        return [] if self.job.recipe.engine_only else list(pair_float_graph(ladder, options))

    def _build_pairs(
        self, pairs: Sequence[tuple[PrecisionLadder, EngineOption]], name: str
    ) -> tuple[list[EngineCandidate], list[LaconicError]]:
        """Build candidates; return them, and the errors of the engines that are left out. name: of their folders,
        before a number."""
        built: dict[str, EngineCandidate] = {}
        refused: list[LaconicError] = []
        left_out: list[str] = []
        with self.job.steps.step("build the candidates") as step:
            for number, (plans, option) in enumerate(pairs):
                is_timed = not option.reference and not self.job.recipe.engine_only
                if not is_timed and any(each.met for each in built.values()):
                    break  # the first that meets the goal is the one
                try:
                    if lag := self.find_lag(plans, option, list(built.values())):
                        left_out.append(f"{option.name}: left out, {lag:.1f} x as slow")
                        continue
                    candidate = self.build_audited(plans, option, f"{name}-{number}", step)
                    built.setdefault(candidate.name, candidate)
                except (RuntimeFailure, UnsupportedPrecision) as error:
                    refused.append(error)
            step.note = "; ".join([*(f"{each.name}: {each.fidelity.mean():.4f}" for each in built.values()), *left_out])
        return list(built.values()), refused

    def find_lag(self, ladder: PrecisionLadder, option: EngineOption, built: Sequence[EngineCandidate]) -> float | None:
        """Find how many times as slow as a candidate that was built an engine option is, where that is OUTPACED and a
        plan would have to be searched for; None where it may win the race, or is wanted for something else."""
        recipe, evaluator = self.job.recipe, self.evaluator
        rivals = [each for each in built if each.met and not each.is_plain]
        is_wanted = recipe.portable or recipe.goal.int8_share is not None or option.reference or option.on_gpu
        ends = [ladder.rungs[0][0], ladder.rungs[-1][-1]]
        if is_wanted or not rivals or self.try_plan(ends[0], option).meets(tighten(self.tolerance)):
            return None

        def measure() -> float:
            models = [self.job.folder / f"end-{number}" / MODEL for number in range(len(ends))]
            for plan, model in zip(ends, models, strict=True):
                model.parent.mkdir(exist_ok=True)
                option.build(evaluator.graph, plan, model)
            return measure_lag(option, models, rivals, evaluator.task)

        plans = [digest_plan(plan) for plan in (*ends, *(rival.plan for rival in rivals))]
        engines = [each.key for each in (option, *(rival.option for rival in rivals))]
        key = hash_of(evaluator.graph.key, plans, engines, this_machine().model_dump(), environment_digest())
        lag = float(evaluator.cache.json(f"lag-{key}", measure))
        return lag if lag >= OUTPACED else None

    def try_plan(self, plan: Plan, option: EngineOption) -> PlanTrial:
        """Try a plan on the samples to choose by."""
        return self.evaluator.try_plan(plan, option, self.job.samples.choose)

    def build_audited(self, ladder: PrecisionLadder, option: EngineOption, name: str, step: Step) -> EngineCandidate:
        """Build a candidate and audit its kernels; layers for which an engine has no kernels, such as a last
        convolution in ONNX Runtime, stay in float, with a warning. Raises UnsupportedPrecision where that is all."""
        try:
            return self.audit(self.build(ladder, option, name, step))
        except UnsupportedPrecision as error:
            if not error.layers:
                raise
            kept, reason = error.layers, str(error)
        candidate = self.audit(self.build(ladder.keep_in_float(kept), option, f"{name}-kept", step))
        self.job.steps.warn(f"{', '.join(kept)} stay in float: {reason.partition('. Try ')[0]}")
        return candidate

    def build(self, ladder: PrecisionLadder, option: EngineOption, name: str, step: Step) -> EngineCandidate:
        """Build the first plan that meets the goal with one engine option, and that its engine runs as written.

        name: of the candidate's folder within the job's.
        """
        evaluator, bar = self.evaluator, tighten(self.engine_tolerance)

        def trial(plan: Plan) -> PlanTrial:
            step.advance()
            return self.try_plan(plan, option)

        def is_sound(plan: Plan) -> bool:
            return option.reference or bar.met_by(evaluator.engine_fidelity(plan, option, self.few))

        plan, best, met = find_plan(ladder, trial, tighten(self.tolerance), is_sound)
        folder = self.job.folder / name
        folder.mkdir()
        model = folder / MODEL
        option.build(evaluator.graph, plan, model)
        plan = option.adapt(evaluator.graph, plan)
        limit = self.job.recipe.goal.max_size
        met = met and (limit is None or folder_size(folder) <= limit)
        return EngineCandidate(option, plan, model, best.fidelity, met, divergence=best.divergence)


def measure_lag(
    option: EngineOption, models: Sequence[Path], rivals: Sequence[EngineCandidate], task: Processing
) -> float:
    """Measure how many times as long as the fastest rival an engine option takes for one sample with the fastest of
    these graphs, by processor time."""
    with ExitStack() as stack:
        ours = [stack.enter_context(option.open(model, 1)) for model in models]
        theirs = [stack.enter_context(rival.option.open(rival.model, 1)) for rival in rivals]
        inputs = task.timed(1, LENGTH)
        runs = {str(number): partial(session.run, inputs) for number, session in enumerate((*ours, *theirs))}
        seconds = interleave(runs, rounds=LEAST_ROUNDS, clock=time.process_time)
        medians = [median(each) for each in seconds.values()]
        return min(medians[: len(ours)]) / max(min(medians[len(ours) :]), 1e-9)
