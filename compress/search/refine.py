"""The promising cuts healed, fewer and fewer of them, longer and longer; and built, where they are good enough."""

from collections.abc import Sequence
from dataclasses import replace

from compress.search.search_candidate import Candidate, cheap_front, excess, unfaithful, wrong
from compress.search.space import heals
from compress.search.state import Board

HEALS = (60, 180, 720, 2880)
"""Steps of each healing: each three times as long as all before it together (Jamieson & Talwalkar, Non-stochastic Best
Arm Identification and Hyperparameter Optimization, 2016, halve the candidates as they double the effort)."""

WIDTH = 6
"""Candidates that are healed at first."""

LESS = 0.9
"""The share of its infidelity that healing must leave less than, for one whose artifact failed to be built again."""

STUCK = 0.95
"""The share of what is missing that healing must leave less than, to go on."""

TRIES = 2
"""Candidates of one rung that are built, should the first fail on the samples that nothing was chosen by."""


class Refinement:
    """board: where the candidates stand."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.shop = board.shop

    def run(self) -> None:
        """Build what is good enough; heal the others, fewer and fewer of them, longer and longer. Where no cut is new,
        the best of those that were left behind is healed further."""
        pool = self.promising()
        self.finish(pool)
        pool = self.unmet(pool) or self.left_behind()
        while pool and len(pool[0].heals) < len(HEALS):
            pool = self.healed(pool, HEALS[len(pool[0].heals)])
            self.finish(pool)
            pool = self.survivors(pool)

    def left_behind(self) -> list[Candidate]:
        """The nearest to the goal of those that were healed, and not to the end."""
        found = [each for each in self.board.open if 0 < len(each.heals) < len(HEALS)]
        return sorted(self.unmet(found), key=lambda each: each.shortfall)[:1]

    def promising(self) -> list[Candidate]:
        """Of the front of the cuts, some that lie evenly on it; those likeliest to meet the goal first."""
        failed = [each for each in self.board.candidates.values() if each.reason and each.heals]
        front = [
            each
            for each in cheap_front(self.board.open)
            if not (each.heals or each.built or any(each.beyond(other) for other in failed)) and self.board.faster(each)
        ]
        front.sort(key=lambda each: each.prediction.speedup)
        last = len(front) - 1
        places = {round(number * last / (WIDTH - 1)) for number in range(WIDTH)} if front else set()
        return sorted((front[place] for place in places), key=lambda each: each.shortfall)

    def healed(self, pool: Sequence[Candidate], steps: int) -> list[Candidate]:
        """Those for which there was time, healed so much longer."""
        done: list[Candidate] = []
        if not heals(self.shop.recipe):
            return done
        workers = self.shop.executor.workers
        with self.shop.steps.step(f"heal {steps} steps", len(pool)) as step:
            for start in range(0, len(pool), workers):
                group = pool[start : start + workers]
                if not self.shop.time_for("heal", steps, build=True):
                    break
                for candidate in group:
                    if candidate is self.board.best:
                        # Its artifact stays where it is, until a better one is there.
                        self.board.best = replace(candidate)
                    if self.refuted(candidate) and candidate.built:
                        candidate.failed = candidate.infidelity
                    candidate.heals, candidate.built = (*candidate.heals, steps), None
                for candidate, outcome in zip(group, self.shop.tried(group, "heal", steps), strict=True):
                    candidate.take(outcome, self.board.aim)
                    step.advance()
                done += group
            step.note = "; ".join(f"{each.name}: {each.shortfall:.2f} of what is allowed" for each in done)
        return [each for each in done if not each.reason]

    def unmet(self, pool: Sequence[Candidate]) -> list[Candidate]:
        """Those that may still come to meet the goal, or to be more faithful."""
        return [
            each
            for each in pool
            if not each.reason
            and self.board.faster(each)
            and (self.refuted(each) or not (each.built or (self.board.aim.speed and each.shortfall <= 1)))
        ]

    def refuted(self, candidate: Candidate) -> bool:
        """Whether its artifact, or the last one before it was healed further, is small and fast enough, and its answers
        too far off on samples that it was not chosen by."""
        made = candidate.built
        if made is None:
            return candidate.failed < float("inf")
        return not excess(self.board.aim, made) and bool(wrong(self.board.aim, made))

    def survivors(self, pool: Sequence[Candidate]) -> list[Candidate]:
        """The better half of those that were healed, and may still come to meet the goal."""
        left = self.unmet(pool)
        for each in left:
            if len(each.heals) > 1 and each.left > STUCK:
                assert each.figures is not None
                each.reason = (
                    f"healing no longer helps: {unfaithful(self.board.aim, each.figures) or 'no more faithful'}"
                )
        left = sorted((each for each in left if not each.reason), key=lambda each: each.shortfall)
        return left[: -(-len(left) // 2)]

    def finish(self, pool: Sequence[Candidate]) -> None:
        """Build the best of those that meet the goal, and the next should that fail."""
        ready = [each for each in pool if self.ready(each)]
        ready.sort(key=lambda each: -each.prediction.speedup if self.board.aim.speed else each.shortfall)
        for candidate in ready[:TRIES]:
            if not self.shop.time_for("build"):
                return
            self.board.build(candidate)
            if candidate is self.board.best:
                return

    def ready(self, candidate: Candidate) -> bool:
        """Whether it is worth an artifact."""
        new = candidate.infidelity < LESS * candidate.failed and not (candidate.built or candidate.reason)
        return new and candidate.shortfall <= 1 and self.board.faster(candidate)
