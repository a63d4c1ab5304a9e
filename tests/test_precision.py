"""What precision a run takes by itself: the faster one of the device, with the reason, and recorded."""

import json
import os
import subprocess
import sys

import models
import numpy as np
import pytest
import torch
from contexts import Messages
from torch import nn

from laconic.cache import Cache
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.ready import HOME
from train import precision
from train.finetune.finetune import finetune
from train.parallel.ranks import Ranks
from train.precision import measure_bf16_gain, settle_precision
from train.settings import Training, TrainingRecipe

RANKS = Ranks(device=torch.device("cpu"))
LARGE, SMALL = nn.Linear(1024, 1024, device="meta"), nn.Linear(8, 8)


@pytest.fixture
def steps():
    return Messages()


def cache_with(folder, gain):
    """A cache in which the device was measured to gain so much."""
    cache, compute = Cache(folder), precision.time_layers
    precision.time_layers = lambda device: gain
    try:
        assert measure_bf16_gain(RANKS.device, cache) == gain
    finally:
        precision.time_layers = compute
    return cache


@pytest.mark.parametrize(
    ("gain", "taken", "techniques"), [(2.0, "bf16", ["bf16"]), (1.1, "fp32", []), (0.05, "fp32", [])]
)
def test_auto_takes_bf16_only_where_it_was_measured_to_gain(tmp_path, steps, gain, taken, techniques):
    settled = settle_precision(Training(precision="auto"), LARGE, RANKS, cache_with(tmp_path, gain), steps)
    assert settled.precision == taken
    assert [named.name for named in settled.techniques] == techniques
    (report,) = steps.reports
    assert taken in report
    assert "measured" in report


def test_a_small_model_stays_in_fp32_and_nothing_is_measured(tmp_path, steps):
    assert settle_precision(Training(precision="auto"), SMALL, RANKS, Cache(tmp_path), steps).precision == "fp32"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("technique", ["bf16", "fp16"])
def test_a_technique_that_sets_the_precision_stands(tmp_path, steps, technique):
    given = Training(precision="auto", techniques=[technique])
    settled = settle_precision(given, LARGE, RANKS, cache_with(tmp_path, 2.0), steps)
    assert settled.techniques == given.techniques
    assert settled.precision == ("bf16" if technique == "bf16" else "fp32")


@pytest.mark.parametrize("given", [{"precision": "bf16"}, {"techniques": ["bf16"]}])
def test_bf16_that_is_slower_than_fp32_is_reported_before_the_run(tmp_path, steps, given):
    settled = settle_precision(Training(**given), LARGE, RANKS, cache_with(tmp_path, 0.05), steps)
    assert [named.name for named in settled.techniques] == ["bf16"], "it was asked for"
    (warning,) = steps.warnings
    assert "20.0 times as long" in warning
    assert "precision: auto" in warning


def test_the_precision_bf16_is_the_technique_of_that_name_and_reads_back():
    given = TrainingRecipe(source="m", data={"train": "d.jsonl"}, precision="bf16", techniques=["sdpa"])
    assert [named.name for named in given.techniques] == ["sdpa", "bf16"]
    assert TrainingRecipe.model_validate(given.model_dump()) == given


@pytest.mark.parametrize(("gain", "taken"), [(2.0, "bf16"), (0.05, "fp32")])
def test_what_a_run_took_is_in_the_history_of_its_checkpoint(tmp_path, gain, taken):
    widths = [16, 1024, 1024, 4]
    torch.save(models.Perceptron(widths).state_dict(), tmp_path / "net.pt")
    values = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=values, label=values[:, :4].argmax(axis=1))
    recipe = TrainingRecipe(
        source=str(tmp_path / "net.pt"),
        builder="models:Perceptron",
        arguments={"widths": widths},
        data={"train": tmp_path / "data.npz"},
        steps=1,
        loader={"workers": 0},
    )
    done = finetune(
        recipe, tmp_path / "tuned", trust=True, steps=Messages(), cache=cache_with(tmp_path / "cache", gain)
    )
    config = Checkpoint.load(tmp_path / "tuned", trust=True).history[-1].config
    assert config["precision"] == taken
    assert [each["name"] for each in config["techniques"]] == (["bf16"] if taken == "bf16" else [])
    assert len(done.training.losses) == 1


@pytest.mark.parametrize("path", sorted(HOME.glob("text-*.yaml")), ids=lambda path: path.stem)
def test_no_ready_recipe_says_which_arithmetic_the_processor_has(path):
    recipe = path.read_text(encoding="utf-8")
    assert "bf16" not in recipe
    assert ("precision: auto" in recipe) == ("distill.heal" in recipe)


@pytest.mark.skipif("amx_bf16" not in precision.this_machine().features, reason="a processor with BF16 products")
@pytest.mark.parametrize(("instructions", "gains"), [("ALL", True), ("AVX2", False)])
def test_what_is_measured_follows_the_instructions_of_the_processor(tmp_path, instructions, gains):
    code = (
        "import json, torch; from train.precision import *; "
        "print(json.dumps(measure_bf16_gain(torch.device('cpu'), Cache())))"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions, "LACONIC_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (json.loads(done.stdout) > 1) is gains
    assert len(list(tmp_path.iterdir())) == 1, "it is kept"
