import copy
from dataclasses import replace

import pytest
import torch
from contexts import torch_context
from models import save_bert

from compress.distill.features import FeatureDistillation
from compress.distill.heal import Heal
from compress.distill.logits import LogitDistillation
from compress.finetune_stage import Finetune
from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.data.reader import make_dataset
from laconic.errors import RecipeError
from laconic.models.source_loading import load_source
from train.step.sparsity_masks import has_property

QUICK = {"batch_size": 8, "steps": 4, "loader": {"workers": 0}}
ROUNDED = {"name": "adamw", "config": {"lr": 2e-3, "stochastic_rounding": True}}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return load_source(save_bert(tmp_path_factory.mktemp("bert")), task="text-classification")


@pytest.fixture
def given(original, tmp_path, tmp_path_factory):
    samples = original.task.examples(24)
    data = make_dataset(samples, original.task, labels=[number % 3 for number in range(24)], name="classes")
    cache = Cache(tmp_path_factory.getbasetemp() / "cache")
    return replace(torch_context(original, tmp_path, dataset=data), cache=cache)


def pruned(original, stage="prune.unstructured"):
    """Half of the weights of each linear layer zero, as a stage that says so would leave them."""
    module = copy.deepcopy(original.module)
    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data[part.weight.abs() < part.weight.abs().median()] = 0.0
    return original.after(Record(stage=stage, config={}, key="pruned"), module)


def zeros(checkpoint):
    named = checkpoint.module.named_parameters()
    return {name: value == 0 for name, value in named if name.endswith(".weight") and value.ndim > 1}


STAGES = {
    "plain": (LogitDistillation, {}),
    "fine-tuning": (Finetune, {}),
    "healing": (Heal, {"eval_every": 1}),
    "checkpoint": (FeatureDistillation, {"techniques": ["gradient-checkpointing"]}),
    "accumulate": (Finetune, {"techniques": [{"gradient-accumulation": {"rows": 3}}]}),
    "in-backward": (LogitDistillation, {"techniques": ["optimizer-in-backward"], "max_grad_norm": None}),
    "8-bit moments": (LogitDistillation, {"optimizer": "adamw-8bit"}),
    "BF16 alone": (LogitDistillation, {"techniques": ["pure-bf16"], "optimizer": ROUNDED}),
    "layers one by one": (LogitDistillation, {"techniques": ["layerwise"]}),
}


@pytest.mark.parametrize("name", STAGES)
def test_zeros_stay_zero_and_the_rest_learns(original, given, name):
    stage, settings = STAGES[name]
    if name == "8-bit moments":
        pytest.importorskip("torchao")
    before = pruned(original)
    found = stage(**{**QUICK, **settings}).apply(before, given)
    after = zeros(found)
    for path, zero in zeros(before).items():
        assert bool(after[path][zero].all()), path
        assert not path.endswith("dense.weight") or float(zero.float().mean()) == pytest.approx(0.5, abs=0.05)
    moved = [
        not torch.equal(found.module.state_dict()[path], value) for path, value in before.module.state_dict().items()
    ]
    assert any(moved)


def test_zeros_that_no_stage_made_or_that_a_stage_may_fill_are_weights_like_others(original, given):
    before = pruned(original, stage="finetune")
    found = LogitDistillation(**QUICK).apply(before, given)
    after = zeros(found)
    assert not all(bool(after[path][zero].all()) for path, zero in zeros(before).items())
    made, other = (Record(stage=name, config={}, key="") for name in ("prune.unstructured", "prune.ffn"))
    assert has_property([made], "zeros")
    assert has_property([made, Record(stage="distill.heal", config={}, key="")], "zeros")
    assert not has_property([made, other], "zeros")
    assert has_property([other, made], "zeros")
    assert not has_property([], "zeros")


@pytest.mark.parametrize("technique", ["lora", "qlora"])
def test_what_adds_to_the_weights_is_refused_in_a_sentence(original, given, technique):
    with pytest.raises(RecipeError, match=rf"{technique} adds to the weights .* zeros that pruning has made"):
        LogitDistillation(**QUICK, techniques=[technique]).apply(pruned(original), given)
