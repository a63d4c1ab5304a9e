"""Evaluation during fine-tuning: in one pass, at intervals, with the best weights kept and early stopping."""

import importlib

import digits
import models
import numpy as np
import pytest
import torch
from torch import nn

from laconic.data.reader import make_dataset
from laconic.errors import RecipeError
from laconic.models.checkpoint import Checkpoint
from laconic.models.processors import plain_task
from laconic.progress import Steps
from laconic.tasks.text import WORDS
from laconic.tensor import TensorSpec
from train.callbacks import run_estimate
from train.callbacks.journal import read_lines
from train.finetune.evaluate import evaluate
from train.finetune.evaluator import LOG, Evaluator
from train.finetune.finetune import finetune
from train.objectives.array_targets import Targets
from train.settings import TrainingRecipe


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    images, labels = digits.samples()
    np.savez(folder / "digits.npz", image=images[:300], label=labels[:300])
    torch.manual_seed(0)
    torch.save(digits.DigitsNet().state_dict(), folder / "net.pt")
    return folder


def recipe(home, **changes) -> TrainingRecipe:
    """Training that gets worse after some steps: the rate is too high, and does not fall."""
    given = {
        "source": str(home / "net.pt"), "builder": "digits:DigitsNet", "data": str(home / "digits.npz"),
        "batch_size": 32, "steps": 16, "eval_every": 2, "snapshot_every": 3, "loader": {"workers": 0},
        "optimizer": {"sgd": {"lr": 0.5}}, "schedule": "constant", "max_grad_norm": None, "precision": "fp32",
    }  # fmt: skip
    return TrainingRecipe.model_validate(given | changes)


def tune(home, output, **changes):
    return finetune(recipe(home, **changes), output, trust=True, steps=Steps(quiet=True))


def evaluations(output):
    return {line["step"]: line for line in read_lines(output / "training" / LOG)}


def test_loss_and_metric_come_from_one_pass_over_the_samples():
    task = plain_task("tensors", (TensorSpec(name="x", dtype="float32", shape=("batch", 4)),), "x")
    values = np.random.default_rng(0).normal(size=(70, 4)).astype(np.float32)
    labels = values[:, :3].argmax(axis=1)
    data = make_dataset(list(values), task, labels=labels.tolist(), name="x")
    module = nn.Linear(4, 3).train()
    seen = []
    module.register_forward_hook(lambda called, arguments, answer: seen.append((len(answer), called.training)))
    found = evaluate(module, Targets(task), data, torch.device("cpu"))
    assert sorted(seen) == [(6, False), (32, False), (32, False)]
    assert module.training
    with torch.no_grad():
        logits = module(torch.from_numpy(values))
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(labels))
    metric = {task.metric: float((logits.argmax(dim=1).numpy() == labels).mean())}
    assert found == pytest.approx({"loss": float(loss)} | metric)


def test_the_model_is_evaluated_every_so_many_steps_and_the_log_says_how(home, tmp_path):
    found = tune(home, tmp_path / "tuned", steps=7)
    logged = evaluations(tmp_path / "tuned")
    assert list(logged) == [0, 2, 4, 6]
    assert logged[0]["loss"] == found.before["loss"]


@pytest.mark.parametrize("figure", ["loss", "accuracy, or R2"])
def test_the_result_has_the_weights_of_the_best_evaluation(home, tmp_path, figure):
    found = tune(home, tmp_path / "tuned", best_by=figure)
    logged = evaluations(tmp_path / "tuned")
    values = [line[figure] for step, line in logged.items() if step]
    assert list(logged)[-1] == 16
    best = min(values) if figure == "loss" else max(values)
    assert values[-1] != best
    assert found.after[figure] == pytest.approx(best)
    record = Checkpoint.load(tmp_path / "tuned", trust=True).history[-1]
    assert logged[int(record.figures["best step"])][figure] == best
    assert sorted(path.name for path in (tmp_path / "tuned" / "training").iterdir()) == [LOG, "train.jsonl"]


def test_a_run_ends_when_the_figure_has_not_improved_for_a_while(home, tmp_path):
    found = tune(home, tmp_path / "tuned", patience=1)
    losses = [line["loss"] for step, line in evaluations(tmp_path / "tuned").items() if step]
    assert len(found.training.losses) == 2 * len(losses) < 16
    assert losses[-1] > min(losses) == pytest.approx(found.after["loss"])


def interrupt(home, output, monkeypatch, **changes):
    """Start a run that ends with its evaluation after step 8, with snapshots."""
    plain = Evaluator._evaluate

    def killed(self, state, dataset):
        if self._figures.keys() >= {0, 2, 4, 6}:
            raise Killed
        return plain(self, state, dataset)

    with monkeypatch.context() as change:
        change.setattr(Evaluator, "_evaluate", killed)
        with pytest.raises(Killed):
            tune(home, output, **changes)


@pytest.mark.parametrize("best_by", [None, "loss"])
def test_a_resumed_run_is_judged_by_its_own_validation_set_alone(home, tmp_path, monkeypatch, capsys, best_by):
    images, labels = digits.samples()
    files = {"train": str(home / "digits.npz"), "evaluate": str(tmp_path / "valid.npz")}
    np.savez(files["evaluate"], image=images[300:340], label=labels[300:340])
    interrupt(home, tmp_path / "tuned", monkeypatch, data=files, best_by=best_by)
    np.savez(files["evaluate"], image=images[340:380], label=(labels[340:380] + 1) % 10)
    result = finetune(recipe(home, data=files, best_by=best_by), tmp_path / "tuned", trust=True, steps=Steps())
    whole = tune(home, tmp_path / "whole", data=files, best_by=best_by)
    assert (result.before, result.after) == (whole.before, whole.after)
    lines = evaluations(tmp_path / "tuned")
    assert lines.items() <= evaluations(tmp_path / "whole").items()
    assert (4 in lines) == (best_by is not None)
    said = "evaluated anew" if best_by is None else "training starts from the beginning"
    assert said in capsys.readouterr().err


NORMALIZED = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    def forward(self, x):
        return super().forward(x)
"""


def test_a_module_of_ones_own_needs_no_inputs_and_batch_norm_never_meets_one_row(tmp_path, monkeypatch):
    (tmp_path / "normalized.py").write_text(NORMALIZED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.save(importlib.import_module("normalized").Net().state_dict(), tmp_path / "net.pt")
    for name, rows in (("train", 33), ("valid", 40)):
        x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, label=(x[:, 0] > 0).astype(np.int64))
    given = {"builder": "normalized:Net", "data": {"train": "train.npz", "evaluate": "valid.npz"}, "steps": None}
    given |= {"source": "net.pt", "epochs": 1, "batch_size": 16, "eval_every": None}
    assert len(tune(tmp_path, tmp_path / "tuned", **given).training.losses) == 3
    with pytest.raises(RecipeError, match="batch normalization cannot train on one row alone"):
        tune(tmp_path, tmp_path / "single", **given | {"batch_size": 1})


class Reports(Steps):
    """What a run reports, by title."""

    def __init__(self):
        super().__init__(quiet=True)
        self.found = {}

    def report(self, title, note):
        self.found[title] = note


@pytest.mark.parametrize("kill", [False, True])
def test_the_time_of_the_run_is_told_after_its_first_steps_also_when_it_is_resumed(home, tmp_path, monkeypatch, kill):
    monkeypatch.setattr(run_estimate, "ENOUGH", 0.0)
    if kill:
        interrupt(home, tmp_path / "tuned", monkeypatch)
    reports = Reports()
    finetune(recipe(home), tmp_path / "tuned", trust=True, steps=reports)
    assert f"{6 if kill else 12} steps of" in reports.found["estimated time"]


class Killed(Exception):
    """The process ends here."""


@pytest.mark.parametrize("kill", [4, 10, 14])
@pytest.mark.parametrize("patience", [None, 2])
def test_a_killed_run_ends_with_the_same_best_weights_and_evaluates_no_step_twice(
    home, tmp_path, monkeypatch, kill, patience
):
    whole = tune(home, tmp_path / "whole", best_by="loss", patience=patience)
    plain, asked = Evaluator._evaluate, []

    def killed(self, state, dataset):
        asked.append(len(asked))
        if len(asked) == kill // 2 + 1:
            raise Killed
        return plain(self, state, dataset)

    monkeypatch.setattr(Evaluator, "_evaluate", killed)
    try:
        tune(home, tmp_path / "part", best_by="loss", patience=patience)
    except Killed:
        part = tune(home, tmp_path / "part", best_by="loss", patience=patience)
        assert len(asked) <= len(evaluations(tmp_path / "whole")) + 2
        assert part.after == whole.after
        assert part.training.losses == whole.training.losses
    assert evaluations(tmp_path / "part") == evaluations(tmp_path / "whole")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part"))
    assert one == other


def test_a_figure_that_is_not_evaluated_is_refused_with_those_that_are(home, tmp_path):
    with pytest.raises(RecipeError, match=r"best_by: 'los' is not evaluated. Did you mean 'loss'\?"):
        tune(home, tmp_path / "tuned", best_by="los")
    assert list(tmp_path.iterdir()) == []


ELSEWHERE = {
    "adapters": {"techniques": ["lora"], "optimizer": {"sgd": {"lr": 300.0}}, "eval_every": 1, "steps": 3},
    "weights on the host": {
        "techniques": [{"layerwise": {"snapshots_on": "host"}}, {"host-weights": {"dtype": "bf16"}}],
        "optimizer": {"sgd": {"lr": 30.0}},
        "eval_every": 1,
        "steps": 3,
    },
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_the_best_weights_are_kept_with_techniques_that_hold_them_elsewhere(tmp_path, case):
    pytest.importorskip("peft")
    models.save_gpt2(tmp_path / "gpt2")
    (tmp_path / "texts.txt").write_text("\n".join(f"hello {word} a b a b" for word in WORDS))
    given = {
        "source": str(tmp_path / "gpt2"), "builder": None, "data": str(tmp_path / "texts.txt"), "batch_size": 4,
        "best_by": "loss", **ELSEWHERE[case],
    }  # fmt: skip
    found = tune(tmp_path, tmp_path / "tuned", **given)
    losses = [line["loss"] for step, line in evaluations(tmp_path / "tuned").items() if step]
    assert losses[-1] > min(losses)
    assert found.after["loss"] == pytest.approx(min(losses), abs=1e-6)
