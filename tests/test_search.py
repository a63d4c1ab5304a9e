"""A search for real: a small network, every step, nothing replaced."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import digits
import numpy as np
import pytest
import torch
from contexts import Interrupted
from safetensors.torch import save_file

from compress.search import layer_timing, strategy
from compress.search.evaluation import OUTCOME, open_context, run_trial
from compress.search.executor import open_executor
from compress.search.search import search
from compress.search.search_space import apply_settings
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.manifest import MEASURED, REPORT
from laconic.cache import Cache
from laconic.errors import DataError, UsageError
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe

STAGES = [{"quantize.static": {"mixed_precision": False, "smoothquant": False}}]
TRIALS = 2
WIDTH = 32
MOST = 36_000
"""Bytes: less than the network takes in INT8, more than half of it does."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little healing, and few runs of each layer that is timed."""
    monkeypatch.setattr(layer_timing, "RUNS", 3)
    monkeypatch.setattr(strategy, "HEALING_STEPS", (5,))
    monkeypatch.setattr(strategy, "ROUNDS", 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights, which need to have learned nothing to be cut; and samples, with labels that nothing was learned of."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    weights, data = folder / "digits.safetensors", folder / "digits.npz"
    save_file(digits.DigitsNet(WIDTH).eval().state_dict(), weights)
    images, labels = digits.samples()
    np.savez(data, image=images[:200], label=labels[:200])
    return weights, data


def recipe(trained, **goal):
    weights, data = trained
    return Recipe.parse(
        {
            "source": str(weights),
            "builder": "digits:DigitsNet",
            "arguments": {"width": WIDTH},
            "task": "image-classification",
            "data": {"calibrate": str(data), "limit": 120},
            "stages": STAGES,
            "runtimes": ["onnxruntime"],
            "goal": goal or {"max_size": MOST, "fidelity": 0.3, "max_drop": 1},
        }
    )


def run(trained, path, cache, steps=None, **goal):
    return search(
        recipe(trained, **goal), path, budget=1e6, trials=TRIALS, cache=cache, steps=steps or Steps(quiet=True)
    )


def content(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name not in (MEASURED, REPORT)}


def test_a_search_meets_a_goal_tells_what_it_tried_and_ends_in_the_same_bytes_after_a_kill(trained, tmp_path):
    cache = Cache(tmp_path / "cache")
    path = tmp_path / "found.laconic"
    with pytest.raises(KeyboardInterrupt):
        run(trained, path, cache, Interrupted("build: channels"))
    early = Artifact.load(path).manifest.verdict  # from the first artifact on there is always one
    assert early.drift[0].against == "original, on samples that the search chooses by"
    found = run(trained, path, cache)
    assert found.artifact.manifest.verdict.drift[0].against == "original"
    assert found.missed == ()
    assert found.artifact.size <= MOST
    assert "prune.channels" in [record.stage for record in found.artifact.manifest.history]
    trials = found.artifact.measured.search
    assert any(trial.front for trial in trials)
    assert all(trial.reason for trial in trials)
    assert "Trials of the search" in (path / REPORT).read_text(encoding="utf-8")
    before = {file: file.stat().st_mtime_ns for file in cache.folder.rglob("*.safetensors")}
    again = run(trained, tmp_path / "again.laconic", cache)
    assert content(again.artifact.path) == content(path)
    assert again.artifact.measured.search == trials
    assert again.spent == found.spent
    assert {file: file.stat().st_mtime_ns for file in cache.folder.rglob("*.safetensors")} == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again.laconic", "cache", "found.laconic"]
    small = run(trained, tmp_path / "small.laconic", cache, max_size="1 kB")
    assert any("the goal is 1.0 kB" in each for each in small.missed), "and the best is kept"
    assert Artifact.load(tmp_path / "small.laconic").manifest.verdict.failures == []


def test_what_lies_at_the_destination_is_left_alone_and_a_drop_needs_labels(trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not be overwritten"):
        run(trained, tmp_path / "file", Cache(tmp_path / "cache"))
    np.savez(tmp_path / "bare.npz", image=digits.samples()[0][1000:1100])
    with pytest.raises(DataError, match="labels"):
        run((trained[0], tmp_path / "bare.npz"), tmp_path / "x.laconic", Cache(tmp_path / "cache"), max_drop="1%")


CLUSTER = """
import json, sys
from functools import partial
from pathlib import Path
from compress.search.evaluation import OUTCOME, open_context, run_trial
from compress.search.executor import open_executor
from laconic.recipes.recipe import Recipe
recipes = [Recipe.model_validate(content) for content in json.load(sys.stdin)]
reopen = partial(open_context, recipes[0], False, Path(sys.argv[1]), 1)
with open_executor("ray", 1, None, reopen) as cluster:
    assert cluster.workers == 1
    print(json.dumps([OUTCOME.dump_python(outcome, mode="json") for outcome in cluster.map(run_trial, recipes)]))
"""


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_cluster_finds_what_one_process_finds(trained, tmp_path):
    settings = ({"channels": 0.5}, {"channels": 0.5, "rank": 0.5})
    recipes = [apply_settings(recipe(trained), each, (5,)) for each in settings]
    context = open_context(recipes[0], False, tmp_path / "one", 1)
    with open_executor("local", 1, context, lambda: context) as here:
        alone = [OUTCOME.dump_python(outcome, mode="json") for outcome in here.map(run_trial, recipes)]
    # In a process of its own: Ray leaves daemons behind for a moment.
    spread = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(tmp_path / "other")],
        input=json.dumps([each.model_dump(mode="json") for each in recipes]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(spread.stdout.splitlines()[-1]) == alone
