"""What a verdict is found from: the engine beside the graph run node by node, answers in company, the original."""

import models
import numpy as np
import pytest

from export.evidence import Evidence
from export.validate import engine_tolerance, is_batch_independent, validate
from laconic.models.processors import plain_task
from laconic.recipes.goal import Goal
from laconic.tasks.task import Tolerance


def shares(*rows):
    """Logits of these probabilities."""
    return {"logits": np.log(np.array(rows, np.float32))}


SURE = shares(*[[0.97, 0.01, 0.01, 0.01]] * 10)
"""The answers to ten samples, all of the first class."""
DOUBTING = shares(*[[0.95, 0.03, 0.01, 0.01]] * 10)
"""The same, where two hundredths went to the second class."""


def verdict(tolerance, labels=None, goal=None, kinds=(), **answers):
    given = dict.fromkeys(("original", "artifact", "plain", "alone", "together"), SURE) | answers
    task = plain_task("image-classification", (models.IMAGE,), "model")
    return validate(Evidence(None, labels=labels, kinds=kinds, **given), task, tolerance, goal or Goal(), seed=0)


def test_an_engine_may_be_as_far_off_as_the_artifact_and_a_hundredth_in_any_case():
    assert engine_tolerance(Tolerance(mean=0.9999, worst=0.999)) == Tolerance(mean=0.99, worst=0.9)
    assert engine_tolerance(Tolerance(mean=0.98)) == Tolerance(mean=0.98)
    assert engine_tolerance(Tolerance(mean=0.85, worst=0.0)) == Tolerance(mean=0.85, worst=0.0)


def test_an_engine_that_is_off_fails_where_much_is_asked_and_passes_where_little_is():
    (failure,) = verdict(Tolerance(mean=0.999), alone=DOUBTING, together=DOUBTING).failures
    assert failure == "engine against graph run node by node: fidelity is 0.98, required 0.99"
    assert verdict(Tolerance(mean=0.85), alone=DOUBTING, together=DOUBTING).passed


def test_answers_that_change_in_company_are_told_and_not_held_against_it():
    found = verdict(Tolerance(mean=0.98), together=DOUBTING)
    assert found.passed
    assert not is_batch_independent(found)
    assert is_batch_independent(verdict(Tolerance(mean=0.98)))


def test_a_drop_is_what_it_is_against_labels_and_its_limit_holds():
    labels = [0] * 9 + [1]
    wrong = shares(*[[0.97, 0.01, 0.01, 0.01]] * 8, *[[0.01, 0.01, 0.97, 0.01]] * 2)
    found = verdict(Tolerance(mean=0.0), labels, Goal(max_drop="5%"), artifact=wrong)
    (drift,) = found.drift
    assert drift.figures["metric_original"] == 0.9
    assert drift.figures["metric_change"] == pytest.approx(-0.1)
    low, high = drift.intervals["metric_change"]
    assert low < -0.1 < high <= 0
    assert found.failures == ["artifact against original: metric_change is -0.1, required -0.05"]
    assert verdict(Tolerance(mean=0.0), labels, Goal(max_drop="10%"), artifact=wrong).passed


def test_without_labels_there_is_no_drop():
    (drift,) = verdict(Tolerance(mean=0.98)).drift
    assert "metric_change" not in drift.figures
    assert "metric_change" not in drift.required


def test_a_kind_of_sample_on_which_the_artifact_is_less_faithful_is_pointed_out():
    near, far = [[0.97, 0.01, 0.01, 0.01]], [[0.87, 0.11, 0.01, 0.01]]
    answers = {"original": shares(*near * 30), "artifact": shares(*near * 20, *far * 10)}
    kinds = ("prose",) * 18 + ("",) * 2 + ("tables",) * 10
    found = verdict(Tolerance(mean=0.95), kinds=kinds, **answers)
    assert found.passed, "the mean over all samples meets the goal"
    whole, prose, tables = found.drift
    assert (whole.samples, prose.samples, tables.samples) == (30, 18, 10), "two samples are too few to be a kind"
    assert prose.figures == {"fidelity": 1.0, "fidelity_p5": 1.0, "fidelity_worst": 1.0}
    assert tables.figures["fidelity"] == pytest.approx(0.9, abs=1e-5)
    assert found.out_of_domain == ["out-of-domain: artifact on 'tables': fidelity is 0.9, required on all is 0.95"]
