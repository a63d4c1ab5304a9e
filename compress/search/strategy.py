"""The order of a search: build the quantized baseline, then alternate exploration and successive halving."""

from dataclasses import replace

from compress.search.constraints import Quality
from compress.search.exploration import Exploration
from compress.search.latency_model import LatencyModel
from compress.search.latency_table import LatencyTable
from compress.search.results import BuiltArtifact, CostPrediction, TrialOutcome
from compress.search.search_candidate import SearchCandidate
from compress.search.search_space import describe_settings, find_axes
from compress.search.search_state import Publish, SearchState
from compress.search.study import Study
from compress.search.successive_halving import SuccessiveHalving
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
