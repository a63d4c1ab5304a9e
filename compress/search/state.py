"""What stands in a search: every candidate, and the best of them."""

from collections.abc import Callable, Sequence

from compress.search.constraints import Aim
from compress.search.forecast import Forecast
from compress.search.pareto import with_front
from compress.search.search_candidate import Candidate, better, cheap_front, excess, wrong
from compress.search.trial_runner import Workshop
from laconic.timing.measurements import TrialRecord

GAIN = 1.05
"""How much faster a candidate must be foreseen to be than the best one, to be worth more work."""

Publish = Callable[[Candidate, Sequence[TrialRecord]], None]


class Board:
    """best: the candidate whose artifact is at the destination, or on its way there. publish: puts an artifact there.
    forecast: there from the first artifact on, where anything can be cut."""

    def __init__(self, shop: Workshop, publish: Publish) -> None:
        self.shop = shop
        self.best: Candidate | None = None
        self.candidates: dict[str, Candidate] = {}
        self.forecast: Forecast | None = None
        self._publish = publish

    @property
    def aim(self) -> Aim:
        """What to reach."""
        return self.shop.aim

    @property
    def work(self) -> int:
        """How often a candidate was cut, healed or built so far."""
        every = self.candidates.values()
        return sum((each.cut is not None) + len(each.heals) + (each.built is not None) for each in every)

    @property
    def met(self) -> bool:
        """Whether the best one meets the goal."""
        return self.best is not None and self.best.built is not None and not wrong(self.aim, self.best.built)

    @property
    def open(self) -> list[Candidate]:
        """Those that were cut, and have not lost."""
        return [each for each in self.candidates.values() if each.cut and each.settings and not each.reason]

    @property
    def rival(self) -> str:
        """The name of the best one."""
        return self.best.name if self.best else ""

    def faster(self, candidate: Candidate) -> bool:
        """Whether a candidate is foreseen to be worth more work, by its speed."""
        if not (self.aim.speed and self.met):
            return True
        assert self.best is not None
        assert self.best.built is not None
        return candidate.prediction.speedup > GAIN * self.best.built.speedup

    def weigh(self, candidate: Candidate) -> None:
        """Give it a reason to lose, where the forecast has one."""
        candidate.reason = candidate.reason or excess(self.aim, candidate.prediction)
        if not candidate.reason and not self.faster(candidate):
            candidate.reason = f"predicted {candidate.prediction.speedup:.2f} x: {self.rival} is as fast, with less cut"

    def predict(self, candidate: Candidate) -> None:
        """Predict anew, from the layers that are there now."""
        assert self.forecast is not None
        if candidate.cut is not None and candidate.outcome is not None:
            candidate.prediction = self.forecast.predict(candidate.outcome.cells, candidate.outcome.size)
            self.weigh(candidate)

    def build(self, candidate: Candidate) -> None:
        """Make its artifact, and take it where it is the best."""
        candidate.built = self.shop.build(candidate)
        if self.forecast is not None:
            assert candidate.outcome is not None
            self.forecast.learn(candidate.outcome.cells, candidate.built)
        if better(self.aim, candidate.built, self.best.built if self.best else None):
            self.best = candidate
        if self.shop.budget.live:  # else an earlier run did this, and what it found best lies there already
            self.publish()

    def publish(self) -> None:
        """Put the best one's artifact at the destination, with what was tried so far."""
        assert self.best is not None
        self._publish(self.best, self.told)

    @property
    def told(self) -> tuple[TrialRecord, ...]:
        """What was tried so far, each with what it lost by."""
        assert self.best is not None
        front = cheap_front(self.open)
        others = [each for each in self.candidates.values() if each is not self.best]
        taken = "taken" if self.met else "taken: the nearest to the goal"
        return with_front(
            [
                each.trial(taken if each is self.best else each.reason or each.lost(self.best, front, self.aim))
                for each in (self.best, *others)
            ]
        )
