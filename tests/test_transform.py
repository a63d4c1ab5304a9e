"""The stages that change the module: kept by what they depend upon, gone on with after a kill, counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import digits
import killed_runs
import numpy as np
import pytest
import torch
from killed_runs import LOG

import laconic
from compress.pipeline import compress, compress_checkpoint, find_broken
from laconic import registry
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.inspection import read_report
from laconic.artifacts.ledger import JSON, make_ledger
from laconic.artifacts.manifest import REPORT
from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.errors import ArtifactError, RecipeError, SourceError, UsageError
from laconic.models.footprint import measure_footprint
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.recipes.stage import find_intact_records

MOMENTS = (
    "load the source and the samples",
    "perturb 0.05",
    "after killed_runs:Perturb",
    "snapshot",
    "perturb 0.02",
    "compare with the original",
)


@pytest.fixture(autouse=True)
def log(monkeypatch, tmp_path):
    monkeypatch.setenv(LOG, str(tmp_path / "log"))


@pytest.fixture
def source(tmp_path):
    killed_runs.prepare(tmp_path)
    return tmp_path


def kept(folder):
    """What must be the same from run to run."""
    return {name: (folder / name).read_bytes() for name in ("model.json", "model.safetensors")}


def lines(folder):
    return (folder / "log").read_text().splitlines()


def test_a_run_killed_at_any_moment_goes_on_and_ends_in_the_same_bytes(source):
    done = subprocess.run(
        [sys.executable, killed_runs.__file__, str(source), *MOMENTS],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.stdout.splitlines() == [f"{moment} 9" for moment in MOMENTS], done.stderr
    assert not (source / "out").exists()
    snapshots = list((source / "out-cache").glob("work-*"))
    killed_runs.run(source)
    # Once for the kill within it, once to its end; after that it is only looked up.
    assert lines(source) == ["begin 0.05", "begin 0.05", "end 0.05", "begin 0.02", "begin 0.02", "end 0.02"]
    assert snapshots == [], "nothing is left of the training that was done"
    killed_runs.run(source, "undisturbed")
    assert kept(source / "out") == kept(source / "undisturbed")


def test_a_second_run_computes_nothing(source):
    killed_runs.run(source)
    before = lines(source)
    again = compress_checkpoint(
        killed_runs.recipe(source),
        source / "again",
        trust=True,
        steps=Steps(quiet=True),
        cache=Cache(source / "out-cache"),
    )
    assert lines(source) == before
    assert kept(again.path) == kept(source / "out")
    assert [stage["seconds"] for stage in again.report["stages"]] == [
        stage["seconds"] for stage in json.loads((source / "out" / JSON).read_text())["stages"]
    ]


def perturbations(source, *sizes, **changes):
    """The figures of the last stage, after perturbations of these sizes, over one cache."""
    stages = [{"killed_runs:Perturb": {"size": size}} for size in sizes]
    given = killed_runs.recipe(source, stages=stages, **changes)
    return compress_checkpoint(
        given, source / "made", trust=True, steps=Steps(quiet=True), cache=Cache(source / "cache")
    )


def test_the_same_settings_in_another_order_or_with_other_data_are_another_result(source):
    first = perturbations(source, 0.05, 0.02).checkpoint
    assert perturbations(source, 0.02, 0.05).checkpoint.key != first.key
    assert len(lines(source)) == 8, "four perturbations, none of them shared"
    assert perturbations(source, 0.05, 0.02).checkpoint.key == first.key
    assert perturbations(source, 0.05, 0.02, seed=1).checkpoint.key != first.key
    assert len(lines(source)) == 12
    np.savez(source / "data.npz", x=np.random.default_rng(1).normal(size=(80, 6)).astype(np.float32))
    assert perturbations(source, 0.05, 0.02).checkpoint.key != first.key
    assert len(lines(source)) == 16


def test_stages_of_the_same_settings_never_share_a_result(source, monkeypatch):
    monkeypatch.setattr(
        killed_runs,
        "Other",
        type("Other", (killed_runs.Perturb,), {"__module__": "killed_runs"}),
        raising=False,
    )
    names = ("killed_runs:Perturb", "killed_runs:Other")
    for name in names:
        compress_checkpoint(
            killed_runs.recipe(source, stages=[{name: {"size": 0.05}}]),
            source / "made",
            trust=True,
            steps=Steps(quiet=True),
            cache=Cache(source / "cache"),
        )
    assert lines(source).count("begin 0.05") == 2


def test_what_each_stage_gained_and_cost_is_counted_with_its_zeros(source):
    made = perturbations(source, 0.05, 0.02)
    start, first, second = made.report["stages"]
    assert start["stage"] == "source"
    assert start["figures"] == {"parameters": 83, "bytes": 332, "multiply-adds": 72}
    assert first["left"] == {"parameters": 1, "bytes": 1, "multiply-adds": 1}
    assert 0 < second["figures"]["fidelity"] < first["figures"]["fidelity"] < 1
    assert first["seconds"] > 0
    assert made.report["drift"]["figures"]["fidelity"] < 1
    page = (made.path / REPORT).read_text()
    assert "killed_runs:Perturb" in page
    assert page.count("<svg") == 2
    assert str(source) not in page + (made.path / JSON).read_text()
    checkpoint = laconic.load(perturbations(source, 0.05).path, trust=True)
    with torch.no_grad():
        next(checkpoint.module.parameters())[:4] = 0
    found = measure_footprint(checkpoint)
    assert found.zeros == pytest.approx(24 / 83)
    assert found.figures()["zeros"] == 0.2892
    assert found.multiply_adds == 6 * 8 + 8 * 3


def test_a_checkpoint_is_opened_and_looked_at_and_compressed_again(source):
    made = perturbations(source, 0.05)
    with pytest.raises(SourceError, match="--trust"):
        laconic.load(made.path)
    opened = laconic.load(made.path, trust=True)
    assert opened.key == made.checkpoint.key
    given = killed_runs.recipe(
        source, source=str(made.path), builder=None, arguments={}, stages=[{"killed_runs:Perturb": {"size": 0.02}}]
    )
    again = compress_checkpoint(
        given, source / "again", trust=True, steps=Steps(quiet=True), cache=Cache(source / "cache")
    )
    assert [record.stage for record in again.checkpoint.history] == [
        "killed_runs:Perturb",
        "killed_runs:Perturb",
    ]
    assert [stage["stage"] for stage in again.report["stages"]] == ["source", "killed_runs:Perturb"]
    made = perturbations(source, 0.05)
    assert read_report(made.path) == made.report
    (made.path / "report.json").write_text('{"task": "tensors", "drift": 3}')
    with pytest.raises(ArtifactError, match="Compress the model again"):
        read_report(made.path)
    (made.path / "report.json").unlink()
    assert read_report(made.path) is None


def test_a_goal_that_a_checkpoint_misses_is_said(source):
    made = perturbations(source, 0.05, goal={"fidelity": 0.9999, "max_size": "100 B"})
    assert ["fidelity is" in made.missed[0], "size is" in made.missed[1]] == [True, True]
    with pytest.raises(RecipeError, match="max_latency is for artifacts"):
        killed_runs.recipe(source, goal={"max_latency": "1 ms"})


def test_what_is_in_the_way_is_left_alone(source):
    (source / "made").mkdir()
    (source / "made" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="will not be overwritten"):
        perturbations(source, 0.05)
    assert not (source / "log").exists(), "nothing ran"


def test_after_finetuning_its_model_is_the_original(tmp_path):
    weights, data = digits.write(tmp_path)
    given = Recipe.parse(
        {
            "source": str(weights),
            "builder": "digits:DigitsNet",
            "task": "image-classification",
            "data": str(data),
            "stages": [{"finetune": {"steps": 30, "batch_size": 32, "optimizer": {"sgd": {"lr": 0.5}}}}],
            "runtimes": ["onnxruntime"],
        }
    )
    cache, steps = Cache(tmp_path / "cache"), Steps(quiet=True)
    artifact = compress(given, tmp_path / "made.laconic", cache=cache, steps=steps).artifact
    (drift,) = artifact.manifest.verdict.drift
    assert drift.against == "model after finetune"
    assert artifact.manifest.verdict.failures == []
    start, tuned = make_ledger(artifact.manifest.source, artifact.manifest.history, artifact.measured.seconds)
    assert tuned.figures["fidelity"] < 1, "before, the answers are still held to those of the source"
    assert tuned.seconds > 0
    assert start.figures["parameters"] == tuned.figures["parameters"]
    assert Artifact.load(artifact.path).measured.original_size == weights.stat().st_size


def record(stage):
    return Record(stage=stage, config={}, key=stage)


def test_what_a_later_stage_has_broken_does_not_stand():
    history = [record("quantize.qat"), record("prune.heads"), record("prune.two-four"), record("distill.heal")]
    assert [each.stage for each in find_intact_records(history)] == ["prune.heads", "prune.two-four", "distill.heal"]
    cut = registry.resolve("stage", "factorize.low-rank")()
    history = [record("killed_runs:Perturb"), record("prune.two-four")]
    with registry.trust_addresses(True):
        assert [(each.stage, what) for each, what in find_broken(cut, history)] == [("prune.two-four", "zeros")]
