"""Which settings to try next: Optuna's tree-structured Parzen estimator over infidelity and time."""

from collections.abc import Sequence

import optuna

from compress.search.search_space import WHOLE, Axis
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
