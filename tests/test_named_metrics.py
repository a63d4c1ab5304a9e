"""Metrics of the evaluations by name, against scikit-learn and scipy, and by address with --trust."""

import json

import models
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as theirs

from laconic.config import NamedSettings
from laconic.errors import DataError
from laconic.tasks.text import WORDS
from train.finetune.metric import Metric

CLASSES = {
    "accuracy": theirs.accuracy_score,
    "balanced-accuracy": theirs.balanced_accuracy_score,
    "f1-macro": lambda wanted, found: theirs.f1_score(wanted, found, average="macro", zero_division=0),
    "f1-micro": lambda wanted, found: theirs.f1_score(wanted, found, average="micro", zero_division=0),
    "precision-macro": lambda wanted, found: theirs.precision_score(wanted, found, average="macro", zero_division=0),
    "recall-macro": lambda wanted, found: theirs.recall_score(wanted, found, average="macro", zero_division=0),
    "matthews": theirs.matthews_corrcoef,
}
NUMBERS = {
    "mse": theirs.mean_squared_error,
    "mae": theirs.mean_absolute_error,
    "r2": theirs.r2_score,
    "pearson": lambda wanted, found: scipy.stats.pearsonr(wanted, found).statistic,
    "spearman": lambda wanted, found: scipy.stats.spearmanr(wanted, found).statistic,
}
SEVERAL = ("accuracy", "f1-macro", "f1-micro", "precision-macro", "recall-macro")


def metric(name: str) -> Metric:
    return NamedSettings(name=name).configure("metric", Metric)


@pytest.mark.filterwarnings("ignore")  # scikit-learn's, of classes that are found and never wanted
@settings(max_examples=25)
@given(st.integers(2, 5), st.integers(3, 40), st.integers(0, 1000))
@pytest.mark.parametrize("name", CLASSES)
def test_a_metric_of_classes_is_that_of_scikit_learn(name, classes, rows, seed):
    rng = np.random.default_rng(seed)
    outputs, labels = rng.normal(size=(rows, classes)), rng.integers(0, classes, rows)
    assert metric(name).compute(outputs, labels) == pytest.approx(CLASSES[name](labels, outputs.argmax(axis=1)))


@pytest.mark.parametrize("name", SEVERAL)
def test_a_metric_of_several_classes_per_sample_is_that_of_scikit_learn(name):
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(40, 4)), rng.integers(0, 2, (40, 4))
    assert metric(name).compute(outputs, labels) == pytest.approx(CLASSES[name](labels, (outputs > 0).astype(int)))


@pytest.mark.parametrize("classes", [2, 4])
def test_the_area_under_the_curve_is_that_of_scikit_learn(classes):
    rng = np.random.default_rng(1)
    outputs, labels = rng.normal(size=(50, classes)), rng.integers(0, classes, 50)
    odds = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    wanted = theirs.roc_auc_score(labels, odds[:, 1] if classes == 2 else odds, multi_class="ovr")
    assert metric("auc").compute(outputs, labels) == pytest.approx(wanted)
    several = rng.integers(0, 2, outputs.shape)
    assert metric("auc").compute(outputs, several) == pytest.approx(theirs.roc_auc_score(several, outputs))
    coarse = outputs.round()
    assert metric("auc").compute(coarse, several) == pytest.approx(theirs.roc_auc_score(several, coarse))
    with pytest.raises(DataError, match="all samples of the validation set or none"):
        metric("auc").compute(outputs, np.zeros(50, np.int64))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_metric_of_numbers_is_that_of_scikit_learn_and_scipy(name):
    rng = np.random.default_rng(2)
    wanted = rng.normal(size=30).round(1)
    found = (wanted + rng.normal(size=30)).round(1)
    assert metric(name).compute(found[:, None], wanted) == pytest.approx(NUMBERS[name](wanted, found))


def test_samples_of_another_kind_are_refused():
    with pytest.raises(DataError, match="Choose a metric for numbers, as mse"):
        metric("f1-macro").compute(np.zeros(3), np.zeros(3))
    with pytest.raises(DataError, match="Choose a metric for classes, as f1-macro"):
        metric("mse").compute(np.zeros((3, 2)), np.zeros(3))


OWN = """
from typing import ClassVar
from train.finetune.metric import Metric

class Wrong(Metric):
    higher_is_better: ClassVar[bool] = False
    scale: float = 1.0

    def compute(self, outputs, labels):
        return self.scale * float((outputs.argmax(axis=1) != labels).mean())
"""


def test_metrics_are_named_in_the_recipe_and_one_of_ones_own_by_address_with_trust(laconic, tmp_path, monkeypatch):
    models.save_bert(tmp_path / "bert")
    rows = [{"text": f"{word} a", "label": ["no", "yes"][number % 2]} for number, word in enumerate(WORDS * 2)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own_metric.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["finetune", tmp_path / "bert", "--data", tmp_path / "d.jsonl", "--steps", "2", "-o", tmp_path / "out"]
    own = "metrics=[f1-macro, {'own_metric:Wrong': {scale: 100}}]"
    code, _, err = laconic(*arguments, "--set", own)
    assert code == 2
    assert "--trust" in err
    code, out, err = laconic(*arguments, "--set", own, "--trust", "--json", "--set", "best_by=own_metric:Wrong")
    assert code == 0, err
    after = json.loads(out)["after"]
    assert after["own_metric:Wrong"] == pytest.approx(100 * (1 - after["accuracy"]))
    assert 0 <= after["f1-macro"] <= 1
    code, _, err = laconic(*arguments, "--set", "metrics=[f1-makro]")
    assert code == 2
    assert "Did you mean" in err
    code, _, err = laconic(*arguments, "--set", "metrics=[mse]")
    assert code == 2
    assert "metrics: mse: the metric compares numbers" in err
