"""How far up the ladder to go, and which engine to take."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from export.candidates.candidate import (
    EngineCandidate,
    choose_fastest,
    describe_missed,
    describe_unmet,
    pair_float_graph,
    pair_ladders,
)
from export.candidates.engine_option import EngineOption
from export.candidates.plan_search import PlanTrial, find_plan
from laconic.quantization.plan import BITS, Plan, PrecisionLadder
from laconic.recipes.goal import Goal, required_tolerance, tighten
from laconic.tasks.text_classification import TextClassification
from laconic.tasks.text_embedding import TextEmbedding
from laconic.tasks.tolerance import Tolerance


def ladder_of(*rungs):
    """Plans that say how faithful they are: the key of their ranges."""
    plans = (tuple(Plan({"layer": "int8"}, {str(value): None}) for value in rung) for rung in rungs)
    return PrecisionLadder(tuple(plans))


def fidelity_of(plan):
    return float(next(iter(plan.ranges)))


class Trials:
    """Counts what was tried."""

    def __init__(self):
        self.plans = []

    def __call__(self, plan):
        self.plans.append(plan)
        return PlanTrial(np.full(4, fidelity_of(plan)))


def climbed(ladder, mean):
    trials = Trials()
    plan, trial, met = find_plan(ladder, trials, Tolerance(mean=mean))
    assert trial.fidelity[0] == fidelity_of(plan)
    return fidelity_of(plan), met, len(trials.plans)


def test_the_lowest_plan_that_meets_the_goal_is_found_or_else_the_most_faithful():
    assert climbed(ladder_of([0.99, 0.995, 0.999], [0.9999]), 0.99) == (0.99, True, 1)
    assert climbed(ladder_of([0.99, 0.995, 0.999], [0.9999]), 0.994)[:2] == (0.995, True)
    assert climbed(ladder_of([0.99, 0.995, 0.999], [0.9995, 0.9999]), 0.9999)[:2] == (0.9999, True)
    assert climbed(ladder_of([0.9, 0.95], [0.97, 0.96]), 0.99)[:2] == (0.97, False)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=64, unique=True), st.integers(0, 1000))
def test_bisection_finds_what_a_search_of_every_step_would(values, goal):
    rung = sorted(value / 1000 for value in values)
    found, met, tried = climbed(ladder_of(rung), goal / 1000)
    reaching = [value for value in rung if value >= goal / 1000]
    assert met == bool(reaching)
    if reaching:
        assert found == reaching[0]
    assert tried <= 3 + np.log2(len(rung) + 1)


def layered_ladder(sensitivities):
    """A rung whose layers leave INT8 one after the other, and the infidelity of each plan if that of layers adds up."""
    nodes = [f"layer{number}" for number in range(len(sensitivities))]
    plans = [
        Plan({node: "int8-weight" if number < left else "int8" for number, node in enumerate(nodes)}, {str(left): None})
        for left in range(len(nodes) + 1)
    ]
    return PrecisionLadder((tuple(plans),), dict(zip(nodes, sensitivities, strict=True)))


LAYERS = st.lists(st.integers(1, 1000), min_size=2, max_size=64)


@given(LAYERS, st.floats(0, 1))
def test_where_the_infidelity_of_layers_adds_up_few_plans_are_tried(layers, share):
    sensitivities = sorted((value * 1e-6 for value in layers), reverse=True)
    ladder = layered_ladder(sensitivities)
    tried = []

    def trial(plan):
        left = int(next(iter(plan.ranges)))
        tried.append(left)
        return PlanTrial(np.full(4, 1 - sum(sensitivities[left:])))

    goal = 1 - share * sum(sensitivities)
    plan, _, met = find_plan(ladder, trial, Tolerance(mean=goal))
    left = int(next(iter(plan.ranges)))
    meets = [1 - sum(sensitivities[each:]) >= goal for each in range(len(sensitivities) + 1)]
    assert met
    assert left == meets.index(True)
    assert len(tried) <= 5


@given(LAYERS, st.lists(st.integers(0, 1000), min_size=2, max_size=65), st.integers(0, 1000), st.booleans())
def test_sensitivities_that_say_nothing_cost_some_trials_and_never_the_plan(layers, values, goal, bounded):
    ladder = layered_ladder([value * 1e-6 for value in layers])
    rising = sorted((values * 64)[: len(layers) + 1])
    tried = []

    def trial(plan):
        left = int(next(iter(plan.ranges)))
        tried.append(left)
        return PlanTrial(np.array([rising[left] / 1000, 1.0]))

    tolerance = Tolerance(mean=0, worst=goal / 1000) if bounded else Tolerance(mean=(1 + goal / 1000) / 2)
    meets = [tolerance.met_by(np.array([value / 1000, 1.0])) for value in rising]
    plan, _, met = find_plan(ladder, trial, tolerance)
    assert met == any(meets)
    if met:
        assert int(next(iter(plan.ranges))) == meets.index(True)
    assert len(tried) == len(set(tried)) <= 5 + 3 * np.log2(len(rising))


def test_a_plan_that_is_faithful_and_says_too_little_is_left_for_the_next():
    ladder = ladder_of([0.991, 0.992, 0.995], [0.9999])
    losses = {0.991: 3.0, 0.992: 1.2, 0.995: 0.9, 0.9999: 0.0}

    def trial(plan):
        return PlanTrial(np.full(4, fidelity_of(plan)), losses[fidelity_of(plan)])

    assert fidelity_of(find_plan(ladder, trial, Tolerance(mean=0.99))[0]) == 0.995
    assert fidelity_of(find_plan(ladder, trial, Tolerance(mean=0.99, slack=2.0))[0]) == 0.992
    assert fidelity_of(find_plan(ladder, trial, Tolerance(mean=0.99, slack=0.0))[0]) == 0.991


def test_a_plan_that_the_engine_does_not_run_as_written_is_left_for_the_next_that_it_does():
    ladder = ladder_of([0.99, 0.992, 0.995, 0.999], [0.9999])
    trials = Trials()
    plan, _, met = find_plan(ladder, trials, Tolerance(mean=0.99), lambda plan: fidelity_of(plan) > 0.994)
    assert (fidelity_of(plan), met) == (0.995, True)
    assert len(trials.plans) == 4, "no plan is tried twice"
    assert fidelity_of(find_plan(ladder, trials, Tolerance(mean=0.99), lambda plan: fidelity_of(plan) > 0.9995)[0]) == (
        0.9999
    )
    assert not find_plan(ladder, trials, Tolerance(mean=0.99), lambda plan: False)[2]


CANDIDATE = EngineCandidate(
    EngineOption("openvino", "float32"),
    Plan({"layer": "int8"}),
    Path("model.onnx"),
    np.array([0.99]),
    met=True,
    arithmetic={},
    speedup=3.0,
)


def test_a_less_preferred_engine_must_be_faster_by_more_than_noise_and_a_more_faithful_one_by_less():
    other = replace(CANDIDATE, option=EngineOption("onnxruntime", "float32"))
    assert choose_fastest([CANDIDATE, replace(other, speedup=3.1)]) is CANDIDATE
    assert choose_fastest([CANDIDATE, replace(other, speedup=3.2)]).option.runtime == "onnxruntime"
    assert choose_fastest([replace(CANDIDATE, met=False), replace(other, speedup=1.0)]).option.runtime == "onnxruntime"
    faithful = replace(CANDIDATE, option=EngineOption("openvino", "bfloat16"), fidelity=np.array([0.995]))
    assert choose_fastest([CANDIDATE, replace(faithful, speedup=3.1)]).option.compute == "bfloat16"
    assert choose_fastest([CANDIDATE, replace(faithful, speedup=3.05)]) is CANDIDATE
    plain = replace(CANDIDATE, plan=Plan({"layer": "float32"}), speedup=5.0)
    assert choose_fastest([CANDIDATE, plain]) is CANDIDATE
    assert choose_fastest([replace(CANDIDATE, speedup=0.7), replace(plain, speedup=1.0)]).is_plain
    assert plain.name == "openvino, float32, not quantized"
    best = replace(CANDIDATE, met=False, fidelity=np.array([0.98]), speedup=1.0)
    assert choose_fastest([replace(CANDIDATE, met=False, fidelity=np.array([0.9])), best]) is best


def test_bf16_also_goes_from_the_top_of_one_flight_to_the_next_but_not_round_fewer_bits():
    options = [EngineOption("openvino", "float32"), EngineOption("openvino", "bfloat16")]
    low, lifted, last = (Plan({"layer": precision}) for precision in ("int8", "int8-weight", "float32"))
    ladder = PrecisionLadder(((low, lifted), (last,)))
    found = list(pair_ladders(ladder, options))
    assert found[1:] == [(ladder, option) for option in options]
    assert (found[0][0].rungs, found[0][1].compute) == (((lifted,), (last,)), "bfloat16")
    assert [(each.rungs, option.compute) for each, option in pair_float_graph(ladder, options)] == [
        (((last,),), "float32")
    ]
    only = PrecisionLadder.of(low)
    assert list(pair_ladders(only, options)) == [(only, option) for option in options], "there is no choice"
    assert list(pair_float_graph(only, options)) == []
    low, lifted, last = (Plan({"layer": precision}) for precision in ("int4-weight", "int8-weight", "float32"))
    ladder = PrecisionLadder(((low, lifted), (last,)))
    options = [EngineOption("openvino", "float32"), EngineOption("openvino", "bfloat16")]
    assert list(pair_ladders(ladder, options)) == [(ladder, option) for option in options]
    assert list(pair_float_graph(ladder, options)) == []


def test_a_choice_without_a_candidate_that_meets_the_goal_is_said():
    missed = replace(CANDIDATE, met=False)
    assert "0.9900" in describe_missed(choose_fastest([missed, replace(missed, fidelity=np.array([0.5]))]))
    assert describe_missed(choose_fastest([missed, CANDIDATE])) is None


def test_bits_that_were_asked_for_and_not_reached_are_reported_and_candidates_named_by_what_they_compute_in():
    asked = Plan(dict.fromkeys("abcd", "int4-weight") | {"table": "int8-weight"})
    wide = dict.fromkeys("abcd", "int8-weight") | {"table": "int8-weight"}
    assert "0 of 4 layers have them" in describe_unmet(asked, Plan(wide))
    assert "2 of 4 layers have them" in describe_unmet(asked, Plan(wide | dict.fromkeys("ab", "int4-weight")))
    assert describe_unmet(asked, Plan(wide | dict.fromkeys("abc", "int4-weight"))) is None
    assert describe_unmet(Plan(wide), Plan(wide)) is None, "4 bits were not asked for"
    names = {each: replace(CANDIDATE, plan=Plan({"a": each, "b": "int8-weight"})).name for each in BITS}
    assert {each for each, name in names.items() if name == "openvino, float32"} == {"int8", "int8-dynamic"}
    assert names["float8"] == "openvino, float32, FP8"
    assert set(names.values()) == {"openvino, float32", "openvino, float32, weight-only", "openvino, float32, FP8"}


def test_the_goal_asks_for_more_where_it_is_given_and_what_is_chosen_by_is_stricter():
    assert required_tolerance(TextEmbedding, Goal()) == Tolerance(mean=0.99, worst=0.95)
    asked = required_tolerance(TextEmbedding, Goal(fidelity=0.999))
    assert asked.mean == 0.999
    assert round(asked.worst, 6) == 0.99
    assert required_tolerance(TextEmbedding, Goal(fidelity=0.999, worst=0.9)).worst == 0.9
    assert required_tolerance(TextClassification, Goal(fidelity=0.999)).worst is None
    assert tighten(Tolerance(mean=0.99, worst=0.95)).mean > 0.99
    assert tighten(Tolerance(mean=0.99, worst=0.95)).worst > 0.95
    assert tighten(Tolerance(mean=1.0)).mean == 1.0
    assert tighten(Tolerance(mean=0.9, worst=0.0)).worst == 0.0, "nothing was asked of the worst"
