"""The order of a search: quantize what is there, try cuts, heal the promising ones a little, and of those the better
half more (successive halving), and build what is good enough."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from compress.solve.aim import Aim, Figures
from compress.solve.attempt import Outcome
from compress.solve.candidate import Candidate, better, cheap_front, excess, unfaithful, wrong
from compress.solve.forecast import Forecast, Prediction, slimmer
from compress.solve.front import with_front
from compress.solve.space import Settings, axes, foreseen, heals
from compress.solve.study import Study, described
from compress.solve.table import Table
from compress.solve.workshop import Workshop
from laconic.errors import RecipeError
from laconic.measured import Trial

HEALS = (60, 180, 720, 2880)
"""Steps of each healing: each four times as long as all before it together (Jamieson & Talwalkar, Non-stochastic Best
Arm Identification and Hyperparameter Optimization, 2016, halve the candidates as they double the effort)."""

GENERATION = 4
"""Settings that are asked for at once, however many workers there are, so that all of them find the same."""

WIDTH = 6
"""Candidates that are healed at first."""

STALE = 12
"""Settings in a row that add nothing to the front, after which no more are tried."""

EXPLORE = 0.25
"""The share of the budget for cuts without healing."""

GAIN = 1.05
"""How much faster a candidate must be foreseen to be than the best one, to be worth more work."""

LESS = 0.8
"""The share of its infidelity that healing must leave less than, for one whose artifact failed to be built again."""

STUCK = 0.95
"""The share of what is missing that healing must leave less than, to go on."""

ROUNDS = 10
"""How often the search goes from cuts to artifacts, at most."""

UNTRIED = "the time for cuts ended before its turn"

ASKS = 30
"""Questions to the study for one generation, most of which may be known or foreseen to be too slow."""

TRIES = 2
"""Candidates of one rung that are built, should the first fail on the samples that nothing was chosen by."""

Publish = Callable[[Candidate, Sequence[Trial]], None]


class Search:
    """best: the candidate whose artifact is at the destination, or on its way there. trials: settings that may still be
    tried. publish: puts an artifact there."""

    def __init__(self, shop: Workshop, publish: Publish, trials: int | None) -> None:
        self.shop = shop
        self.trials = float("inf") if trials is None else float(trials)
        self.best: Candidate | None = None
        self.candidates: dict[str, Candidate] = {}
        self._publish = publish

    def run(self) -> int:
        """How many candidates there were; the best one's artifact is at the destination."""
        self.begin()
        if self.study.axes and (self.aim.speed or not self.met):
            for _ in range(ROUNDS):
                before = self.work
                self.explore()
                self.refine()
                if self.work == before or self.shop.budget.left <= 0:
                    break
        self.conclude()
        return len(self.candidates)

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

    def begin(self) -> None:
        """Quantize what is there, and learn from it how fast anything else will be."""
        plain = Candidate({}, Prediction(0.0, 1.0, 0.0))
        graph = self.shop.base.source.checkpoint is None
        outcome = Outcome(Figures(1.0, 1.0, 0.0, 0.0)) if graph else self.shop.tried([plain], "load")[0]
        if outcome.figures is None:
            raise RecipeError(outcome.error)
        plain.take(outcome, self.aim)
        self.candidates[described({})] = plain
        self.build(plain)
        assert plain.built is not None
        # Few samples have a wide interval, whatever is done: it is asked for where quantization alone keeps to it.
        self.shop.aim = replace(self.aim, certain=not self.aim.uncertain(plain.built.highest))
        found = axes(outcome.cells)
        self.study = Study(found, self.shop.recipe.seed)
        if found:
            table = Table(plain.built.option, self.shop.cache, plain.built.precision)
            self.forecast = Forecast(table, outcome.cells, outcome.size, plain.built)

    def explore(self) -> None:
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
                front = cheap_front(self.open)
                stale = 0 if any(each in front for each in cut) else stale + len(cut)
                tried += len(cut)
                step.advance(len(cut))
                if len(cut) < len(asked):
                    break
            step.note = f"{tried} cut, {len(cheap_front(self.open))} of them worth healing"

    def cut(self, group: Sequence[Candidate], until: float) -> list[Candidate]:
        """Those for which there was time, cut: as many at a time as there are workers."""
        workers = self.shop.executor.workers
        done: list[Candidate] = []
        for start in range(0, len(group), workers):
            part = group[start : start + workers]
            if self.shop.budget.spent >= until or not self.shop.time_for("cut", build=True):
                break
            for candidate, outcome in zip(part, self.shop.tried(part), strict=True):
                candidate.take(outcome, self.aim)
                self.predict(candidate)
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
            fresh = name not in self.candidates or self.candidates[name].reason == UNTRIED
            candidate = self.candidates[name] = self.foresee(settings) if fresh else self.candidates[name]
            if fresh and not candidate.reason:
                found.append((number, candidate))
            else:
                self.study.tell(number, None)  # it knows already, or never will
        return found

    def foresee(self, settings: Settings) -> Candidate:
        """A candidate that was not touched yet; it has a reason to lose where the forecast gives one."""
        plain = self.candidates[described({})].outcome
        assert plain is not None
        cells = foreseen(plain.cells, settings)
        candidate = Candidate(settings, self.forecast.predict(cells, plain.size - slimmer(plain.cells, cells)))
        self.shop.charge("foresee", candidate.name)  # the table had to be measured first, maybe
        self.weigh(candidate)
        return candidate

    def predict(self, candidate: Candidate) -> None:
        """Predict anew, from the layers that are there now."""
        if candidate.cut is not None and candidate.outcome is not None:
            candidate.prediction = self.forecast.predict(candidate.outcome.cells, candidate.outcome.size)
            self.weigh(candidate)

    def weigh(self, candidate: Candidate) -> None:
        """Give it a reason to lose, where the forecast has one."""
        candidate.reason = candidate.reason or excess(self.aim, candidate.prediction)
        if not candidate.reason and not self.faster(candidate):
            candidate.reason = f"predicted {candidate.prediction.speedup:.2f} x: {self.rival} is as fast, with less cut"

    def faster(self, candidate: Candidate) -> bool:
        """Whether a candidate is foreseen to be worth more work, by its speed."""
        if not (self.aim.speed and self.met):
            return True
        assert self.best is not None
        assert self.best.built is not None
        return candidate.prediction.speedup > GAIN * self.best.built.speedup

    @property
    def rival(self) -> str:
        """The name of the best one."""
        return self.best.name if self.best else ""

    @property
    def open(self) -> list[Candidate]:
        """Those that were cut, and have not lost."""
        return [each for each in self.candidates.values() if each.cut and each.settings and not each.reason]

    def refine(self) -> None:
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
        found = [each for each in self.open if 0 < len(each.heals) < len(HEALS)]
        return sorted(self.unmet(found), key=lambda each: each.shortfall)[:1]

    def promising(self) -> list[Candidate]:
        """Of the front of the cuts, some that lie evenly on it; those likeliest to meet the goal first."""
        failed = [each for each in self.candidates.values() if each.reason and each.heals]
        front = [
            each
            for each in cheap_front(self.open)
            if not (each.heals or each.built or any(each.beyond(other) for other in failed)) and self.faster(each)
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
                    if candidate is self.best:
                        self.best = replace(candidate)  # its artifact stays where it is, until a better one is there
                    if self.refuted(candidate) and candidate.built:
                        candidate.failed = candidate.infidelity
                    candidate.heals, candidate.built = (*candidate.heals, steps), None
                for candidate, outcome in zip(group, self.shop.tried(group, "heal", steps), strict=True):
                    candidate.take(outcome, self.aim)
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
            and self.faster(each)
            and (self.refuted(each) or not (each.built or (self.aim.speed and each.shortfall <= 1)))
        ]

    def refuted(self, candidate: Candidate) -> bool:
        """Whether its artifact, or the last one before it was healed further, is small and fast enough, and its answers
        too far off on samples that it was not chosen by."""
        made = candidate.built
        if made is None:
            return candidate.failed < float("inf")
        return not excess(self.aim, made) and bool(wrong(self.aim, made))

    def survivors(self, pool: Sequence[Candidate]) -> list[Candidate]:
        """The better half of those that were healed, and may still come to meet the goal."""
        left = self.unmet(pool)
        for each in left:
            if len(each.heals) > 1 and each.left > STUCK:
                assert each.figures is not None
                each.reason = f"healing no longer helps: {unfaithful(self.aim, each.figures) or 'no more faithful'}"
        left = sorted((each for each in left if not each.reason), key=lambda each: each.shortfall)
        return left[: -(-len(left) // 2)]

    def finish(self, pool: Sequence[Candidate]) -> None:
        """Build the best of those that meet the goal, and the next should that fail."""
        ready = [each for each in pool if self.ready(each)]
        ready.sort(key=lambda each: -each.prediction.speedup if self.aim.speed else each.shortfall)
        for candidate in ready[:TRIES]:
            if not self.shop.time_for("build"):
                return
            self.build(candidate)
            if candidate is self.best:
                return

    def ready(self, candidate: Candidate) -> bool:
        """Whether it is worth an artifact."""
        new = candidate.infidelity < LESS * candidate.failed and not (candidate.built or candidate.reason)
        return new and candidate.shortfall <= 1 and self.faster(candidate)

    def build(self, candidate: Candidate) -> None:
        """Make its artifact, and take it where it is the best."""
        candidate.built = self.shop.build(candidate)
        if candidate.settings:
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

    def conclude(self) -> None:
        """The nearest to the goal is built, if nothing met it."""
        nearest = min((each for each in self.open if not each.built), key=lambda each: each.shortfall, default=None)
        if nearest is not None and not self.met and self.shop.time_for("build"):
            self.build(nearest)
        self.publish()

    @property
    def told(self) -> tuple[Trial, ...]:
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
