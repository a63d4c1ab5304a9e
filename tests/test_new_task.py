"""A new task is one class and one line in the registry: it is trained, compressed, healed and served."""

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from contexts import tune
from served import running

from compress.pipeline import compress
from laconic import registry
from laconic.arrays import Array, Arrays, first
from laconic.cache import Cache
from laconic.data.reader import read
from laconic.errors import DataError, UsageError
from laconic.metrics import Scorer, make_r2_scorer, measure_closeness
from laconic.models.checkpoint import Checkpoint
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.tasks.text import WORDS, TextTask
from laconic.tasks.tolerance import Tolerance
from laconic.tasks.training_needs import HealingLoss
from train.planner.meta_model import open_meta_model


class ReviewScore(TextTask):
    """A review to a score: regression on a text, under a field of its own.

    Fidelity is the closeness to the original's score, in standard deviations.
    """

    name = "review-score"
    field = "review"
    field_description = "A review, or a list of reviews."
    tolerance = Tolerance(mean=0.5)
    metric = "R2"
    objective = "targets"
    auto_class = "AutoModelForSequenceClassification"

    def parse_label(self, value: Any, sample: Any) -> Any:
        return [float(value)]

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        return [{"score": round(float(row[0]), 3)} for row in first(outputs)]

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        return measure_closeness(first(reference), first(candidate))[:, 0]

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        return make_r2_scorer(first(outputs).astype(np.float64), np.asarray(labels, np.float64))

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        return {"outputs": 1.0, "last-hidden-state": 0.5}


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.TASKS, "review-score", f"{__name__}:ReviewScore")
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a BERT with one output, and reviews whose score is the share of the word "fast" in them."""
    folder = tmp_path_factory.mktemp("reviews")
    models.save_bert(folder / "bert", num_labels=1, id2label={0: "score"}, label2id={"score": 0})
    rng = np.random.default_rng(0)
    with (folder / "reviews.jsonl").open("w") as file:
        for _ in range(160):
            words = rng.choice([*WORDS, "fast", "fast"], rng.integers(3, 12))
            file.write(json.dumps({"review": " ".join(words), "label": float((words == "fast").mean())}) + "\n")
    return folder


@pytest.fixture(scope="module")
def tuned(home):
    """The model fine-tuned on the reviews, and the folder of its checkpoint."""
    settings = {"task": "review-score", "batch_size": 16, "steps": 12}
    return tune(home / "bert", home / "reviews.jsonl", home / "tuned", Cache(home / "cache"), **settings)


@pytest.fixture(scope="module")
def compressed(home, tuned):
    """The artifact of the fine-tuned model, pruned, healed and quantized for the default target."""
    stages = [{"prune.ffn": {"keep": 0.8, "round_to": 4}}, "quantize.static"]
    recipe = Recipe.parse(
        {
            "source": str(tuned.folder),
            "data": str(home / "reviews.jsonl"),
            "stages": stages,
            "heal": {"steps": 20, "eval_every": 10, "loader": {"workers": 0}},
            "runtimes": ["onnxruntime"],
        }
    )
    return compress(recipe, home / "review.laconic", steps=Steps(quiet=True), cache=Cache(home / "cache"))


def test_it_is_fine_tuned_by_its_objective_and_planned_for_without_weights(home, tuned):
    assert tuned.after["loss"] < tuned.before["loss"]
    assert tuned.before["R2"] < tuned.after["R2"] < 1
    assert Checkpoint.load(home / "tuned").task.name == "review-score"
    subject = open_meta_model(home / "bert", task="review-score")
    assert (subject.task.name, subject.longest) == ("review-score", 64)
    assert subject.objective().make_example(2, 5)["input_ids"].shape == (2, 5)


def test_it_is_compressed_and_healed_by_the_losses_that_it_names(compressed):
    manifest = compressed.artifact.manifest
    assert manifest.task == "review-score"
    assert manifest.verdict.failures == []
    assert [record.stage for record in manifest.history][:3] == ["finetune", "prune.ffn", "distill.heal"]


def test_it_is_served_under_its_own_field(compressed):
    with running(compressed.artifact.path) as server, server.client() as http:
        answer = http.post("/v1/models/review/predict", json={"review": ["the model is fast", "the memory waits"]})
        assert [list(each) for each in answer.json()["answers"]] == [["score"], ["score"]]
        wrong = http.post("/v1/models/review/predict", json={"text": "the model is fast"})
        assert (wrong.status_code, "'review'" in wrong.json()["error"]) == (400, True)
        form = http.post("/v1/models/review/predict", files={"review": (None, "the model is fast")})
        assert form.json()["answers"] == answer.json()["answers"][:1]
        assert '"review"' in http.get("/page/models").text
        body = http.get("/openapi.json").json()["paths"]["/v1/models/review/predict"]["post"]["requestBody"]
        samples = body["content"]["application/json"]["schema"]
        assert samples["properties"]["review"]["description"] == "A review, or a list of reviews."
        assert samples["example"].keys() == {"review"}


def test_files_are_read_under_its_own_field_and_an_unregistered_task_is_refused(tuned, tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("the model is fast\n")
    assert list(read(tmp_path / "t.txt", tuned.checkpoint.task).samples) == ["the model is fast"]
    (tmp_path / "t.jsonl").write_text('{"text": "the model is fast"}\n')
    with pytest.raises(DataError, match=re.escape("there is no 'review'")):
        read(tmp_path / "t.jsonl", tuned.checkpoint.task)


def test_the_example_of_the_docs_is_a_whole_task_on_one_page():
    text = (Path(registry.__file__).parents[1] / "docs" / "extend.md").read_text(encoding="utf-8")
    code = re.search(r"^## A task\n.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)[1]
    scope = {}
    exec(code, scope)
    assert len(code.splitlines()) < 60
    assert not inspect.isabstract(scope["ReviewScore"])


def test_a_checkpoint_of_a_task_that_is_not_registered_is_refused(tuned, monkeypatch):
    monkeypatch.delitem(registry.TASKS, "review-score")
    with pytest.raises(UsageError, match="review-score"):
        Checkpoint.load(tuned.folder, trust=True)
