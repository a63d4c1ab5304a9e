"""What a verdict is found from: the engine beside the graph run node by node, answers in company, the original."""

import models
import numpy as np
import pytest

from export.validation.evidence import Evidence
from export.validation.validate import engine_tolerance, is_batch_independent, validate
from laconic.models.processors import plain_task
from laconic.recipes.goal import Goal
from laconic.tasks.tolerance import Tolerance


def shares(*rows):
    """Logits of these probabilities."""
    return {"logits": np.log(np.array(rows, np.float32))}


def turn(row, count):
    """Rows whose first share stands at each class in turn."""
    return [row[-place:] + row[:-place] for place in (number % 4 for number in range(count))]


SURE = shares(*turn([0.97, 0.01, 0.01, 0.01], 40))
"""The answers to forty samples, ten of each class."""
DOUBTING = shares(*turn([0.95, 0.03, 0.01, 0.01], 40))
"""The same, where two hundredths went to another class."""


def verdict(tolerance, labels=None, goal=None, kinds=(), **answers):
    given = dict.fromkeys(("original", "artifact", "plain", "alone", "together"), SURE) | answers
    task = plain_task("image-classification", (models.IMAGE,), "model")
    return validate(Evidence(None, labels=labels, kinds=kinds, **given), task, tolerance, goal or Goal(), seed=0)


def test_an_engine_may_be_as_far_off_as_the_artifact_and_a_hundredth_in_any_case():
    assert engine_tolerance(Tolerance(mean=0.9999, worst=0.999)) == Tolerance(mean=0.99, worst=0.9)
    assert engine_tolerance(Tolerance(mean=0.98)) == Tolerance(mean=0.98)
    assert engine_tolerance(Tolerance(mean=0.85, worst=0.0)) == Tolerance(mean=0.85, worst=0.0)
    (failure,) = verdict(Tolerance(mean=0.999), alone=DOUBTING, together=DOUBTING).failures
    assert failure == "engine against graph run node by node: fidelity is 0.98, required 0.99"
    assert verdict(Tolerance(mean=0.85), alone=DOUBTING, together=DOUBTING).passed


def test_answers_that_change_in_company_are_told_and_not_held_against_it():
    found = verdict(Tolerance(mean=0.98), together=DOUBTING)
    assert found.passed
    assert not is_batch_independent(found)
    assert is_batch_independent(verdict(Tolerance(mean=0.98)))


def test_a_drop_is_what_it_is_against_labels_and_its_limit_holds():
    labels = [row % 4 for row in range(39)] + [0]
    wrong = {"logits": SURE["logits"].copy()}
    wrong["logits"][:4] = wrong["logits"][4:8][::-1]
    found = verdict(Tolerance(mean=0.0), labels, Goal(max_drop="1%"), artifact=wrong)
    (drift,) = found.drift
    assert drift.figures["metric_original"] == 39 / 40
    assert drift.figures["metric_change"] == pytest.approx(-0.1)
    low, high = drift.intervals["metric_change"]
    assert low < -0.1 < high < 0.05
    assert drift.judge("metric_change") == "inconclusive", "four of forty may be chance"
    assert "too few samples to tell, about" in drift.describe("metric_change")
    (drift,) = verdict(Tolerance(mean=0.0), labels, Goal(max_drop="30%"), artifact=wrong).drift
    assert drift.judge("metric_change") == "passed"


def test_labels_bound_the_drop_by_a_point_without_being_asked():
    labels = [row % 4 for row in range(40)] * 10
    many = {name: np.tile(array, (10, 1)) for name, array in SURE.items()}
    worse = {"logits": many["logits"].copy()}
    worse["logits"][:40] = np.roll(worse["logits"][:40], 1, axis=1)
    answers = dict.fromkeys(("original", "plain", "alone", "together"), many)
    assert verdict(Tolerance(mean=0.0), labels, **answers, artifact=many).passed
    (failure,) = verdict(Tolerance(mean=0.0), labels, **answers, artifact=worse).failures
    assert failure.startswith("artifact against original: metric_change is -0.1 (95 %: -0.13")
    assert failure.endswith("required -0.01")


def test_three_samples_prove_nothing_and_say_how_many_would():
    three = {"logits": SURE["logits"][:3]}
    alike = dict.fromkeys(("original", "artifact", "plain", "alone", "together"), three)
    found = verdict(Tolerance(mean=0.98), [0, 1, 2], Goal(max_drop="1%"), **alike)
    assert (found.state, found.failures) == ("inconclusive", [])
    metric = next(doubt for doubt in found.doubts if "metric_change" in doubt)
    assert "metric_change is 0 (95 %: -0.7" in metric
    assert found.drift[0].needed["metric_change"] > 300


def test_a_rare_class_that_is_lost_is_named():
    rows = turn([0.97, 0.01, 0.01, 0.01], 4)
    original = shares(*[rows[0]] * 300, *[rows[3]] * 6)
    artifact = shares(*[rows[0]] * 306)
    answers = dict.fromkeys(("plain", "alone", "together"), original)
    found = verdict(Tolerance(mean=0.95), original=original, artifact=artifact, **answers)
    assert found.drift[0].passed, "the mean over all samples meets the goal"
    (recall,) = (failure for failure in found.failures if "recall" in failure)
    assert recall.startswith("label '3' against original: recall is 0 (95 %: 0 to 0.5")
    assert recall.endswith("6 samples), required 0.9")


def test_an_original_that_answers_all_samples_alike_proves_nothing():
    flat = shares(*[[0.25, 0.25, 0.25, 0.25]] * 40)
    answers = dict.fromkeys(("original", "artifact", "plain", "alone", "together"), flat)
    found = verdict(Tolerance(mean=0.98), **answers)
    assert found.state == "inconclusive"
    assert "original that answers all samples alike" in found.doubts[0]
    assert verdict(Tolerance(mean=0.98, slack=0.0), **answers).passed, "as of made-up samples"


def test_without_labels_there_is_no_drop():
    (drift,) = verdict(Tolerance(mean=0.98)).drift
    assert "metric_change" not in drift.figures
    assert "metric_change" not in drift.required


def test_a_kind_of_sample_on_which_the_artifact_is_less_faithful_is_pointed_out():
    near, far = (turn([first, 0.98 - first, 0.01, 0.01], 40) for first in (0.97, 0.87))
    answers = {"original": shares(*near), "artifact": shares(*near[:30], *far[30:])}
    kinds = ("prose",) * 28 + ("",) * 2 + ("tables",) * 10
    found = verdict(Tolerance(mean=0.95), kinds=kinds, **answers)
    assert found.passed, "the mean over all samples meets the goal"
    whole, prose, tables = found.drift
    assert (whole.samples, prose.samples, tables.samples) == (40, 28, 10), "two samples are too few to be a kind"
    assert prose.figures == {"fidelity": 1.0, "fidelity_p5": 1.0, "fidelity_worst": 1.0}
    assert tables.figures["fidelity"] == pytest.approx(0.9, abs=1e-5)
    assert found.out_of_domain == ["out-of-domain: artifact on 'tables': fidelity is 0.9, required on all is 0.95"]
