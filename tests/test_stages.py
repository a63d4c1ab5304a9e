"""Every registered stage that changes the module: saved, opened in a program that knows nothing of it, trained on,
compressed again; and in any legal order."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import laconic
from compress.pipeline import compress_checkpoint
from laconic import registry
from laconic.cache import Cache
from laconic.errors import LaconicError, MissingPackage, RecipeError
from laconic.models.signature import call
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.recipes.stage import TorchStage

SHORT = {"steps": 2, "batch_size": 8}
SETTINGS = {
    "distill.embedding": SHORT,
    "distill.features": SHORT,
    "distill.heal": SHORT,
    "distill.layerwise": SHORT,
    "distill.logits": SHORT,
    "distill.relations": SHORT,
    "distill.student": {"layers": 1},
    "factorize.convolution": {"max_error": 1.0, "round_to": 1},
    "factorize.low-rank": {"keep": 0.3, "round_to": 1},
    "finetune": SHORT,
    "prune.channels": {"keep": 0.5, "round_to": 4},
    "prune.ffn": {"round_to": 8},
    "prune.layers": {"keep": 0.5},
    "quantize.qat": {**SHORT, "samples": 8},
}
"""What makes a stage do something to a model of this size; the defaults do it for the others."""
CONVOLUTIONS = ("factorize.convolution", "prune.channels")
EMBEDDINGS = ("distill.embedding",)
ORDERS = 2


def torch_stages():
    found = []
    for name in sorted(registry.STAGES):
        try:
            found += [name] if issubclass(registry.resolve("stage", name), TorchStage) else []
        except MissingPackage:
            continue
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The keys of a recipe about a classifier of texts, an embedder and a convolutional network."""
    folder = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(0)
    rows = [
        {"text": " ".join(rng.choice(models.WORDS, rng.integers(3, 9))), "label": ["no", "maybe", "yes"][number % 3]}
        for number in range(60)
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plain.jsonl").write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in rows))
    np.savez(folder / "images.npz", image=rng.normal(size=(60, 3, 16, 16)).astype(np.float32))
    save_file(models.randomize(models.ResidualNet()).state_dict(), folder / "net.safetensors")
    return {
        "texts": {"source": str(models.save_bert(folder / "bert")), "data": str(folder / "texts.jsonl")},
        "vectors": {"source": str(models.save_embedder(folder / "minilm")), "data": str(folder / "plain.jsonl")},
        "images": {
            "source": str(folder / "net.safetensors"),
            "builder": "models:ResidualNet",
            "task": "image-classification",
            "data": str(folder / "images.npz"),
        },
    }


def source_for(sources, name):
    return sources["images" if name in CONVOLUTIONS else "vectors" if name in EMBEDDINGS else "texts"]


def run(given, stages, path, cache):
    recipe = Recipe.parse({**given, "to": "checkpoint", "heal": False, "stages": stages})
    return compress_checkpoint(recipe, path, trust=True, steps=Steps(quiet=True), cache=Cache(cache))


def answer(module, inputs):
    with torch.inference_mode():
        return [value.numpy() for value in call(module, inputs).values()]


@pytest.mark.parametrize("name", torch_stages())
def test_what_a_stage_makes_is_saved_opened_trained_on_and_compressed_again(name, sources, tmp_path):
    given = source_for(sources, name)
    made = run(given, [{name: SETTINGS.get(name, {})}], tmp_path / "made", tmp_path / "cache")
    entry = made.report["stages"][-1]
    assert entry["stage"] == name == made.checkpoint.history[-1].stage
    assert entry["figures"]["parameters"] > 0
    opened = laconic.load(tmp_path / "made", trust=True)
    assert opened.key == made.checkpoint.key
    inputs = {key: torch.tensor(array) for key, array in opened.task.typical(2, 8).items()}
    for one, two in zip(answer(opened.module, inputs), answer(made.checkpoint.module, inputs), strict=True):
        np.testing.assert_array_equal(one, two)
    onward = {"source": str(tmp_path / "made"), "data": given["data"]}
    again = run(onward, [{"distill.heal": SHORT}, "prune.two-four"], tmp_path / "again", tmp_path / "cache")
    assert [record.stage for record in again.checkpoint.history] == [name, "distill.heal", "prune.two-four"]
    assert laconic.load(tmp_path / "again", trust=True).key == again.checkpoint.key


PROGRAM = """
import sys, numpy, torch, laconic
from laconic.models.signature import call
for folder in sys.argv[1:]:
    opened = laconic.load(f"{folder}/made", trust=True)
    inputs = {key: torch.tensor(value) for key, value in numpy.load(f"{folder}/inputs.npz").items()}
    with torch.inference_mode():
        numpy.save(f"{folder}/answer.npy", next(iter(call(opened.module, inputs).values())).numpy())
"""
SEVERAL = {
    "texts": ["prune.layers", "prune.heads", "prune.ffn", "factorize.low-rank"],
    "images": ["factorize.convolution", "factorize.low-rank", "prune.channels"],
}


def test_a_program_that_starts_anew_gives_the_same_answers_bit_for_bit(sources, tmp_path):
    expected = {}
    for source, names in SEVERAL.items():
        stages = [{name: SETTINGS.get(name, {})} for name in names]
        made = run(sources[source], stages, tmp_path / source / "made", tmp_path / "cache")
        inputs = {key: torch.tensor(array) for key, array in made.checkpoint.task.typical(2, 8).items()}
        np.savez(tmp_path / source / "inputs.npz", **{key: value.numpy() for key, value in inputs.items()})
        expected[tmp_path / source] = answer(made.checkpoint.module, inputs)[0]
    environment = os.environ | {"PYTHONPATH": str(Path(models.__file__).parent)}
    home = Path(laconic.__file__).parents[1]
    subprocess.run([sys.executable, "-c", PROGRAM, *expected], check=True, cwd=home, env=environment)
    for folder, array in expected.items():
        np.testing.assert_array_equal(np.load(folder / "answer.npy"), array)


def refusal(recipe):
    """The message with which a recipe is refused; empty for a legal one."""
    try:
        Recipe.parse(recipe)
    except RecipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("number", range(ORDERS))
def test_any_order_of_stages_is_refused_before_it_runs_or_runs(number, sources, tmp_path):
    drawn = random.Random(number)
    names = [name for name in torch_stages() if name not in CONVOLUTIONS + EMBEDDINGS]
    for _ in range(100):  # every seed runs a legal order, and checks the refusals of the illegal ones before it
        order = drawn.sample(names, 3)
        stages = [{name: SETTINGS.get(name, {})} for name in order]
        message = refusal({**sources["texts"], "to": "checkpoint", "heal": False, "stages": stages})
        if not message:
            break
        assert re.search(r"stages\[[12]\]", message), "the first stage of an order can always run"
        assert sum(name in message for name in order) >= 2, "both stages are named"
        assert "Move" in message
    try:
        made = run(sources["texts"], stages, tmp_path / "made", tmp_path / "cache")
    except LaconicError as error:
        pytest.fail(f"{order}: {error}")
    assert [record.stage for record in made.checkpoint.history] == order
    assert laconic.load(tmp_path / "made", trust=True).key == made.checkpoint.key
