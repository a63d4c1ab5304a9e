"""The order of a search: build the quantized baseline, then alternate exploration and successive halving."""

from collections.abc import Sequence
from dataclasses import replace

from compress.search.constraints import Quality
from compress.search.exploration import Exploration, Study
from compress.search.latency_model import LatencyModel
from compress.search.latency_table import LatencyTable
from compress.search.results import BuiltArtifact, CostPrediction, TrialOutcome
from compress.search.search_candidate import (
    SearchCandidate,
    describe_excess,
    describe_infidelity,
    describe_misses,
    unhealed_front,
)
from compress.search.search_space import can_heal, describe_settings, find_axes
from compress.search.search_state import Publish, SearchState
from compress.search.trial_runner import TrialRunner
from export.candidates.engine_option import EngineOption
from laconic.errors import RecipeError
from laconic.models.source import GraphSource

ROUNDS = 10
"""The most rounds of exploration and successive halving."""


def run_search(runner: TrialRunner, publish: Publish, trials: int | None = None) -> SearchState:
    """Search within the runner's budget; returns the final state, the best artifact being published.

    publish: writes an artifact to the destination. trials: the most settings that are tried; None: as the budget
    allows. Raises RecipeError where the source cannot be compressed at all.
    """
    state = SearchState(runner, publish)
    built, baseline = build_baseline(state), state.baseline.outcome
    axes = find_axes(baseline.specs)
    if axes and (state.constraints.prefers_speed or not state.is_goal_met):
        table = LatencyTable(EngineOption(built.runtime, built.compute), runner.cache, built.precision)
        state.latency_model = model = LatencyModel(table.total, baseline.specs, baseline.size, built)
        study = Study(axes, runner.recipe.seed)
        exploration = Exploration(state, model, study, float("inf") if trials is None else float(trials))
        halving = SuccessiveHalving(state)
        for _ in range(ROUNDS):
            before = state.work
            exploration.run()
            halving.run()
            if state.work == before or runner.budget.remaining <= 0:
                break
    build_nearest(state)
    return state


def build_baseline(state: SearchState) -> BuiltArtifact:
    """Quantize and build the model with nothing pruned: the first artifact, to which the latency model is fitted."""
    runner = state.runner
    baseline = SearchCandidate({}, CostPrediction(0.0, 1.0, 0.0))
    is_graph = isinstance(runner.context.source, GraphSource)
    outcome = TrialOutcome(Quality(1.0, 1.0, 0.0, 0.0)) if is_graph else runner.run_trials([baseline], "load")[0]
    if outcome.quality is None:
        raise RecipeError(outcome.error)
    baseline.update(outcome, state.constraints)
    state.candidates[describe_settings({})] = baseline
    built = state.build(baseline)
    # Few samples leave a small drop in doubt, whatever is done: it must be shown where it is of quantization alone.
    runner.constraints = replace(state.constraints, strict=not built.doubts)
    return built


def build_nearest(state: SearchState) -> None:
    """Build the candidate nearest to the goal if no artifact met it, and publish the best."""
    unbuilt = (each for each in state.open_candidates if not each.built)
    nearest = min(unbuilt, key=lambda each: each.shortfall, default=None)
    if nearest is not None and not state.is_goal_met and state.runner.has_time_for("build"):
        state.build(nearest)
    state.publish()


HEALING_STEPS = (60, 180, 720, 2880)
"""Training steps of each rung: each three times as many as all rungs before it together."""

INITIAL_CANDIDATES = 6
"""Candidates on the first rung."""

REBUILD_SHARE = 0.9
"""The share of its infidelity below which healing must take a candidate whose artifact failed, to build it again."""

STALLED_SHARE = 0.95
"""The share of its shortfall below which a rung must take a candidate, to go on with it."""

BUILDS_PER_RUNG = 2
"""Candidates of a rung that are built, should the first one's artifact fail on the samples of the verdict."""


class SuccessiveHalving:
    """Heals and builds candidates of a search. state: of the search."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.runner = state.runner

    def run(self) -> None:
        """Build the candidates that meet the goal, and heal the others in rungs.

        Where exploration found no new candidate, the best unfinished one of earlier rounds is healed further.
        """
        pool = self.select_promising()
        self.build_ready(pool)
        pool = self.select_unmet(pool) or self.select_unfinished()
        while pool and len(pool[0].heals) < len(HEALING_STEPS):
            pool = self.heal(pool, HEALING_STEPS[len(pool[0].heals)])
            self.build_ready(pool)
            pool = self.select_survivors(pool)

    def select_unfinished(self) -> list[SearchCandidate]:
        """The candidate nearest to the goal among those on a rung before the last; at most one."""
        found = [each for each in self.state.open_candidates if 0 < len(each.heals) < len(HEALING_STEPS)]
        return sorted(self.select_unmet(found), key=lambda each: each.shortfall)[:1]

    def select_promising(self) -> list[SearchCandidate]:
        """Unhealed candidates spaced evenly along their front, those nearest to the goal first."""
        failed = [each for each in self.state.candidates.values() if each.reason and each.heals]
        front = [
            each
            for each in unhealed_front(self.state.open_candidates)
            if not (each.heals or each.built or any(each.is_more_aggressive(other) for other in failed))
            and self.state.is_worth_work(each)
        ]
        front.sort(key=lambda each: each.prediction.speedup)
        last = len(front) - 1
        count = INITIAL_CANDIDATES
        places = {round(number * last / (count - 1)) for number in range(count)} if front else set()
        return sorted((front[place] for place in places), key=lambda each: each.shortfall)

    def heal(self, pool: Sequence[SearchCandidate], steps: int) -> list[SearchCandidate]:
        """Heal the candidates for more steps; returns those for which there was time and that did not fail."""
        done: list[SearchCandidate] = []
        if not can_heal(self.runner.recipe):
            return done
        workers = self.runner.executor.workers
        with self.runner.steps.step(f"heal {steps} steps", len(pool)) as step:
            for start in range(0, len(pool), workers):
                group = pool[start : start + workers]
                if not self.runner.has_time_for("heal", steps, build=True):
                    break
                for candidate in group:
                    if candidate is self.state.best:
                        # Its artifact stays where it is, until a better one is there.
                        self.state.best = replace(candidate)
                    if self.is_refuted(candidate) and candidate.built:
                        candidate.failed_infidelity = candidate.infidelity
                    candidate.heals, candidate.built = (*candidate.heals, steps), None
                for candidate, outcome in zip(group, self.runner.run_trials(group, "heal", steps), strict=True):
                    candidate.update(outcome, self.state.constraints)
                    step.advance()
                done += group
            step.note = "; ".join(f"{each.name}: {each.shortfall:.2f} of what is allowed" for each in done)
        return [each for each in done if not each.reason]

    def select_unmet(self, pool: Sequence[SearchCandidate]) -> list[SearchCandidate]:
        """The candidates that more healing could bring to the goal, or to a higher fidelity."""
        return [
            each
            for each in pool
            if not each.reason
            and self.state.is_worth_work(each)
            and (
                self.is_refuted(each)
                or not (each.built or (self.state.constraints.prefers_speed and each.shortfall <= 1))
            )
        ]

    def is_refuted(self, candidate: SearchCandidate) -> bool:
        """Whether the candidate's last artifact was small and fast enough, but failed on the samples of the verdict."""
        made = candidate.built
        if made is None:
            return candidate.failed_infidelity < float("inf")
        return not describe_excess(self.state.constraints, made) and bool(describe_misses(self.state.constraints, made))

    def select_survivors(self, pool: Sequence[SearchCandidate]) -> list[SearchCandidate]:
        """The better half of the healed candidates that may still come to meet the goal."""
        unmet = self.select_unmet(pool)
        for each in unmet:
            if len(each.heals) > 1 and each.remaining_share > STALLED_SHARE:
                missed = describe_infidelity(self.state.constraints, each.quality) or "no more faithful"
                each.reason = f"healing no longer helps: {missed}"
        unmet = sorted((each for each in unmet if not each.reason), key=lambda each: each.shortfall)
        return unmet[: -(-len(unmet) // 2)]

    def build_ready(self, pool: Sequence[SearchCandidate]) -> None:
        """Build the best candidate that meets the goal, and the next one if its artifact fails."""
        ready = [each for each in pool if self.is_ready(each)]
        speed = self.state.constraints.prefers_speed
        ready.sort(key=lambda each: -each.prediction.speedup if speed else each.shortfall)
        for candidate in ready[:BUILDS_PER_RUNG]:
            if not self.runner.has_time_for("build"):
                return
            self.state.build(candidate)
            if candidate is self.state.best:
                return

    def is_ready(self, candidate: SearchCandidate) -> bool:
        """Whether a candidate meets the goal as far as is known, and is worth an artifact."""
        is_new = candidate.infidelity < REBUILD_SHARE * candidate.failed_infidelity
        is_open = not (candidate.built or candidate.reason)
        return is_new and is_open and candidate.shortfall <= 1 and self.state.is_worth_work(candidate)
