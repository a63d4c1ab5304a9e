"""The course of a healing: looked at every so often, the best weights kept, ended when it does not pay any more."""

import copy
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from laconic.errors import RecipeError
from laconic.models.weights import fill, read_safetensors, write_weights
from laconic.training.step.train_state import StepCallback, TrainState

BEST, LOG = "best.safetensors", "healing.json"
WHOLE = 1 - 1e-6
"""A fidelity that leaves nothing to heal."""
PACE = 10
"""Steps between two estimates of how many fit into the time that is left."""


class Course:
    """The mean fidelity by the steps done, with the weights of the best. Both are on the disk, so that an interrupted
    run goes on from them, and looks at nothing twice.

    ask: the mean fidelity of a module. every: steps between two looks. patience: looks after which it ends, where they
    have not made what is missing less by the share `gain`. minutes: of all of it; None sets no limit.
    """

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        ask: Callable[[nn.Module], float],
        *,
        every: int,
        patience: int,
        gain: float,
        minutes: float | None = None,
    ) -> None:
        self._module, self._folder, self._ask = module, folder, ask
        self._every, self._patience, self._gain = every, patience, gain
        self._seconds = None if minutes is None else 60 * minutes
        self._plain = copy.deepcopy(module)  # without techniques, to be asked at any time
        self.looks: dict[int, float] = {}
        spent = 0.0
        if (folder / LOG).is_file():
            kept = json.loads((folder / LOG).read_text(encoding="utf-8"))
            self.looks = {int(step): fidelity for step, fidelity in kept["looks"].items()}
            spent = kept["seconds"]
        self._start = time.perf_counter() - spent
        if not self.looks:
            self._keep(0, ask(module))

    @property
    def before(self) -> float:
        """The fidelity before the first step."""
        return self.looks[0]

    @property
    def best(self) -> int:
        """The steps after which it was best; 0 where it was never better than before."""
        return max(self.looks, key=lambda step: (self.looks[step], -step))

    def result(self) -> nn.Module:
        """The best module of all looks: the one that came, where healing did not help."""
        if not self.best:
            return self._module
        fill(self._plain, read_safetensors(self._folder / BEST), self._folder / BEST)
        return self._plain

    def event(self, state: TrainState) -> StepCallback:
        """What looks after a step, hurries the schedule where the time or the gain runs out, and ends the run with it.

        Raises RecipeError for techniques that keep the weights in another form.
        """
        if missing := set(self._plain.state_dict()) - set(state.weights()):
            raise RecipeError(
                f"healing looks at the weights as it goes, and {min(missing)} is kept in another form. Remove lora and "
                f"qlora, or take a stage that does not look, like distill.features"
            )
        began: tuple[int, float] | None = None
        cooling = False

        def callback(done: int) -> bool:
            nonlocal began, cooling
            schedule, spent = state.scheduler, time.perf_counter() - self._start
            began = began or (done, spent)
            if self._seconds is not None and not cooling and done > began[0] and done % PACE == 0:
                left = (self._seconds - spent) * (done - began[0]) / (spent - began[1])
                schedule.hurry(min(left, schedule.steps - done))
            if schedule.ended or done % self._every == 0:
                self._look(state, done)
                late = [self.looks[step] for step in sorted(self.looks) if schedule.halved(step) and step <= done]
                if not (schedule.ended or cooling) and self._stands(late):
                    cooling = True
                    schedule.hurry(self._every)
            return schedule.ended

        return callback

    def _look(self, state: TrainState, done: int) -> None:
        if done not in self.looks:
            weights = state.weights()
            self._plain.load_state_dict({name: weights[name] for name in self._plain.state_dict()})
            self._keep(done, self._ask(self._plain))

    def _keep(self, done: int, fidelity: float) -> None:
        """Write down what was found: the weights first, so that what the log says is there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if done and fidelity > max(self.looks.values()):
            write_weights(self._plain, self._folder / f"{BEST}.new")
            (self._folder / f"{BEST}.new").rename(self._folder / BEST)
        self.looks[done] = fidelity
        kept = {"looks": self.looks, "seconds": time.perf_counter() - self._start}
        (self._folder / f"{LOG}.new").write_text(json.dumps(kept), encoding="utf-8")
        (self._folder / f"{LOG}.new").rename(self._folder / LOG)

    def _stands(self, late: Sequence[float]) -> bool:
        """Whether the last few looks have gained too little over those before them. late: those of the second half of
        the schedule. In the first half the rate is high, and harms more than it heals: a MiniLM that classifies was at
        0.887 before, 0.839 after 150 of 600 steps, and 0.902 in the end."""
        if len(late) <= self._patience:
            return False
        earlier, now = max(late[: -self._patience]), max(late)
        return 1 - now > (1 - self._gain) * (1 - earlier)
