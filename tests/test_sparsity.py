"""Zeros in the weights: exactly as many as asked for, where they do least harm, and there to stay."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from contexts import torch_context
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MobileNet, Perceptron, ResidualNet, Tied, randomize, save_bert, save_gpt2
from torch import nn

from compress.criteria.criterion import LayerStatistics
from compress.criteria.sparsegpt import SparseGpt
from compress.prune import unstructured
from compress.prune.sparsity import prune_columns, prune_weight
from compress.prune.sparsity_pattern import EvenSparsity, FixedMask, TwoOfFour, select_lowest, split_count
from compress.prune.two_four import TwoFour
from compress.prune.unstructured import Unstructured
from compress.quantize.rounding import round_weight
from compress.statistics.layer_weights import weight_matrix
from compress.statistics.moments import Moments, group_by_input
from laconic import registry
from laconic.errors import RecipeError
from laconic.models.checkpoint import Checkpoint
from laconic.models.processors import plain_task
from laconic.models.signature import probe_module
from laconic.models.source_loading import load_source
from laconic.recipes.recipe import NamedStage, Recipe
from laconic.recipes.stage import Stage

ARGUMENTS = {"widths": [16, 24, 12, 8]}


def stage(name: str, **config) -> Stage:
    return NamedStage(name=name, config=config).make_stage()


def checkpoint_of(module: nn.Module, **source) -> Checkpoint:
    randomize(module)
    task = plain_task("tensors", module.inputs, "a test")
    outputs = probe_module(module.eval(), task.inputs)
    return Checkpoint.of(module, task, outputs=outputs, source=source or {"kind": "test"}, size=0)


def perceptron() -> Checkpoint:
    """One that can be saved: built by a factory of its own."""
    source = {"kind": "builder", "builder": "models:Perceptron", "arguments": ARGUMENTS}
    return checkpoint_of(Perceptron(**ARGUMENTS), **source)


def weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Of all linear and convolutional layers, as [out, in]."""
    kinds = ("Linear", "Conv2d", "Conv1D")
    layers = ((path, layer) for path, layer in checkpoint.module.named_modules() if type(layer).__name__ in kinds)
    return {path: weight_matrix(layer) for path, layer in layers}


def zeros(found: dict[str, torch.Tensor]) -> int:
    return sum(int((weight == 0).sum()) for weight in found.values())


def rows_of(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Inputs that go together, as those of real layers do."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(count, max(2, width // 4), generator=generator)
    scales = torch.linspace(0.2, 3, width)[torch.randperm(width, generator=generator)]
    mixed = few @ torch.randn(few.shape[1], width, generator=generator)
    return (mixed + 0.3 * torch.randn(count, width, generator=generator)) * scales


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.floats(0.01, 0.99),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_share_is_met_to_the_weight_whatever_the_shapes(shapes, share, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randint(0, 4, shape, generator=generator).float() for shape in shapes]
    total = sum(each.numel() for each in scores)
    counts = split_count([each.numel() for each in scores], share)
    found = [
        EvenSparsity(count, each.shape[1], rows).select_zeros(each) for each, count in zip(scores, counts, strict=True)
    ]  # fmt: skip
    assert [int(each.sum()) for each in found] == counts
    assert abs(sum(counts) - share * total) <= 0.5 + 1e-6
    if rows:
        assert all(int(each.sum(dim=1).max() - each.sum(dim=1).min()) <= 1 for each in found)
    chosen = select_lowest(scores, sum(counts))
    assert sum(int(each.sum()) for each in chosen) == sum(counts)
    inside, outside = (torch.cat([s[z == flag] for s, z in zip(scores, chosen, strict=True)]) for flag in (True, False))
    assert not len(inside) or not len(outside) or inside.max() <= outside.min()


@pytest.mark.parametrize("count", [7, 300, 383, 500, 1201])
def test_each_stretch_of_inputs_gives_its_share_and_more_is_never_less(count):
    stretches = range(0, 384, 48)
    scores = torch.zeros(4, 48)
    found = [int(EvenSparsity(count, 384, True).select_zeros(scores, start).sum()) for start in stretches]
    more = [int(EvenSparsity(count + 1, 384, True).select_zeros(scores, start).sum()) for start in stretches]
    assert sum(found) == count
    assert max(found) - min(found) <= 3
    assert all(a <= b for a, b in zip(found, more, strict=True))


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 300), st.floats(0, 1), st.booleans(), st.booleans(), st.integers(0, 99))
def test_what_is_made_up_for_has_exactly_the_zeros_of_its_pattern(outputs, inputs, share, rows, fours, seed):
    inputs += -inputs % 4 if fours else 0
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    given = rows_of(64, inputs, seed)
    count = int(share * weight.numel())
    pattern = TwoOfFour() if fours else EvenSparsity(count, inputs, rows)
    found = prune_columns(weight, given.T @ given, pattern)
    assert found.isfinite().all()
    assert int((found == 0).sum()) == (weight.numel() // 2 if fours else count)
    if fours:
        assert ((found.view(outputs, -1, 4) == 0).sum(dim=2) == 2).all()


@pytest.mark.parametrize(
    "pattern", [EvenSparsity(24 * 64 // 2, 64, True), TwoOfFour()], ids=["half of each row", "two of 4"]
)
def test_what_makes_up_for_its_zeros_errs_less_than_wanda_and_that_less_than_magnitude(pattern):
    rows = rows_of(600, 64)
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    evidence = LayerStatistics(weight, Moments(rows.T @ rows, rows.sum(dim=0), len(rows)))
    unseen = rows_of(600, 64, seed=0)[300:]
    errors = {}
    for name in ("magnitude", "wanda", "sparsegpt"):
        criterion = registry.resolve("criterion", name)()
        found = prune_weight(evidence, pattern, criterion, update=name == "sparsegpt")
        errors[name] = float((unseen @ (found - weight).T).square().mean())
    assert errors["sparsegpt"] < 0.7 * errors["wanda"]
    assert errors["wanda"] < errors["magnitude"]
    mended = prune_weight(evidence, pattern, registry.resolve("criterion", "magnitude")(), update=True)
    assert float((unseen @ (mended - weight).T).square().mean()) < errors["magnitude"]


def test_of_one_weight_that_goes_the_rest_makes_up_as_least_squares_would():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 6, generator=generator)
    rows[:, 1:] += rows[:, :1]
    weight = torch.randn(3, 6, generator=generator)
    first = torch.zeros(3, 6, dtype=torch.bool)
    first[:, 0] = True
    found = prune_columns(weight, rows.T @ rows, FixedMask(first))
    best = torch.linalg.lstsq(rows[:, 1:], rows @ weight.T).solution.T
    assert (found[:, 0] == 0).all()
    assert torch.allclose(found[:, 1:], best, atol=0.02)


@pytest.mark.parametrize("scope", ["global", "layer", "row"])
@pytest.mark.parametrize("criterion", sorted(registry.CRITERIA))
@pytest.mark.parametrize("update", ["none", "sparsegpt"])
def test_every_criterion_reaches_the_share_in_every_scope(scope, criterion, update, tmp_path):
    checkpoint = perceptron()
    before = {name: value.clone() for name, value in checkpoint.module.state_dict().items()}
    chosen = stage("prune.unstructured", sparsity=0.37, criterion=criterion, scope=scope, update=update, samples=12)
    after = chosen.apply(checkpoint, torch_context(checkpoint, tmp_path))
    total = sum(weight.numel() for weight in weights(after).values())
    assert zeros(weights(after)) == round(0.37 * total)
    assert after.history[-1].figures["sparsity"] == round(0.37 * total) / total
    assert all(torch.equal(value, before[name]) for name, value in checkpoint.module.state_dict().items())
    changed = any(
        not torch.equal(weight[weight != 0], weights(checkpoint)[path][weight != 0])
        for path, weight in weights(after).items()
    )
    assert changed == (update == "sparsegpt")


@pytest.mark.parametrize("criterion", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("make", [ResidualNet, MobileNet], ids=["residual", "depthwise"])
def test_two_of_four_lie_along_the_input_channels_of_each_place_of_a_kernel(make, criterion, tmp_path):
    checkpoint = checkpoint_of(make())
    found = stage("prune.two-four", criterion=criterion, samples=8)
    after = found.apply(checkpoint, torch_context(checkpoint, tmp_path))
    record = after.history[-1]
    for path, layer in after.module.named_modules():
        if path in record.structure["layers"]:
            weight = layer.weight
            lanes = weight.permute(0, 2, 3, 1) if weight.ndim == 4 else weight
            assert ((lanes.reshape(-1, 4) == 0).sum(dim=1) == 2).all(), path
            assert record.structure["layers"][path] == 0.5
    left = record.structure["left"]
    assert "no multiple of 4" in left["stem" if make is ResidualNet else "stem.0"]
    assert (make is ResidualNet) or "its 1 inputs" in left["depthwise.0"]
    assert record.figures["sparsity"] == 0.5


def test_layers_with_few_channels_are_named(tmp_path, capsys):
    checkpoint = checkpoint_of(ResidualNet())
    context = torch_context(checkpoint, tmp_path)
    context.steps._console.quiet = False
    stage("prune.two-four", criterion="magnitude").apply(checkpoint, context)
    said = " ".join(capsys.readouterr().err.split())
    assert "2 layers have fewer than 256 channels" in said


@pytest.mark.parametrize("save", [save_bert, save_gpt2], ids=["bert", "gpt-2"])
@pytest.mark.parametrize("name", ["prune.unstructured", "prune.two-four"])
def test_transformers_are_pruned_layer_after_layer(save, name, tmp_path):
    checkpoint = load_source(save(tmp_path / "model"))
    after = stage(name, samples=16).apply(checkpoint, torch_context(checkpoint, tmp_path))
    record = after.history[-1]
    assert record.figures["sparsity"] == 0.5
    assert record.stage == name
    assert 0 < record.figures["sparsity of the model"] < 0.5
    tied = {path for path, why in record.structure["left"].items() if "another module" in why}
    assert len(tied) == (save is save_gpt2)
    tables = [module.weight for module in after.module.modules() if isinstance(module, nn.Embedding)]
    assert all(bool((table != 0).all()) for table in tables)
    again = stage(name, samples=16).apply(checkpoint, torch_context(checkpoint, tmp_path))
    assert again.key == after.key


def test_layers_fed_by_one_tensor_come_together_and_in_the_order_in_which_they_run(tmp_path):
    checkpoint = load_source(save_bert(tmp_path / "model"))
    paths = [path for path, layer in checkpoint.module.named_modules() if isinstance(layer, nn.Linear)]
    batch = {name: torch.tensor(array) for name, array in checkpoint.task.encode(["hello world"]).items()}
    found = [
        [path.rsplit(".", 2)[-1] for path in wave.paths]
        for wave in group_by_input(checkpoint.module, batch, paths[::-1])
    ]
    assert found[:4] == [["query", "key", "value"], ["dense"], ["dense"], ["dense"]]
    assert sum(map(len, found)) == len(paths)


def test_later_layers_see_what_pruned_ones_give(tmp_path):
    """With the first layer all but gone, what the second makes up for is what is left of its inputs."""
    checkpoint = perceptron()
    context = torch_context(checkpoint, tmp_path)
    first = stage("prune.unstructured", sparsity=0.6, layers=["layers.0"]).apply(checkpoint, context)
    then = stage("prune.unstructured", sparsity=0.6, layers=["layers.1"]).apply(first, context)
    both = stage("prune.unstructured", sparsity=0.6, layers=["layers.0", "layers.1"]).apply(checkpoint, context)
    for path, weight in weights(both).items():
        assert torch.allclose(weight, weights(then)[path], atol=1e-5), path


@pytest.mark.parametrize("criterion", ["magnitude", "sparsegpt"])
def test_what_is_zero_stays_zero_in_another_cut(criterion, tmp_path):
    checkpoint = perceptron()
    context = torch_context(checkpoint, tmp_path)
    half = stage("prune.two-four", criterion=criterion).apply(checkpoint, context)
    more = stage("prune.unstructured", sparsity=0.75, criterion=criterion).apply(half, context)
    for path, weight in weights(half).items():
        assert (weights(more)[path][weight == 0] == 0).all()
    assert more.history[-1].figures["sparsity"] == pytest.approx(0.75, abs=1e-3)


def test_the_schedule_rises_ever_slower_to_its_target():
    found = unstructured.cubic_schedule(0.9, 10)
    assert found[-1] == 0.9
    steps = np.diff([0, *found])
    assert (steps > 0).all()
    assert (np.diff(steps) < 0).all()
    assert list(unstructured.assign_steps(found, 40)) == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    assert (
        unstructured.assign_steps(found, 2) == {1: found[4], 2: 0.9}
        or list(unstructured.assign_steps(found, 2).values())[-1] == 0.9
    )


@pytest.mark.sweep("magnitude-iterative")
@pytest.mark.parametrize("schedule", ["iterative", "training"])
@pytest.mark.parametrize("criterion", ["magnitude", "sparsegpt"])
def test_gradual_pruning_ends_at_the_target_and_learns_on_the_way(schedule, criterion, tmp_path, cache):
    checkpoint = perceptron()
    context = replace(torch_context(checkpoint, tmp_path), cache=cache)
    heal = {
        "steps": 30,
        "eval_every": 15,
        "batch_size": 12,
        "optimizer": {"adamw": {"lr": 0.01}},
        "loader": {"workers": 0},
    }
    config = {"sparsity": 0.8, "criterion": criterion, "samples": 16}
    once = stage("prune.unstructured", **config).apply(checkpoint, context)
    gradually = stage("prune.unstructured", **config, schedule=schedule, steps=3, heal=heal)
    after = gradually.apply(checkpoint, context)
    total = sum(weight.numel() for weight in weights(after).values())
    assert zeros(weights(after)) == round(0.8 * total)
    assert context.fidelity(after).mean() > context.fidelity(once).mean()
    assert not any(parameter.requires_grad for parameter in after.module.parameters())
    assert not after.module.training
    again = gradually.apply(checkpoint, replace(torch_context(checkpoint, tmp_path / "again"), cache=cache))
    assert again.key == after.key


@pytest.mark.parametrize("schedule", ["iterative", "training"])
def test_a_run_that_was_killed_goes_on_and_gives_the_same(schedule, tmp_path, monkeypatch, cache):
    checkpoint = perceptron()
    heal = {"steps": 12, "eval_every": 6, "batch_size": 12, "snapshot_every": 5, "loader": {"workers": 0}}
    config = {"sparsity": 0.8, "criterion": "magnitude", "schedule": schedule, "steps": 4, "heal": heal}
    chosen = stage("prune.unstructured", **config)
    whole = chosen.apply(checkpoint, replace(torch_context(checkpoint, tmp_path / "whole"), cache=cache))
    cuts = []

    def cut(self, module, *args, _cut=Unstructured.sparsify):
        cuts.append(args)
        if len(cuts) == 3:
            raise KeyboardInterrupt
        _cut(self, module, *args)

    context = replace(torch_context(checkpoint, tmp_path / "killed"), cache=cache)
    monkeypatch.setattr(Unstructured, "sparsify", cut)
    with pytest.raises(KeyboardInterrupt):
        chosen.apply(checkpoint, context)
    resumed = chosen.apply(checkpoint, context)
    assert resumed.key == whole.key
    assert len(cuts) < 3 + 4


@pytest.mark.parametrize("rounding", ["nearest", "adaround", "gptq"])
def test_quantization_keeps_zeros_whichever_way_it_rounds(rounding, tmp_path):
    checkpoint = perceptron()
    after = stage("prune.unstructured", sparsity=0.5).apply(checkpoint, torch_context(checkpoint, tmp_path))
    for weight in weights(after).values():
        given = weight.numpy().T
        rows = rows_of(100, len(given)).numpy().astype(np.float64)
        steps = np.broadcast_to(np.abs(given).max(axis=0) / 127, given.shape)
        integers = round_weight(given, steps, rows.T @ rows / len(rows), (-127, 127), rounding)
        assert (integers[given == 0] == 0).all()
        assert (integers != 0).any()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"sparsity": 1.0}, "less than 1"),
        ({"sparsity": "0%"}, "greater than 0"),
        ({"sparsity": 1.5}, "share"),
        ({"criterion": "magnitud"}, "Did you mean 'magnitude'"),
        ({"criterion": {"taylor": {"power": 3}}}, "power"),
        ({"steps": 1}, "greater than or equal to 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, said):
    with pytest.raises(RecipeError, match=said):
        stage("prune.unstructured", **config)


@pytest.mark.parametrize("name", ["prune.unstructured", "prune.two-four"])
def test_a_pattern_that_names_nothing_is_refused(name, tmp_path):
    checkpoint = perceptron()
    context = torch_context(checkpoint, tmp_path)
    with pytest.raises(RecipeError, match=r"layers: no layer is named 'layer\.1'. Did you mean 'layers\.1'"):
        stage(name, layers=["layer.1"]).apply(checkpoint, context)
    with pytest.raises(RecipeError, match="keep: no layer is named"):
        stage(name, keep=["encoder.*"]).apply(checkpoint, context)
    with pytest.raises(RecipeError, match=r"no layer is left to prune: layers\.0: the recipe keeps it"):
        stage(name, keep=["layers.*"]).apply(checkpoint, context)


def test_layers_that_no_zeros_fit_and_techniques_that_cannot_keep_them_are_refused(tmp_path):
    checkpoint = checkpoint_of(Perceptron([6, 10, 3]))
    with pytest.raises(RecipeError, match="its 6 inputs are no multiple of 4"):
        stage("prune.two-four").apply(checkpoint, torch_context(checkpoint, tmp_path))
    checkpoint = checkpoint_of(Tied())
    with pytest.raises(RecipeError, match="another module's"):
        stage("prune.unstructured").apply(checkpoint, torch_context(checkpoint, tmp_path))
    checkpoint = perceptron()
    heal = {"steps": 4, "techniques": ["lora"], "loader": {"workers": 0}}
    chosen = stage("prune.unstructured", schedule="training", heal=heal)
    with pytest.raises(RecipeError, match="lora"):
        chosen.apply(checkpoint, torch_context(checkpoint, tmp_path))


@pytest.mark.parametrize("name", ["prune.unstructured", "prune.two-four"])
def test_what_would_fill_the_zeros_may_not_follow(name):
    class Filling(TwoFour):
        breaks = frozenset({"zeros"})

    address = f"{__name__}:FILLING"
    globals()["FILLING"] = Filling
    with pytest.raises(RecipeError, match="zero"):
        Recipe.parse({"source": "model", "stages": [name, address], "heal": False}, trust=True)
    Recipe.parse({"source": "model", "stages": [address, name], "heal": False}, trust=True)
    assert SparseGpt.scope == "layer"
