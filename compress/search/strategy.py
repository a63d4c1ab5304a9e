"""The order of a search: build the quantized baseline, then alternate exploration and successive halving."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compress.search.budget import TrialRunner
from compress.search.constraints import Constraints, Quality
from compress.search.latency_model import LatencyModel, LatencyTable, saved_bytes
from compress.search.search_candidate import (
    BuiltArtifact,
    CostPrediction,
    SearchCandidate,
    TrialOutcome,
    describe_excess,
    describe_misses,
)
from compress.search.search_space import Settings, Study, can_heal, describe_settings, find_axes, predict_specs
from compress.search.search_state import SearchState, find_front
from export.candidates.engine_option import EngineOption
from laconic.errors import RecipeError
from laconic.models.source import GraphSource
from laconic.timing.measurements import TrialRecord

ROUNDS = 10
"""The most rounds of exploration and successive halving."""

GENERATION_SIZE = 4
"""Settings that are proposed at once, whatever the number of workers, so that any number finds the same."""

PATIENCE = 12
"""Trials in a row without a new point on the front, after which exploration stops."""

EXPLORATION_SHARE = 0.25
"""The share of the remaining budget for trials without healing."""

MAX_ASKS = 30
"""Settings that the study is asked for per generation; most may be known already or predicted to be too slow."""

UNTRIED = "the time for cuts ended before its turn"

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

Publish = Callable[[BuiltArtifact, Sequence[TrialRecord]], None]


def run_search(
    runner: TrialRunner, constraints: Constraints, publish: Publish, trials: int | None = None
) -> SearchState:
    """Search within the runner's budget; returns the final state, the best artifact being published.

    publish: writes an artifact to the destination. trials: the most settings that are tried; None: as the budget
    allows. Raises RecipeError where the source cannot be compressed at all.
    """
    strategy = Strategy(runner, publish)
    state, outcome = strategy.build_baseline(SearchState(constraints))
    built, axes = state.best_artifact, find_axes(outcome.specs)
    if built and axes and (constraints.prefers_speed or not state.is_goal_met):
        table = LatencyTable(EngineOption(built.runtime, built.compute), runner.context.cache, built.precision)
        model = LatencyModel(table.total, outcome.size, built).fit(outcome.specs, built)
        state = replace(state, latency_model=model)
        exploration = Exploration(runner, Study(axes, runner.recipe.seed), trials)
        for _ in range(ROUNDS):
            work = state.work
            state = strategy.halve(exploration.run(state))
            if state.work == work or runner.budget.remaining <= 0:
                break
    return strategy.build_nearest(state)


@dataclass(frozen=True)
class Exploration:
    """Trials without healing. study: proposes settings. trials: the most settings that are tried; None: any number."""

    runner: TrialRunner
    study: Study
    trials: int | None

    def run(self, state: SearchState) -> SearchState:
        """Try settings without healing, until the front stops growing or the share of the budget is spent."""
        stale, before, budget = 0, state.tried, self.runner.budget
        until = budget.spent + EXPLORATION_SHARE * budget.remaining
        with self.runner.steps.step("try cuts") as step:
            while stale < PATIENCE and budget.spent < until:
                state, proposed = self.propose(state, until)
                tried = state.tried
                state = self.prune(state, list(proposed.values()), until)
                for number, candidate in proposed.items():
                    self.study.tell(number, state.candidates[candidate.key].objectives)
                done = state.latest(list(proposed.values()))[: state.tried - tried]
                front = find_front(state.open_candidates)
                stale = 0 if any(candidate in front for candidate in done) else stale + len(done)
                step.advance(len(done))
                if len(done) < max(len(proposed), 1):
                    break
            worthy = len(find_front(state.open_candidates))
            step.note = f"{state.tried - before} cut, {worthy} of them worth healing"
        return state

    def prune(self, state: SearchState, group: Sequence[SearchCandidate], until: float) -> SearchState:
        """Prune the candidates for which there is time, as many at once as there are workers; reject the others."""
        workers = self.runner.executor.workers
        for start in range(0, len(group), workers):
            part = group[start : start + workers]
            if self.runner.budget.spent >= until or not self.runner.has_time_for("cut", build=True):
                return state.put(*(candidate.reject(UNTRIED) for candidate in group[start:]))
            for candidate, outcome in zip(part, self.runner.run_trials(part), strict=True):
                candidate = candidate.take_outcome(outcome, state.constraints)
                if candidate.unhealed and state.latency_model:  # predict again, from the layers that it really has
                    prediction = state.latency_model.predict(outcome.specs, outcome.size)
                    candidate = state.screen(replace(candidate, prediction=prediction))
                state = state.put(candidate)
        return state

    def propose(self, state: SearchState, until: float) -> tuple[SearchState, dict[int, SearchCandidate]]:
        """Propose candidates that are predicted to be fast and small enough, by their numbers in the study."""
        proposed: dict[int, SearchCandidate] = {}
        size = GENERATION_SIZE if self.trials is None else min(GENERATION_SIZE, self.trials - state.tried)
        for _ in range(MAX_ASKS):
            if len(proposed) >= size or self.runner.budget.spent >= until:
                break
            number, settings = self.study.ask()
            candidate = state.candidates.get(describe_settings(settings))
            if candidate is None or candidate.reason == UNTRIED:
                candidate = self.predict_candidate(state, settings)
                state = state.put(candidate)
                if not candidate.reason:
                    proposed[number] = candidate
            if number not in proposed:
                self.study.tell(number, None)  # known already, or rejected by the prediction
        return state, proposed

    def predict_candidate(self, state: SearchState, settings: Settings) -> SearchCandidate:
        """Predict latency and size of a candidate; it gets a reason where these rule it out."""
        assert state.latency_model is not None
        baseline = state.baseline.outcome
        specs = predict_specs(baseline.specs, settings)
        prediction = state.latency_model.predict(specs, baseline.size - saved_bytes(baseline.specs, specs))
        candidate = SearchCandidate(settings, prediction)
        self.runner.charge("foresee", candidate.name)  # the latency table may have had to be measured first
        return state.screen(candidate)


@dataclass(frozen=True)
class Strategy:
    """Builds and heals candidates. publish: writes an artifact to the destination, with the trials so far."""

    runner: TrialRunner
    publish: Publish

    def build(self, state: SearchState, candidate: SearchCandidate) -> SearchState:
        """Build a candidate's artifact, and publish the best one."""
        state = state.take_artifact(candidate, self.runner.build(candidate, state.constraints))
        if self.runner.budget.is_fresh:  # else an earlier run did this, and its best artifact is at the destination
            self.publish_best(state)
        return state

    def publish_best(self, state: SearchState) -> None:
        """Write the best artifact to the destination, with the trials so far."""
        if state.best_artifact is not None:
            self.publish(state.best_artifact, state.trials)

    def build_baseline(self, state: SearchState) -> tuple[SearchState, TrialOutcome]:
        """Quantize and build the model with nothing pruned: the first artifact, which the latency model starts from."""
        baseline = SearchCandidate({}, CostPrediction(0.0, 1.0, 0.0))
        is_graph = isinstance(self.runner.context.source, GraphSource)
        exact = TrialOutcome(Quality(1.0, 1.0, 0.0, 0.0))
        outcome = exact if is_graph else self.runner.run_trials([baseline], "load")[0]
        if outcome.quality is None:
            raise RecipeError(outcome.error)
        state = self.build(state, baseline.take_outcome(outcome, state.constraints))
        # Few samples leave a small drop in doubt, whatever is done: it must be shown where it is of quantization alone.
        is_shown = state.best_artifact is not None and not state.best_artifact.doubts
        return replace(state, constraints=replace(state.constraints, strict=is_shown)), outcome

    def build_nearest(self, state: SearchState) -> SearchState:
        """Build the candidate nearest to the goal if no artifact met it, and publish the best."""
        unbuilt = (candidate for candidate in state.open_candidates if not candidate.built)
        nearest = min(unbuilt, key=lambda candidate: candidate.shortfall, default=None)
        if nearest is not None and not state.is_goal_met and self.runner.has_time_for("build"):
            state = self.build(state, nearest)
        self.publish_best(state)
        return state

    def halve(self, state: SearchState) -> SearchState:
        """Build the candidates that meet the goal, and heal the others in rungs, by successive halving.

        Where exploration found no new candidate, the best unfinished one of earlier rounds is healed further.
        """
        pool = select_promising(state)
        state = self.build_ready(state, pool)
        pool = select_unmet(state, state.latest(pool)) or select_unfinished(state)
        while pool and len(pool[0].heals) < len(HEALING_STEPS):
            state, pool = self.heal(state, pool, HEALING_STEPS[len(pool[0].heals)])
            state = self.build_ready(state, pool)
            state, pool = select_survivors(state, state.latest(pool))
        return state

    def heal(
        self, state: SearchState, pool: Sequence[SearchCandidate], steps: int
    ) -> tuple[SearchState, list[SearchCandidate]]:
        """Heal the candidates for more steps; returns also those for which there was time and that did not fail."""
        healed: list[SearchCandidate] = []
        if not can_heal(self.runner.recipe):
            return state, healed
        workers = self.runner.executor.workers
        with self.runner.steps.step(f"heal {steps} steps", len(pool)) as step:
            for start in range(0, len(pool), workers):
                if not self.runner.has_time_for("heal", steps, build=True):
                    break
                group = [
                    candidate.start_healing(steps, refuted=is_refuted(state, candidate))
                    for candidate in pool[start : start + workers]
                ]
                for candidate, outcome in zip(group, self.runner.run_trials(group, "heal", steps), strict=True):
                    healed.append(candidate.take_outcome(outcome, state.constraints))
                    step.advance()
            step.note = "; ".join(
                f"{candidate.name}: {candidate.shortfall:.2f} of what is allowed" for candidate in healed
            )
        return state.put(*healed), [candidate for candidate in healed if not candidate.reason]

    def build_ready(self, state: SearchState, pool: Sequence[SearchCandidate]) -> SearchState:
        """Build the best candidate that meets the goal, and the next one if its artifact fails."""
        speed = state.constraints.prefers_speed
        ready = [candidate for candidate in pool if is_ready(state, candidate)]
        ready.sort(key=lambda candidate: -candidate.prediction.speedup if speed else candidate.shortfall)
        for candidate in ready[:BUILDS_PER_RUNG]:
            if not self.runner.has_time_for("build"):
                break
            state = self.build(state, candidate)
            if state.best and state.best.name == candidate.name:
                break
        return state


def select_promising(state: SearchState) -> list[SearchCandidate]:
    """Select unhealed candidates spaced evenly along their front, those nearest to the goal first."""
    failed = [candidate for candidate in state.candidates.values() if candidate.reason and candidate.heals]
    front = [
        candidate
        for candidate in find_front(state.open_candidates)
        if not (candidate.heals or candidate.built or any(candidate.is_more_aggressive(other) for other in failed))
        and state.is_worth_work(candidate)
    ]
    front.sort(key=lambda candidate: candidate.prediction.speedup)
    last, count = len(front) - 1, INITIAL_CANDIDATES
    places = {round(number * last / (count - 1)) for number in range(count)} if front else set()
    return sorted((front[place] for place in places), key=lambda candidate: candidate.shortfall)


def select_unfinished(state: SearchState) -> list[SearchCandidate]:
    """Select the candidate nearest to the goal among those on a rung before the last; at most one."""
    begun = [candidate for candidate in state.open_candidates if 0 < len(candidate.heals) < len(HEALING_STEPS)]
    return sorted(select_unmet(state, begun), key=lambda candidate: candidate.shortfall)[:1]


def select_unmet(state: SearchState, pool: Sequence[SearchCandidate]) -> list[SearchCandidate]:
    """Select the candidates that more healing could bring to the goal, or to a higher fidelity."""

    def is_unmet(candidate: SearchCandidate) -> bool:
        is_met = bool(candidate.built) or (state.constraints.prefers_speed and candidate.shortfall <= 1)
        return is_refuted(state, candidate) or not is_met

    return [each for each in pool if not each.reason and state.is_worth_work(each) and is_unmet(each)]


def select_survivors(state: SearchState, pool: Sequence[SearchCandidate]) -> tuple[SearchState, list[SearchCandidate]]:
    """Select the better half of the healed candidates that may still come to meet the goal; reject the stalled ones."""
    unmet = []
    for candidate in select_unmet(state, pool):
        if len(candidate.heals) > 1 and candidate.remaining_share > STALLED_SHARE:
            missed = state.constraints.describe_infidelity(candidate.quality) or "no more faithful"
            state = state.put(candidate.reject(f"healing no longer helps: {missed}"))
        else:
            unmet.append(candidate)
    unmet.sort(key=lambda candidate: candidate.shortfall)
    return state, unmet[: -(-len(unmet) // 2)]


def is_refuted(state: SearchState, candidate: SearchCandidate) -> bool:
    """Whether the candidate's last artifact was small and fast enough, but failed on the samples of the verdict."""
    built = candidate.built
    if built is None:
        return candidate.failed_infidelity < float("inf")
    return not describe_excess(state.constraints, built) and bool(describe_misses(state.constraints, built))


def is_ready(state: SearchState, candidate: SearchCandidate) -> bool:
    """Whether a candidate meets the goal as far as is known, and is worth an artifact."""
    is_new = candidate.infidelity < REBUILD_SHARE * candidate.failed_infidelity
    is_open = not (candidate.built or candidate.reason)
    return is_new and is_open and candidate.shortfall <= 1 and state.is_worth_work(candidate)
