"""Cuts without healing: which to try, and what can be said of them beforehand."""

from collections.abc import Sequence

from compress.search.forecast import slimmer
from compress.search.search_candidate import Candidate, cheap_front
from compress.search.space import Settings, foreseen
from compress.search.state import Board
from compress.search.study import Study, described

GENERATION = 4
"""Settings that are asked for at once, however many workers there are, so that all of them find the same."""

STALE = 12
"""Settings in a row that add nothing to the front, after which no more are tried."""

EXPLORE = 0.25
"""The share of the budget for cuts without healing."""

ASKS = 30
"""Questions to the study for one generation, most of which may be known or foreseen to be too slow."""

UNTRIED = "the time for cuts ended before its turn"


class Exploration:
    """study: says what to try. trials: settings that may still be tried."""

    def __init__(self, board: Board, study: Study, trials: float) -> None:
        self.board = board
        self.shop = board.shop
        self.study = study
        self.trials = trials

    def run(self) -> None:
        """Try cuts, without healing, until nothing new comes or the share of the budget for it is spent."""
        stale, tried, budget = 0, 0, self.shop.budget
        until = budget.spent + EXPLORE * budget.left
        with self.shop.steps.step("try cuts") as step:
            while stale < STALE and self.trials > 0 and budget.spent < until:
                asked = self.generation(until)
                if not asked:
                    break
                cut = self.cut([each for _, each in asked], until)
                for number, candidate in asked:
                    self.study.tell(number, candidate.told)
                front = cheap_front(self.board.open)
                stale = 0 if any(each in front for each in cut) else stale + len(cut)
                tried += len(cut)
                step.advance(len(cut))
                if len(cut) < len(asked):
                    break
            step.note = f"{tried} cut, {len(cheap_front(self.board.open))} of them worth healing"

    def cut(self, group: Sequence[Candidate], until: float) -> list[Candidate]:
        """Those for which there was time, cut: as many at a time as there are workers."""
        workers = self.shop.executor.workers
        done: list[Candidate] = []
        for start in range(0, len(group), workers):
            part = group[start : start + workers]
            if self.shop.budget.spent >= until or not self.shop.time_for("cut", build=True):
                break
            for candidate, outcome in zip(part, self.shop.tried(part), strict=True):
                candidate.take(outcome, self.board.aim)
                self.board.predict(candidate)
            done += part
        for candidate in group[len(done) :]:
            candidate.reason = UNTRIED
        self.trials -= len(done)
        return done

    def generation(self, until: float) -> list[tuple[int, Candidate]]:
        """New candidates that are foreseen to be fast and small enough, with the number of the study's question."""
        found: list[tuple[int, Candidate]] = []
        for _ in range(ASKS):
            if len(found) == min(GENERATION, self.trials) or self.shop.budget.spent >= until:
                break
            number, settings = self.study.ask()
            name = described(settings)
            fresh = name not in self.board.candidates or self.board.candidates[name].reason == UNTRIED
            candidate = self.board.candidates[name] = self.foresee(settings) if fresh else self.board.candidates[name]
            if fresh and not candidate.reason:
                found.append((number, candidate))
            else:
                self.study.tell(number, None)  # it knows already, or never will
        return found

    def foresee(self, settings: Settings) -> Candidate:
        """A candidate that was not touched yet; it has a reason to lose where the forecast gives one."""
        plain, forecast = self.board.candidates[described({})].outcome, self.board.forecast
        assert plain is not None
        assert forecast is not None
        cells = foreseen(plain.cells, settings)
        candidate = Candidate(settings, forecast.predict(cells, plain.size - slimmer(plain.cells, cells)))
        self.shop.charge("foresee", candidate.name)  # the table had to be measured first, maybe
        self.board.weigh(candidate)
        return candidate
