"""The search strategy in a simulated world: which candidates are healed, built and taken, and why others are not."""

from dataclasses import replace

import pytest

from compress.search.budget import Budget
from compress.search.constraints import Constraints, Quality
from compress.search.latency_model import LatencyTable
from compress.search.layer_spec import LayerSpec
from compress.search.search_candidate import BuiltArtifact, TrialOutcome, describe_misses, dominates
from compress.search.search_space import predict_specs
from compress.search.search_state import find_objectives
from compress.search.strategy import HEALING_STEPS, run_search
from laconic import registry
from laconic.cache import Cache
from laconic.hashing import hash_of
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.tasks.tolerance import Tolerance
from laconic.timing.benchmark import TRIAL_BATCHES

COSTS = {"cut": 2.0, "heal": 0.1, "build": 20.0, "foresee": 0.0, "load": 1.0}
"""Seconds of each unit of work in this world."""


def conv(into, out):
    return LayerSpec("conv", (1, into, 8, 8), (out, into, 3, 3), (1, 1), (1, 1), (1, 1), role="channels")


SPECS = (conv(3, 64), conv(64, 64), conv(64, 64), LayerSpec("linear", (1, 64), (10, 64)))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class World:
    """A trial runner whose models are formulas: healing takes an infidelity down to a floor that depends on the cut.

    harm: how much a cut costs. done: each piece of work that was not in the cache.
    """

    def __init__(self, folder, constraints, seconds, *, harm=1.0, workers=1, stop=None):
        self.recipe = Recipe.parse({"source": "model", "data": "texts"})
        self.constraints = constraints
        self.cache = Cache(folder)
        self.steps = Steps(quiet=True)
        self.clock = Clock()
        self.budget = Budget(seconds, self.cache, self.clock)
        self.executor = type("Workers", (), {"workers": workers})()
        self.context = type("SearchContext", (), {"source": "a checkpoint", "cache": self.cache})()
        self.harm = harm
        self.done = []
        self.stop = stop
        self.published = []

    def work(self, kind, name, units, compute):
        def do():
            if self.stop is not None and len(self.done) == self.stop:
                raise KeyboardInterrupt
            self.done.append((kind, name))
            self.clock.now += COSTS[kind] * units
            return compute()

        return self.cache.json(f"{kind}-{hash_of(name)}", do)

    def fidelity(self, candidate):
        taken = sum((1 - value) ** 2 for value in candidate.settings.values()) * self.harm
        return 1 - taken * (0.15 + 0.85 / (1 + sum(candidate.heals) / 60))

    def run_trials(self, group, kind="cut", units=1.0):
        found = []
        for each in group:
            fidelity = self.work(kind, each.name, units, lambda each=each: self.fidelity(each))
            specs = predict_specs(SPECS, each.settings)
            found.append(TrialOutcome(Quality(fidelity, fidelity), specs, sum(spec.parameters for spec in specs)))
        self.charge(kind, *(each.name for each in group), units=units)
        return found

    def build(self, candidate, constraints):
        fidelity = self.work("build", candidate.name, 1, lambda: self.fidelity(candidate) - 0.001)
        specs = candidate.outcome.specs
        costs = {batch: batch * (sum(spec.parameters for spec in specs) + 1000) * 1e-9 for batch in TRIAL_BATCHES}
        self.charge("build", candidate.name)
        return BuiltArtifact(
            folder=candidate.name,
            recipe="{}",
            runtime="onnxruntime",
            compute="float32",
            precision="int8",
            quality=Quality(fidelity, fidelity),
            latency=costs[1],
            size=sum(spec.parameters for spec in specs) + 500.0,
            speedup=1e-4 / costs[1],
            costs=costs,
            failures=(),
            first_token=costs[1],
            tokens_per_second=1 / costs[1],
        )

    def has_time_for(self, kind, units=1.0, *, build=False):
        return self.budget.allows(kind, units, keep=self.budget.estimate("build") or 0.0 if build else 0.0)

    def charge(self, kind, *parts, units=1.0):
        self.budget.charge(hash_of("lap", kind, parts), kind, units)


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """A latency table by formula, and the stages of the search space."""
    seconds = property(lambda spec: spec.parameters / spec.count * 1e-9)
    monkeypatch.setattr(LatencyTable, "seconds", lambda table, spec, batch: batch * seconds.fget(spec))
    for name in ("prune.channels", "factorize.low-rank", "distill.heal"):
        monkeypatch.setitem(registry.STAGES, name, registry.STAGES.get(name, "anything"))


FAITHFUL = Constraints(Tolerance(mean=0.97), None, None, None)


def run(world, trials=None):
    return run_search(
        world, world.constraints, lambda best, trials: world.published.append((best.folder, trials)), trials
    )


def test_the_taken_one_meets_the_goal_faster_than_quantization_alone_and_every_other_says_why_it_lost(tmp_path):
    world = World(tmp_path, FAITHFUL, 600)
    state = run(world)
    best = state.best
    assert best.settings
    assert best.built.quality.fidelity >= 0.97
    assert best.built.speedup > 1.5 * state.candidates["nothing cut"].built.speedup
    names = [name for name, _ in world.published]
    assert names[0] == "nothing cut"
    assert names[-1] == state.best.name
    trials = state.trials
    assert len(trials) == len(state.candidates) > 5
    assert all(trial.reason and "\n" not in trial.reason for trial in trials)
    assert [trial.name for trial in trials if trial.reason == "taken"] == [state.best.name]
    front = [trial for trial in trials if trial.front]
    assert front
    assert not any(dominates(find_objectives(one), find_objectives(other)) for one in front for other in front)


def test_a_budget_is_overrun_by_no_more_than_the_last_step(tmp_path):
    for seconds in (21, 30, 60, 90, 200):
        world = World(tmp_path / str(seconds), FAITHFUL, seconds)
        run(world)
        assert world.budget.overrun <= max(COSTS["build"], HEALING_STEPS[0] * COSTS["heal"])


def test_a_cut_that_is_foreseen_to_miss_the_goal_is_never_touched(tmp_path):
    world = World(tmp_path, Constraints(Tolerance(mean=0.5), None, 3e-5, None, prefers_speed=False), 600)
    state = run(world)
    lost = [each for each in state.candidates.values() if "predicted" in each.reason and each.outcome.quality is None]
    assert lost
    assert all("the goal is 30 us" in each.reason for each in lost)
    assert state.best.built.latency <= 3e-5
    touched = {name for kind, name in world.done if kind != "foresee"}
    assert not touched & {each.name for each in lost}


def test_a_goal_of_size_alone_takes_the_most_faithful_and_cuts_nothing_where_quantization_is_enough(tmp_path):
    world = World(tmp_path, Constraints(Tolerance(mean=0.9), None, None, 40_000, prefers_speed=False), 900)
    state = run(world)
    built = [each for each in state.candidates.values() if each.built and each.built.size <= 40_000]
    assert state.best in built
    assert state.best.built.quality.fidelity == max(each.built.quality.fidelity for each in built)
    world = World(tmp_path, Constraints(Tolerance(mean=0.9), None, None, 1e9, prefers_speed=False), 900)
    state = run(world)
    assert set(state.candidates) == {"nothing cut"}
    assert world.budget.spent == COSTS["load"] + COSTS["build"]


@pytest.mark.parametrize("limit", [{"max_first_token": 3e-5}, {"min_tokens_per_second": 1 / 3e-5}])
def test_models_that_write_are_cut_until_they_read_or_write_fast_enough(tmp_path, limit):
    constraints = Constraints(Tolerance(mean=0.5), None, None, None, prefers_speed=False, **limit)
    state = run(World(tmp_path, constraints, 600))
    assert state.is_goal_met
    assert state.best.settings
    assert state.best.built.first_token <= 3e-5
    lost = [each for each in state.trials if not each.measured and each.reason.startswith("predicted ")]
    assert lost
    assert all("asked for" in each.reason for each in lost)


def test_a_goal_that_nothing_meets_is_missed_with_the_nearest(tmp_path):
    world = World(tmp_path, Constraints(Tolerance(mean=0.999), None, 3e-5, None, prefers_speed=False), 400, harm=3.0)
    state = run(world)
    assert not state.is_goal_met
    assert {trial.reason for trial in state.trials if trial.name == state.best.name} == {
        "taken: the nearest to the goal"
    }


def test_healing_is_for_fewer_and_fewer(tmp_path):
    world = World(tmp_path, FAITHFUL, 5000, harm=2.0)
    run(world)
    healed = [name for kind, name in world.done if kind == "heal"]
    by_length = [
        sum(f"healed {sum(HEALING_STEPS[: number + 1])} steps" in name for name in healed) for number in range(3)
    ]
    assert by_length[0] > 1
    assert by_length == sorted(by_length, reverse=True)


def test_what_fails_on_samples_that_it_was_not_chosen_by_is_healed_and_built_again(tmp_path):
    class Strict(World):
        def build(self, candidate, constraints):
            short = candidate.settings and sum(candidate.heals) < 240
            return replace(super().build(candidate, constraints), failures=("refuted",) if short else ())

    state = run(world := Strict(tmp_path, FAITHFUL, 5000))
    built = [name for kind, name in world.done if kind == "build"]
    twice = [name for name in built if any(other.startswith(f"{name}, healed") for other in built)]
    assert twice
    assert state.is_goal_met
    assert sum(state.best.heals) >= 240


class Labelled(World):
    """A drop is half of the infidelity. width: from the drop to the upper end of its interval."""

    width = 0.0

    def dropping(self, found):
        drop = (1 - found.fidelity) / 2
        return replace(found, drop=drop, cautious_drop=drop)

    def run_trials(self, *args):
        return [replace(each, quality=self.dropping(each.quality)) for each in super().run_trials(*args)]

    def build(self, candidate, constraints):
        made = super().build(candidate, constraints)
        quality = self.dropping(made.quality)
        doubts = ("in doubt",) if quality.drop + self.width > self.constraints.max_drop else ()
        return replace(made, quality=quality, doubts=doubts)


def test_what_is_in_doubt_counts_as_missed_where_quantization_alone_is_not(tmp_path):
    constraints = Constraints(None, 0.02, None, None)
    states = {}
    for width in (0.0, 0.01, 0.03):
        world = Labelled(tmp_path / str(width), constraints, 2000)
        world.width = width
        states[width] = run(world)
    shown, unshown = states[0.01], states[0.03]
    assert shown.constraints.strict
    assert shown.is_goal_met
    assert shown.best.settings
    assert not shown.best.built.doubts
    doubtful = replace(shown.best.built, doubts=("in doubt",))
    assert describe_misses(shown.constraints, doubtful) == "in doubt"
    assert not unshown.constraints.strict, "nothing could be shown with so few samples"
    assert unshown.best.built.doubts
    assert unshown.best.settings == states[0.0].best.settings


def test_what_has_failed_is_not_built_again_before_healing_has_made_it_more_faithful(tmp_path):
    class Stubborn(World):
        """Healing helps a little only; whatever was cut fails on samples that nothing was chosen by."""

        def fidelity(self, candidate):
            taken = sum((1 - value) ** 2 for value in candidate.settings.values()) * self.harm
            return 1 - taken * 0.96 ** len(candidate.heals)

        def build(self, candidate, constraints):
            return replace(super().build(candidate, constraints), failures=("refuted",) if candidate.settings else ())

    state = run(world := Stubborn(tmp_path, FAITHFUL, 5000, harm=0.2))
    built = [name for kind, name in world.done if kind == "build" and name != "nothing cut"]
    healed = [name for kind, name in world.done if kind == "heal"]
    assert built
    assert len({name.partition(", healed")[0] for name in built}) == len(built), "each once"
    assert any(name.startswith(built[0]) for name in healed), "and is healed all the same"
    assert state.best.name == "nothing cut"


@pytest.mark.sweep("1[2468]0", "2?0", "3?0")
@pytest.mark.parametrize("seconds", range(40, 400, 20))
def test_what_is_published_stays_while_it_is_healed_further(tmp_path, seconds):
    class Hopeless(World):
        def build(self, candidate, constraints):
            made = super().build(candidate, constraints)
            quality = made.quality if candidate.settings else Quality(0.5, 0.5)
            return replace(made, quality=quality, failures=("refuted",))

    state = run(Hopeless(tmp_path, FAITHFUL, seconds, harm=0.3))
    assert state.best.built is not None
    assert [trial.reason for trial in state.trials].count("taken: the nearest to the goal") == 1


def test_a_search_that_is_killed_goes_on_and_does_nothing_twice(tmp_path):
    whole = World(tmp_path / "whole", FAITHFUL, 600)
    expected = run(whole, trials=10)
    for stop in range(1, len(whole.done), len(whole.done) // 3):
        first = World(tmp_path / str(stop), FAITHFUL, 600, stop=stop)
        with pytest.raises(KeyboardInterrupt):
            run(first, trials=10)
        second = World(tmp_path / str(stop), FAITHFUL, 600)
        state = run(second, trials=10)
        assert first.done + second.done == whole.done
        assert state.trials == expected.trials
        assert second.budget.spent == pytest.approx(whole.budget.spent)


def test_more_workers_find_the_same_for_the_same_number_of_trials(tmp_path):
    alone = run(World(tmp_path / "one", FAITHFUL, 1e6), trials=8)
    many = run(World(tmp_path / "many", FAITHFUL, 1e6, workers=4), trials=8)
    assert many.trials == alone.trials
