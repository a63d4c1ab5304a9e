from dataclasses import replace

import pytest
import torch
from contexts import torch_context
from models import ResidualNet, save_bert, save_distilbert, save_embedder, save_gpt2, save_llama, save_vit
from pydantic import ValidationError

from compress.distill.features import FeatureDistillation
from compress.distill.layer_distillation import LayerwiseDistillation
from compress.distill.relations import RelationDistillation
from compress.distill.student import Student, copy_weights, largest_units, space_evenly
from laconic.cache import Cache
from laconic.errors import RecipeError, SourceError, UsageError
from laconic.models.anatomy import anatomy
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import probe_module
from laconic.models.source_loading import load_source
from laconic.tasks.tensors import Tensors

QUICK = {"batch_size": 8, "steps": 8, "loader": {"workers": 0}, "optimizer": {"name": "adamw", "config": {"lr": 2e-3}}}
MAKERS = {
    "mini": (save_embedder, None),
    "bert": (save_bert, "text-classification"),
    "distilbert": (save_distilbert, "text-classification"),
    "gpt2": (save_gpt2, "text-generation"),
    "llama": (save_llama, "text-generation"),
    "vit": (save_vit, None),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    found = {}
    for name, (make, task) in MAKERS.items():
        (home / name).mkdir()
        found[name] = load_source(make(home / name), task=task)
    return found


@pytest.fixture
def context(tmp_path_factory, tmp_path):
    def make(checkpoint, name="run"):
        return replace(
            torch_context(checkpoint, tmp_path / name), cache=Cache(tmp_path_factory.getbasetemp() / "cache")
        )

    return make


STUDENTS = {
    "one layer of MiniLM": ("mini", {"layers": 1}, 1),
    "the last layer of a classifier": ("bert", {"layers": [1]}, 1),
    "half of DistilBERT": ("distilbert", {}, 1),
    "one layer of GPT-2": ("gpt2", {"config": {"n_layer": 1, "n_inner": 64}}, 1),
    "one layer of Llama": ("llama", {"layers": [0]}, 1),
    "a narrower MiniLM": ("mini", {"config": {"intermediate_size": 32}}, 2),
    "a narrower DistilBERT": ("distilbert", {"config": {"dim": 16, "hidden_dim": 32}}, 2),
    "a narrower Llama": ("llama", {"config": {"intermediate_size": 40, "num_hidden_layers": 1}}, 1),
    "a smaller ViT": ("vit", {"config": {"hidden_size": 16, "num_hidden_layers": 1}}, 1),
}


@pytest.mark.parametrize("name", STUDENTS)
def test_a_student_is_smaller_answers_alike_in_kind_and_opens_again(originals, context, tmp_path, name):
    source, settings, layers = STUDENTS[name]
    original = originals[source]
    before = original.key
    found = Student(**settings).apply(original, context(original))
    record = found.history[-1]
    assert record.stage == "distill.student"
    assert record.figures["parameters"] < record.figures["parameters before"]
    assert len(anatomy(found.module).sites) == layers
    assert found.outputs == original.outputs
    assert original.key == before
    found.save(tmp_path / "student")
    opened = Checkpoint.load(tmp_path / "student")
    assert opened.key == found.key
    assert all(torch.equal(value, found.module.state_dict()[key]) for key, value in opened.module.state_dict().items())


@pytest.mark.parametrize("stage", [FeatureDistillation, RelationDistillation, LayerwiseDistillation])
def test_fewer_layers_learn_from_those_they_stand_for(originals, context, stage):
    original = originals["mini"]
    student = Student(layers=[0]).apply(original, context(original, "student"))
    found = stage(**QUICK).apply(student, context(original))
    assert found.history[-1].figures["last loss"] > 0


def test_another_width_is_learned_through_a_projection_that_is_not_kept(originals, context):
    original = originals["vit"]
    student = Student(config={"hidden_size": 16}).apply(original, context(original, "student"))
    found = FeatureDistillation(**QUICK).apply(student, context(original))
    assert set(found.module.state_dict()) == set(student.module.state_dict())
    with pytest.raises(UsageError, match="Leave project out, so that a projection between them is trained"):
        FeatureDistillation(project=False, **QUICK).apply(student, context(original, "again"))
    with pytest.raises(UsageError, match=r"does not take the input of .* Use\s+distill.features"):
        LayerwiseDistillation(**QUICK).apply(student, context(original, "layerwise"))


def test_units_with_the_largest_weights_are_taken_over_all_of_them_at_the_same_size(originals, context):
    whole = originals["mini"].module
    site = anatomy(whole).of("ffn")[0]
    up, down = whole.get_submodule(site.sources[0].layer), whole.get_submodule(site.consumer)
    score = up.weight.norm(dim=1) * down.weight.norm(dim=0)
    kept = largest_units(whole, site, 10)
    assert kept == sorted(kept)
    assert set(kept) == set(score.topk(10).indices.tolist())
    original = originals["llama"]
    student = Student(config={"intermediate_size": 64}).apply(original, context(original))
    for name, value in original.module.state_dict().items():
        assert torch.equal(student.module.state_dict()[name], value), name
    copy_weights(student.module, original.module, [0, 1])


def test_layers_are_spaced_evenly_and_weights_that_nobody_has_are_drawn_from_the_seed(originals, context):
    assert space_evenly(1, 6) == [0]
    assert space_evenly(3, 6) == [0, 2, 5]
    assert space_evenly(6, 6) == list(range(6))
    assert all(
        len(set(space_evenly(count, whole))) == count
        and space_evenly(count, whole)[-1] == (whole - 1 if count > 1 else 0)
        for whole in range(1, 30)
        for count in range(1, whole + 1)
    )
    original = originals["mini"]
    wider = Student(config={"intermediate_size": 96, "num_hidden_layers": 1})
    first, second = (wider.apply(original, context(original, name)) for name in ("one", "two"))
    assert first.key == second.key
    other = wider.apply(original, replace(context(original, "three"), seed=1))
    assert other.key != first.key


WRONG = {
    "too many layers": ({"layers": 3}, RecipeError, "layers: 3 of 2 cannot stay"),
    "no layers": ({"layers": []}, RecipeError, "are not ascending indices"),
    "layers out of order": ({"layers": [1, 0]}, RecipeError, "are not ascending indices"),
    "a key that is not there": (
        {"config": {"intermediate_sise": 3}},
        RecipeError,
        "no key 'intermediate_sise'. Did you mean 'intermediate_size'",
    ),
    "more layers": ({"config": {"num_hidden_layers": 4}}, RecipeError, "has 4 layers, and the original 2"),
    "another width of vectors": ({"config": {"hidden_size": 16}}, RecipeError, r"Keep the keys that determine them"),
    "a config that cannot be built": ({"config": {"num_attention_heads": 5}}, SourceError, "cannot build this model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_student_that_cannot_be_is_refused_in_a_sentence(originals, context, name):
    settings, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        Student(**settings).apply(originals["mini"], context(originals["mini"]))


def test_a_config_comes_before_other_cuts_and_only_where_there_is_one(originals, context):
    original = originals["mini"]
    cut = Student(layers=1).apply(original, context(original))
    with pytest.raises(RecipeError, match=r"after distill\.student\. Put distill\.student before it"):
        Student(config={"intermediate_size": 32}).apply(cut, context(original, "again"))
    module = ResidualNet().eval()
    net = Checkpoint.of(
        module, Tensors(module.inputs), outputs=probe_module(module, module.inputs), source={"kind": "builder"}, size=1
    )
    with pytest.raises(SourceError, match="has no config to change"):
        Student(config={"width": 3}).apply(net, context(net, "net"))
    with pytest.raises(SourceError, match="no transformer blocks"):
        Student(layers=1).apply(net, context(net, "other"))
    with pytest.raises(ValidationError, match="give one of them"):
        Student(layers=1, config={"hidden_size": 3})
