"""Layers taken apart: what the factors compose to, how close they come, the replay, what is refused."""

import copy

import contexts
import models
import pytest
import torch
from contexts import checkpoint_of, opened
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from compress.factorize.convolution import Convolution
from compress.factorize.factorize_layers import find_factorizable
from compress.factorize.factors import Factorization, compose_weight, count_multiplications, make_factors
from compress.factorize.fit_factors import fit_factors, input_metric
from compress.factorize.low_rank import LowRank, RankTradeoff, energy_losses, select_by_budget, select_by_energy
from compress.prune.channels import Channels
from compress.statistics.layer_inputs import flatten_inputs
from compress.statistics.layer_weights import weight_matrix
from compress.statistics.moments import Moments, add_inputs
from export.capture.capture import capture
from laconic.errors import RecipeError, UsageError
from laconic.metrics import cosine
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import call
from laconic.models.source_loading import load_source
from laconic.recipes.recipe import Recipe


def seen_by(layer, inputs):
    """The moments of what a layer multiplies its weight with."""
    found: dict[str, Moments] = {}
    add_inputs(found, "it", flatten_inputs(layer, inputs))
    return found["it"]


KINDS = ["low-rank", "spatial", "separable", "grouped", "bottleneck"]
convolutions = st.builds(
    lambda groups, into, out, kernel, stride, dilation, padding, bias: nn.Conv2d(
        groups * into, groups * out, kernel, stride, padding, dilation, bias=bias
    ),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([3, (1, 3), (3, 2)]),
    st.sampled_from([1, 2, (1, 2)]),
    st.integers(1, 2),
    st.sampled_from([0, 1, (2, 0)]),
    st.booleans(),
)


# The parts


@settings(max_examples=60, derandomize=True)
@given(layer=convolutions, kind=st.sampled_from(KINDS), size=st.integers(1, 2))
def test_parts_answer_as_the_one_layer_that_they_make(layer, kind, size):
    assume(kind != "grouped" or not (layer.in_channels % size or layer.out_channels % size))
    shape = Factorization(kind=kind, size=size)
    parts = make_factors(layer, shape)
    torch.manual_seed(0)
    for parameter in parts.parameters():
        parameter.data.normal_()
    whole = copy.deepcopy(layer)
    with torch.no_grad():
        whole.weight.copy_(compose_weight([part.weight for part in parts], shape).view_as(whole.weight))
        if whole.bias is not None:
            whole.bias.copy_(parts[-1].bias)
        image = torch.randn(2, layer.in_channels, 9, 8)
        torch.testing.assert_close(parts(image), whole(image), rtol=1e-4, atol=1e-4)


@settings(max_examples=30, derandomize=True)
@given(layer=convolutions, kind=st.sampled_from(KINDS), size=st.integers(1, 3))
def test_multiplications_are_counted_as_they_are_done(layer, kind, size):
    assume(kind != "grouped" or not (layer.in_channels % size or layer.out_channels % size))
    layer.padding = (0, 0)
    shape, counted = Factorization(kind=kind, size=size), []
    parts = make_factors(layer, shape)
    for part in parts:
        part.register_forward_hook(lambda part, _, out: counted.append(out[0, 0].numel() * part.weight.numel()))
    with torch.no_grad():
        places = layer(image := torch.randn(1, layer.in_channels, 65, 65))[0, 0].numel()
        for parameter in parts.parameters():
            parameter.zero_()
        parts(image)
    assert sum(counted) == pytest.approx(places * count_multiplications(layer, shape), rel=0.12), "but for the rim"


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_was_made_of_parts_is_found_again(kind):
    torch.manual_seed(1)
    layer = nn.Conv2d(8, 8, 3, padding=1)
    shape = Factorization(kind=kind, size=2 if kind in ("separable", "grouped") else 4)
    made = [torch.randn_like(part.weight) for part in make_factors(layer, shape)]
    with torch.no_grad():
        layer.weight.copy_(compose_weight(made, shape).view_as(layer.weight))
    images = torch.randn(64, 8, 8, 8)
    parts, error = fit_factors(layer, seen_by(layer, images), shape)
    assert error < 1e-3
    with torch.no_grad():
        expected = layer(images)
        assert float((parts(images) - expected).square().mean() / expected.var()) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_that_is_told_is_that_of_the_answers(kind):
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 6, 3, bias=False)
    images = torch.randn(50, 6, 8, 8) * torch.linspace(0.1, 3, 6)[:, None, None]
    parts, error = fit_factors(layer, seen_by(layer, images), Factorization(kind=kind, size=2))
    with torch.no_grad():
        expected = layer(images)
        true = float((parts(images) - expected).square().sum() / expected.square().sum())
    assert error == pytest.approx(true, rel=0.02)


def test_training_together_is_better_than_the_best_one_by_one(monkeypatch):
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, padding=1)
    moments = seen_by(layer, torch.randn(32, 8, 8, 8).cumsum(dim=2))
    for kind in ("separable", "grouped", "bottleneck"):
        trained = fit_factors(layer, moments, Factorization(kind=kind, size=2))[1]
        with monkeypatch.context() as patch:
            patch.setattr("compress.factorize.fit_factors.minimize", lambda *_: None)
            assert trained < 0.98 * fit_factors(layer, moments, Factorization(kind=kind, size=2))[1]


@settings(max_examples=30, derandomize=True)
@given(
    into=st.integers(2, 12), out=st.integers(2, 12), rank=st.integers(1, 6), bias=st.booleans(), seed=st.integers(0, 99)
)
def test_no_other_directions_lose_less_of_what_a_linear_layer_answers(into, out, rank, bias, seed):
    assume(rank < min(into, out))
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(into, out, bias=bias)
    inputs = torch.randn(200, into, generator=generator) @ torch.randn(into, into, generator=generator) + 1
    moments = seen_by(layer, inputs)
    parts, error = fit_factors(layer, moments, Factorization(kind="low-rank", size=rank))
    weight, metric = weight_matrix(layer).detach().double(), input_metric(moments, layer)
    root = torch.linalg.cholesky(metric)
    values = torch.linalg.svdvals(weight @ root).square()
    assert error == pytest.approx(float(values[rank:].sum() / values.sum()), abs=1e-6)
    with torch.no_grad():
        if bias:  # what the mean loses, the bias has
            torch.testing.assert_close(parts(inputs).mean(0), layer(inputs).mean(0), rtol=1e-3, atol=1e-3)


# Ranks


def candidate(path, energies, step=1):
    found = energy_losses(torch.tensor(energies, dtype=torch.float64))
    return RankTradeoff(path, found, parameters=100, per_rank=20, highest=4, step=step)


def test_the_lowest_rank_that_holds_the_energy_is_taken_and_a_budget_takes_from_the_layer_that_loses_least():
    one = candidate("a", [8.0, 1.0, 0.6, 0.4])
    assert select_by_energy([one], 0.8) == {"a": 1}
    assert select_by_energy([one], 0.9) == {"a": 2}
    assert select_by_energy([one], 0.91) == {"a": 3}
    assert select_by_energy([candidate("a", [8.0, 1.0, 0.6, 0.4], step=2)], 0.91) == {"a": 4}
    assert select_by_energy([candidate("a", [1.0] * 8)], 0.9) == {}, "a rank that saves no work is none"
    steep, flat = candidate("steep", [100.0, 0.1, 0.1, 0.1, 0.1]), candidate("flat", [1.0] * 5)
    assert select_by_budget([steep, flat], 0.6) == {"steep": 1}


@settings(max_examples=60, derandomize=True)
@given(
    layers=st.lists(st.lists(st.floats(0.01, 10), min_size=4, max_size=8), min_size=1, max_size=5),
    keep=st.floats(0.3, 0.99),
)
def test_a_budget_is_kept_where_it_can_be(layers, keep):
    found = [candidate(str(number), sorted(each, reverse=True)) for number, each in enumerate(layers)]
    ranks = select_by_budget(found, keep)
    left = sum(ranks[each.path] * each.per_rank if each.path in ranks else each.parameters for each in found)
    assert left <= keep * sum(each.parameters for each in found)


# Stages

STAGES = {
    "low-rank": LowRank(energy=0.5, round_to=2),
    "low-rank, spatial, by budget": LowRank(keep=0.6, round_to=1, convolutions="spatial"),
    "low-rank, blind": LowRank(energy=0.5, round_to=2, data_aware=False),
    "separable": Convolution(into="separable", depth_multiplier=1, max_error=1, layers=("body",)),
    "grouped": Convolution(into="grouped", max_error=1),
    "bottleneck": Convolution(into="bottleneck", width=0.4, round_to=2, max_error=1),
}

CAPTURED = ("low-rank, spatial, by budget", "grouped", "bottleneck")


def measure_likeness(one, other):
    """The mean cosine of the answers of two checkpoints to images."""
    images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return cosine(*(each.module(images).numpy() for each in (one, other))).mean()


@pytest.mark.sweep("grouped")
@pytest.mark.parametrize("method", STAGES)
def test_what_was_taken_apart_saves_work_is_loaded_bit_for_bit_captured_and_cut_again(method, tmp_path):
    checkpoint = opened(tmp_path)
    context = contexts.torch_context(checkpoint, tmp_path)
    before = {name: tensor.clone() for name, tensor in checkpoint.module.state_dict().items()}
    smaller = STAGES[method].apply(checkpoint, context)
    assert all(torch.equal(tensor, before[name]) for name, tensor in checkpoint.module.state_dict().items())
    assert count(smaller) < count(checkpoint)
    assert measure_likeness(checkpoint, smaller) > 0.8
    smaller.save(tmp_path / "saved")
    loaded = Checkpoint.load(tmp_path / "saved", trust=True)
    image = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(loaded.module(image), smaller.module(image))
    if method in CAPTURED:
        assert capture(loaded, tmp_path).layers
    again = Channels(keep=0.5, round_to=4).apply(loaded, context)
    assert count(again) < count(loaded)
    again.save(tmp_path / "again")
    assert Checkpoint.load(tmp_path / "again", trust=True).key == again.key


def count(checkpoint):
    return sum(parameter.numel() for parameter in checkpoint.module.parameters())


@pytest.mark.parametrize("save", [models.save_bert, models.save_gpt2, models.save_llama, models.save_vit])
def test_linear_layers_of_transformers_are_taken_apart(save, tmp_path):
    checkpoint = load_source(save(tmp_path / "model"))
    context = contexts.torch_context(checkpoint, tmp_path, dataset=contexts.dataset_for(checkpoint, 12))
    smaller = LowRank(keep=0.7, round_to=2).apply(checkpoint, context)
    assert count(smaller) < count(checkpoint)
    smaller.save(tmp_path / "saved")
    loaded = Checkpoint.load(tmp_path / "saved")
    assert loaded.key == smaller.key
    batch = {name: torch.tensor(array) for name, array in checkpoint.task.encode(checkpoint.task.examples(3)).items()}
    with torch.no_grad():
        expected, found = call(smaller.module, batch), call(loaded.module, batch)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_same_factors_give_the_same_bytes(tmp_path):
    checkpoint = opened(tmp_path)
    for stage in (STAGES["low-rank"], STAGES["grouped"]):
        assert len({stage.apply(checkpoint, contexts.torch_context(checkpoint, tmp_path)).key for _ in range(2)}) == 1


def test_a_layer_that_would_be_imitated_badly_stays_as_it_is(tmp_path):
    checkpoint = opened(tmp_path)
    context = contexts.torch_context(checkpoint, tmp_path)
    found = Convolution(into="separable", depth_multiplier=1, max_error=1).apply(checkpoint, context)
    worst = found.history[-1].figures["largest loss"]
    fewer = Convolution(into="separable", depth_multiplier=1, max_error=0.99 * worst).apply(checkpoint, context)
    assert fewer.history[-1].figures["layers"] == found.history[-1].figures["layers"] - 1
    with pytest.raises(UsageError, match="the lowest is"):
        Convolution(into="separable", depth_multiplier=1, max_error=1e-9).apply(checkpoint, context)


def test_tied_layers_and_those_of_torchs_attention_are_left_alone():
    assert list(find_factorizable(models.Tied())) == []
    assert [path for path, _ in find_factorizable(nn.TransformerEncoderLayer(8, 2))] == ["linear1", "linear2"]
    assert [path for path, _ in find_factorizable(models.MobileNet())] == ["stem.0", "pointwise.0", "head"]


def test_what_saves_no_work_and_a_name_that_no_layer_has_are_refused_by_a_sentence(tmp_path):
    checkpoint = checkpoint_of(models.randomize(models.Perceptron([4, 8, 3])))
    context = contexts.torch_context(checkpoint, tmp_path)
    with pytest.raises(UsageError, match=r"none of 2 layers.*energy: 0\.99"):
        LowRank().apply(checkpoint, context)
    with pytest.raises(UsageError, match=r"none of the convolutions \[\]"):
        Convolution().apply(checkpoint, context)
    checkpoint = opened(tmp_path)
    context = contexts.torch_context(checkpoint, tmp_path)
    smaller = LowRank(energy=0.3, round_to=1, layers=("bod*",)).apply(checkpoint, context)
    assert list(smaller.history[-1].structure["parts"]) == ["body"]
    with pytest.raises(RecipeError, match=r"'bodi'.*'body'"):
        LowRank(layers=("bodi",)).apply(checkpoint, context)


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"factorize.low-rank": {"energy": 0.9, "keep": 0.5}}, "Leave one out"),
        ({"factorize.low-rank": {"energy": 1}}, "energy"),
        ({"factorize.convolution": {"into": "round"}}, "into"),
        ({"factorize.convolution": {"groups": 1}}, "groups"),
    ],
)
def test_settings_that_make_no_sense_are_refused(stage, said):
    with pytest.raises(RecipeError, match=said):
        Recipe.parse({"source": "m", "stages": [stage]})
