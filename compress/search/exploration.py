"""Exploration: try pruning settings without healing, proposed by the study and filtered by the latency model."""

from collections.abc import Sequence

import optuna

from compress.search.latency_model import LatencyModel, saved_bytes
from compress.search.search_candidate import SearchCandidate, unhealed_front
from compress.search.search_space import WHOLE, Axis, Settings, describe_settings, predict_specs
from compress.search.search_state import SearchState
from laconic.hashing import hash_of

INITIAL_SHARES = (1 / 2, 1 / 4, 3 / 4, 1)
"""How far along their axes the first settings are, on all axes together."""

STARTUP_TRIALS = 8
"""Trials drawn at random before the estimator takes over."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """A multi-objective Optuna study with an ask-and-tell interface and reproducible questions.

    Bergstra et al., Algorithms for Hyper-Parameter Optimization (2011); Ozaki et al., Multiobjective Tree-Structured
    Parzen Estimator (2022). Each question has a seed of its own, so the settings depend on the results so far and on
    nothing else: a resumed search that is given the same (cached) results proposes the same settings.
    """

    def __init__(self, axes: Sequence[Axis], seed: int) -> None:
        self.axes = tuple(axes)
        self.seed = seed
        self._study = optuna.create_study(directions=["minimize", "minimize"])
        self._open: dict[int, optuna.trial.Trial] = {}
        self._asked = 0
        for share in INITIAL_SHARES:
            self._study.enqueue_trial({axis.name: axis.first * round(share * len(axis.values)) for axis in self.axes})

    def ask(self) -> tuple[int, dict[str, float]]:
        """The trial's number, and its settings: a value for each axis that is not left as it is."""
        seed = int(hash_of(self.seed, self._asked), 16) % 2**31
        self._asked += 1
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        trial = self._study.ask()
        self._open[trial.number] = trial
        chosen = {axis.name: trial.suggest_int(axis.name, 0, len(axis.values)) for axis in self.axes}
        return trial.number, {axis.name: value_of(axis, chosen[axis.name]) for axis in self.axes if chosen[axis.name]}

    def tell(self, number: int, objectives: tuple[float, float] | None) -> None:
        """The result of a trial: infidelity and relative time. None for settings that failed or were rejected."""
        trial = self._open.pop(number)
        if objectives is None:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, list(objectives))


def value_of(axis: Axis, choice: int) -> float:
    """The value of a choice: 0 leaves the axis as it is, greater ones prune more."""
    return axis.values[choice - 1] if choice else WHOLE


GENERATION_SIZE = 4
"""Settings that are proposed at once, whatever the number of workers, so that any number finds the same."""

PATIENCE = 12
"""Trials in a row without a new point on the front, after which exploration stops."""

EXPLORATION_SHARE = 0.25
"""The share of the remaining budget for trials without healing."""

MAX_ASKS = 30
"""Settings that the study is asked for per generation; most may be known already or predicted to be too slow."""

UNTRIED = "the time for cuts ended before its turn"


class Exploration:
    """Trials without healing. study: proposes settings. trials: the number of trials that are left."""

    def __init__(self, state: SearchState, latency_model: LatencyModel, study: Study, trials: float) -> None:
        self.state = state
        self.runner = state.runner
        self.latency_model = latency_model
        self.study = study
        self.trials = trials

    def run(self) -> None:
        """Try settings without healing, until the front stops growing or the share of the budget is spent."""
        stale, count, budget = 0, 0, self.runner.budget
        until = budget.spent + EXPLORATION_SHARE * budget.remaining
        with self.runner.steps.step("try cuts") as step:
            while stale < PATIENCE and self.trials > 0 and budget.spent < until:
                proposed = self.propose(until)
                if not proposed:
                    break
                done = self.prune([each for _, each in proposed], until)
                for number, candidate in proposed:
                    self.study.tell(number, candidate.objectives)
                front = unhealed_front(self.state.open_candidates)
                stale = 0 if any(each in front for each in done) else stale + len(done)
                count += len(done)
                step.advance(len(done))
                if len(done) < len(proposed):
                    break
            step.note = f"{count} cut, {len(unhealed_front(self.state.open_candidates))} of them worth healing"

    def prune(self, group: Sequence[SearchCandidate], until: float) -> list[SearchCandidate]:
        """Prune the candidates, as many at a time as there are workers; returns those for which there was time."""
        workers = self.runner.executor.workers
        done: list[SearchCandidate] = []
        for start in range(0, len(group), workers):
            part = group[start : start + workers]
            if self.runner.budget.spent >= until or not self.runner.has_time_for("cut", build=True):
                break
            for candidate, outcome in zip(part, self.runner.run_trials(part), strict=True):
                candidate.update(outcome, self.state.constraints)
                if candidate.unhealed is not None:  # predict again, from the layers that it really has
                    candidate.prediction = self.latency_model.predict(outcome.specs, outcome.size)
                    self.state.reject_if_too_costly(candidate)
            done += part
        for candidate in group[len(done) :]:
            candidate.reason = UNTRIED
        self.trials -= len(done)
        return done

    def propose(self, until: float) -> list[tuple[int, SearchCandidate]]:
        """New candidates that are predicted to be fast and small enough, each with its number in the study."""
        found: list[tuple[int, SearchCandidate]] = []
        known = self.state.candidates
        for _ in range(MAX_ASKS):
            if len(found) == min(GENERATION_SIZE, self.trials) or self.runner.budget.spent >= until:
                break
            number, settings = self.study.ask()
            name = describe_settings(settings)
            is_new = name not in known or known[name].reason == UNTRIED
            candidate = known[name] = self.predict_candidate(settings) if is_new else known[name]
            if is_new and not candidate.reason:
                found.append((number, candidate))
            else:
                self.study.tell(number, None)  # known already, or rejected by the prediction
        return found

    def predict_candidate(self, settings: Settings) -> SearchCandidate:
        """A candidate with predicted latency and size; with a reason where these rule it out."""
        baseline = self.state.baseline.outcome
        specs = predict_specs(baseline.specs, settings)
        prediction = self.latency_model.predict(specs, baseline.size - saved_bytes(baseline.specs, specs))
        candidate = SearchCandidate(settings, prediction)
        self.runner.charge("foresee", candidate.name)  # the latency table may have had to be measured first
        self.state.reject_if_too_costly(candidate)
        return candidate
