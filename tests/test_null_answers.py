"""No answer without information passes the verdict of any task at the default goal; answers with it do."""

import numpy as np
import pytest
from originals import ORIGINALS

from export.validation.evidence import Evidence
from export.validation.validate import validate
from laconic import registry
from laconic.recipes.goal import Goal, required_tolerance
from laconic.tasks.tensors import Tensors
from laconic.tensor import TensorSpec

CASES = [(name, task, make) for name, pairs in ORIGINALS.items() for task, make in pairs]
each_case = pytest.mark.parametrize(
    ("task", "make"), [case[1:] for case in CASES], ids=[f"{c[0]}-{c[2].__name__}" for c in CASES]
)


def judge(task, original, artifact, goal=None):
    """The verdict on outputs, where the engine does what the graph says."""
    alike = dict.fromkeys(("plain", "alone", "together"), original)
    evidence = Evidence(None, original=original, artifact=artifact, labels=None, **alike)
    goal = goal or Goal()
    return validate(evidence, task, required_tolerance(task, goal), goal, seed=0)


def blur(outputs, rng, share):
    """Outputs with an error of a share of their spread, as that of a quantized model."""
    blurred = {}
    for name, array in outputs.items():
        if array.dtype.kind != "f":
            blurred[name] = array
            continue
        noise = share * array.std(axis=tuple(range(array.ndim - 1))) * rng.normal(size=array.shape)
        blurred[name] = np.where(array != 0, array + noise, 0).astype(array.dtype)
    return blurred


def test_every_task_has_originals_to_be_judged_beside():
    assert ORIGINALS.keys() == registry.TASKS.keys()


@each_case
def test_the_originals_own_answers_pass(task, make):
    original = make(np.random.default_rng(0))
    verdict = judge(task, original, original)
    assert verdict.passed, verdict.describe()
    assert all(comparison.figures.get("skill", 1) == 1 for comparison in verdict.information)


@each_case
def test_no_null_answer_passes(task, make):
    original = make(np.random.default_rng(0))
    nulls = task.null_answers(original)
    assert len(nulls) >= 2
    states = {name: judge(task, original, answer).state for name, answer in nulls.items()}
    assert set(states.values()) == {"failed"}, states


@each_case
def test_no_null_answer_passes_even_at_the_lowest_goal(task, make):
    original = make(np.random.default_rng(0))
    for name, answer in task.null_answers(original).items():
        verdict = judge(task, original, answer, Goal(fidelity=0, worst=0))
        assert verdict.state == "failed", name


@each_case
def test_answers_with_small_errors_pass(task, make):
    rng = np.random.default_rng(0)
    original = make(rng)
    verdict = judge(task, original, blur(original, rng, 0.02))
    assert verdict.passed, verdict.describe()


@each_case
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_fail_by_name(task, make, value):
    original = make(np.random.default_rng(0))
    name = next(iter(original))
    if original[name].dtype.kind != "f":
        pytest.skip("whole numbers are always finite")
    broken = original | {name: original[name].copy()}
    broken[name][17] = value
    failures = judge(task, original, broken).failures
    assert any(f"output {name!r}, NaN or infinite for test sample 18," in failure for failure in failures)


@pytest.mark.parametrize(("numbers", "figure"), [(12, "explained_variance_worst"), (60, "explained_variance_each")])
def test_a_number_of_a_large_unit_does_not_hide_that_the_others_are_lost(numbers, figure):
    task = Tensors((TensorSpec(name="x", dtype="float32", shape=("batch", 3)),))
    rng = np.random.default_rng(0)
    units = np.where(np.arange(numbers) == 0, 1e5, 1.0)
    original = {"y": (units * rng.normal(size=(120, numbers))).astype(np.float32)}
    pressure_alone = {"y": np.where(units > 1, original["y"], original["y"].mean(axis=0))}
    failures = judge(task, original, pressure_alone).failures
    assert any(f"output 'y' against original: {figure} is" in failure for failure in failures), failures
    assert judge(task, original, blur(original, rng, 0.02)).passed
