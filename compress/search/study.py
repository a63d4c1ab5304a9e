"""Which settings to try next: Optuna's tree-structured Parzen estimator over infidelity and time."""

from collections.abc import Mapping, Sequence

import optuna

from compress.search.space import WHOLE, Axis
from laconic.hashing import hash_of

SHARES = (1 / 2, 1 / 4, 3 / 4, 1)
"""How far along their axes the first settings lie, all together."""

STARTUP = 8
"""Trials that are drawn at random before the estimator has something to go by."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """Asks for settings, and is told what came of them.

    Two figures are made small at once (Bergstra et al., Algorithms for Hyper-Parameter Optimization, 2011; Ozaki et
    al., Multiobjective Tree-Structured Parzen Estimator, 2022). Each question has a seed of its own, so what is asked
    depends on the answers so far and on nothing else: a search that is begun anew, and given the same answers, asks the
    same. That is how a killed one goes on, from the cache of its answers.
    """

    def __init__(self, axes: Sequence[Axis], seed: int) -> None:
        self.axes = tuple(axes)
        self.seed = seed
        self._study = optuna.create_study(directions=["minimize", "minimize"])
        self._open: dict[int, optuna.trial.Trial] = {}
        self._asked = 0
        for share in SHARES:
            self._study.enqueue_trial({axis.name: axis.first * round(share * len(axis.values)) for axis in self.axes})

    def ask(self) -> tuple[int, dict[str, float]]:
        """A number to tell the answer by, and the settings: of each axis that is not left alone."""
        seed = int(hash_of(self.seed, self._asked), 16) % 2**31
        self._asked += 1
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
        trial = self._study.ask()
        self._open[trial.number] = trial
        chosen = {axis.name: trial.suggest_int(axis.name, 0, len(axis.values)) for axis in self.axes}
        return trial.number, {axis.name: value_of(axis, chosen[axis.name]) for axis in self.axes if chosen[axis.name]}

    def tell(self, number: int, figures: tuple[float, float] | None) -> None:
        """What came of it: infidelity and time. None for settings that lead nowhere."""
        trial = self._open.pop(number)
        if figures is None:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, list(figures))


def value_of(axis: Axis, choice: int) -> float:
    """The value that a choice stands for: 0 leaves the axis alone, greater ones take more."""
    return axis.values[choice - 1] if choice else WHOLE


def described(settings: Mapping[str, float]) -> str:
    """For people: `heads 0.5, ffn 0.25`."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items()) or "nothing cut"
