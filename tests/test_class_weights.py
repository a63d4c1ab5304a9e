"""Class weights and label smoothing of classifiers, against torch's own loss."""

import json

import models
import pytest
import torch
from torch.nn.functional import cross_entropy

from laconic.data.reader import make_dataset
from laconic.errors import RecipeError
from laconic.models.source_loading import load_source
from laconic.tasks.text import WORDS
from train.finetune.class_weights import compute_class_weights
from train.objectives.cross_entropy import CrossEntropy
from train.step.objective import TARGETS

LABELS = ["no", "no", "no", "yes", "maybe", "no"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_source(models.save_bert(tmp_path_factory.mktemp("source") / "bert"))


@pytest.fixture(scope="module")
def data(checkpoint):
    return make_dataset(WORDS[: len(LABELS)], checkpoint.task, labels=LABELS, name="x")


def test_balanced_weights_give_each_class_the_same_share_and_the_loss_is_that_of_torch(checkpoint, data):
    weights = compute_class_weights("balanced", checkpoint.task, data)
    assert weights == pytest.approx([0.5, 2.0, 2.0])
    assert compute_class_weights({"yes": 3}, checkpoint.task, data) == pytest.approx([0.75, 0.75, 2.25])
    assert compute_class_weights(None, checkpoint.task, data) is None
    with pytest.raises(RecipeError, match="'perhaps' is none of the classes: no, maybe, yes"):
        compute_class_weights({"perhaps": 3}, checkpoint.task, data)
    objective = CrossEntropy(checkpoint.task)
    batch = objective.collate(list(data.samples), data.labels)
    plain = float(objective.loss(checkpoint.module, batch))
    objective.set_class_weights([0.5, 2.0, 1.0], 0.1)
    logits = checkpoint.module(**{name: value for name, value in batch.items() if name != TARGETS})
    wanted = cross_entropy(logits, batch[TARGETS], torch.tensor([0.5, 2.0, 1.0]), reduction="sum", label_smoothing=0.1)
    assert float(objective.loss(checkpoint.module, batch)) == pytest.approx(float(wanted)) != plain
    assert objective.count_terms(batch) == len(LABELS)


def test_they_are_given_in_the_recipe_and_refused_for_other_tasks(laconic, tmp_path):
    models.save_bert(tmp_path / "bert")
    models.save_gpt2(tmp_path / "gpt2")
    rows = [{"text": word, "label": "up" if number % 4 else "down"} for number, word in enumerate(WORDS)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "d.txt").write_text("\n".join(f"{word} a" for word in WORDS))
    given = ("--steps", "1", "-o", tmp_path / "out", "--set", "label_smoothing=0.1")
    code, out, err = laconic("finetune", tmp_path / "bert", "--data", tmp_path / "d.jsonl", *given, "--json",
                             "--set", "class_weights={up: 2, down: 6}")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["after"]["loss"] > 0
    code, _, err = laconic("finetune", tmp_path / "gpt2", "--data", tmp_path / "d.txt", *given)
    assert code == 2
    assert "for classifiers of one class per sample, and this model is for text-generation" in err
