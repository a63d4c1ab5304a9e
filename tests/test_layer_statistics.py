"""Forward hooks that are removed again, patterns that name layers, and ridge regression of layers."""

import contexts
import models
import pytest
import torch
from torch import nn

from compress.statistics.layer_inputs import iterate_inputs
from compress.statistics.layer_weights import write_weight
from compress.statistics.least_squares import RIDGE, refit_layers
from laconic.errors import RecipeError
from laconic.models.checkpoint import Checkpoint
from laconic.models.hooks import forward_hooks
from laconic.models.layer_patterns import match_patterns
from laconic.models.processors import plain_task


def test_hooks_see_and_replace_inputs_and_outputs_and_are_removed_after_an_error():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x, seen = torch.ones(1, 3), []
    plain = module(x)
    with forward_hooks(module, ["0"], before=lambda path, layer, args, kwargs: ((args[0] * 2,), kwargs)):
        assert torch.allclose(module(x), module[1](nn.functional.linear(x * 2, module[0].weight, module[0].bias)))
    with forward_hooks(module, ["1"], after=lambda path, layer, args, kwargs, out: out + 1):
        assert torch.allclose(module(x), plain + 1)
    with (
        pytest.raises(RuntimeError, match="shapes"),
        forward_hooks(module, ["0", "1"], before=lambda path, *_: seen.append(path)),
    ):
        module(torch.ones(1, 4))
    module(x)
    assert seen == ["0"]
    with pytest.raises(AttributeError), forward_hooks(module, ["0", "2"], before=lambda path, *_: seen.append(path)):
        pass
    assert not module[0]._forward_pre_hooks


def test_a_pattern_that_matches_nothing_is_refused_and_a_weight_is_written_in_the_layers_own_layout():
    assert match_patterns(["body.0", "body.1", "head"], ["body.*"], "keep") == {"body.0", "body.1"}
    with pytest.raises(RecipeError, match=r"keep: no layer is named 'haed'\. Did you mean 'head'"):
        match_patterns(["body.0", "head"], ["haed"], "keep")
    layer = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    matrix = torch.arange(24.0).view(3, 8)
    write_weight(layer, matrix, torch.ones(3))
    assert torch.equal(layer.weight, matrix.view(3, 2, 2, 2))
    assert torch.equal(layer.bias, torch.ones(3))


@pytest.mark.parametrize("bias", [True, False])
def test_a_refitted_layer_has_the_weight_of_ridge_regression(bias):
    original = models.randomize(models.Perceptron([6, 5, 3]))
    if not bias:
        original.layers[1].bias = None
    module = models.randomize(models.Perceptron([6, 5, 3]), seed=1)
    if not bias:
        module.layers[1].bias = None
    task = plain_task("tensors", original.inputs, "a test")
    checkpoint = Checkpoint.of(original, task, outputs=(), source={"kind": "test"}, size=0)
    dataset = contexts.dataset_for(checkpoint, 100)
    batches = [{"x": torch.tensor(task.encode([sample])["x"])} for sample in dataset.samples]
    with torch.no_grad():
        x, before = (
            torch.cat([rows for _, rows in iterate_inputs(each, batches, ["layers.1"])]).double()
            for each in (module, original)
        )
        layer, target = module.layers[1], original.layers[1]
        t = before @ target.weight.double().T + (target.bias.double() if bias else 0)
        means = (x.mean(dim=0), t.mean(dim=0)) if bias else (torch.zeros(5).double(), torch.zeros(3).double())
        centred = x - means[0]
        gram = centred.T @ centred
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(5).double()
        cross = (t - means[1]).T @ centred + layer.weight.double() @ ridge
        expected = torch.linalg.solve(gram + ridge, cross.T).T
        refit_layers(module, original, task, dataset, {"layers.1": "layers.1"})
    assert torch.allclose(layer.weight.double(), expected, atol=1e-3)
    if bias:
        assert torch.allclose(layer.bias.double(), means[1] - expected @ means[0], atol=1e-3)
