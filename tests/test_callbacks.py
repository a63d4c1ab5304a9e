"""Callbacks of fine-tuning: told of steps and evaluations; Weights & Biases and MLflow where they are installed."""

import importlib.util
import json
import sys

import models
import pytest

from laconic.tasks.text import WORDS

OWN = """
import json
import sys
from pathlib import Path
from train.callbacks.callback import Callback, RunLog

class Lines(RunLog):
    def __init__(self, path):
        self.file = path.open("a")

    def step(self, report):
        self.file.write(json.dumps(["step", report.step]) + "\\n")

    def evaluated(self, step, figures):
        self.file.write(json.dumps(["evaluated", step, sorted(figures)]) + "\\n")

    def close(self):
        self.file.close()

class Own(Callback):
    path: Path

    def open(self, run):
        assert run.config["steps"] == 4 and run.folder.is_dir() and run.key
        return Lines(self.path)
"""


@pytest.fixture
def tune(laconic, tmp_path):
    models.save_gpt2(tmp_path / "gpt2")
    (tmp_path / "texts.txt").write_text("\n".join(f"hello {word} a" for word in WORDS))

    def run(*more):
        return laconic("finetune", tmp_path / "gpt2", "--data", tmp_path / "texts.txt", "--steps", "4", "--batch", "4",
                       "--set", "eval_every=2", "-o", tmp_path / "out", *more)  # fmt: skip

    return run


def test_a_callback_of_ones_own_is_told_of_steps_and_evaluations_with_trust(tune, tmp_path, monkeypatch):
    (tmp_path / "own_callback.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = f"callbacks=[{{'own_callback:Own': {{path: {tmp_path / 'told.jsonl'}}}}}]"
    code, _, err = tune("--set", own)
    assert (code, "--trust" in err) == (2, True)
    code, _, err = tune("--set", own, "--trust")
    assert code == 0, err
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert [each[:2] for each in told] == [["evaluated", 0], ["step", 1], ["step", 2], ["evaluated", 2], ["step", 3],
                                           ["step", 4], ["evaluated", 4]]  # fmt: skip
    assert told[0][2] == ["loss", "perplexity"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named_and_nothing_is_left(tune, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    code, _, err = tune("--set", f"callbacks=[{name}]")
    assert code == 2
    assert f"package '{name}' is required and not installed. Try: pip install {name}" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed")
def test_weights_and_biases_logs_offline_into_the_folder_of_the_run(tune, tmp_path):
    code, _, err = tune("--set", "callbacks=[wandb]")
    assert code == 0, err
    assert list((tmp_path / "out" / "training" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="mlflow is not installed")
def test_mlflow_logs_into_the_store_that_it_is_given(tune, tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'store.db'}"
    code, _, err = tune("--set", f"callbacks=[{{mlflow: {{uri: '{uri}', experiment: chats}}}}]")
    assert code == 0, err
    code, _, err = tune("--set", "callbacks=[{mlflow: {uri: 'nowhere://x'}}]", "--seed", "1")
    assert (code, "laconic: mlflow refuses nowhere://x" in err) == (2, True)
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("chats").experiment_id])
    assert run.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2, 3, 4]
    assert [point.step for point in client.get_metric_history(run.info.run_id, "eval/perplexity")] == [0, 2, 4]
    assert run.data.params["steps"] == "4"
