"""Compressed models that are useless, and whose answers look alike: each ends with exit code 3 and what broke."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

PRUNED = "stages:\n  - prune.unstructured: {sparsity: 0.97}\n  - quantize.static\nheal: false\n"
FEWER = "stages:\n  - prune.unstructured: {sparsity: 0.2, criterion: magnitude, layers: ['0']}\nheal: false\n"
CRUDE = "stages:\n  - quantize.static: {smoothquant: false, mixed_precision: false}\n"
INPUTS = np.random.default_rng(0).normal(size=(1200, 16)).astype("f")
SIGNAL = (np.tanh(INPUTS @ np.linspace(-0.5, 0.5, 16)) + 0.5 * np.sin(INPUTS[:, 0])).astype("f")
RARE = (INPUTS[:, 0] > 1.9).astype("int64")
"""Of 1, one sample in thirty."""
CLASSES = (INPUTS @ np.random.default_rng(1).normal(size=(16, 10))).argmax(axis=1)


class Net(nn.Sequential):
    def __init__(self, outputs):
        super().__init__(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def build_net(outputs):
    return Net(outputs)


def train(net, loss, targets, steps=400):
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    inputs, targets = torch.tensor(INPUTS[:600]), torch.tensor(targets[:600])
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(inputs), targets).backward()
        optimizer.step()
    return net


def near_a_thousand():
    net = Net(1)
    nn.init.constant_(net[4].bias, 1000.0)
    return train(net, lambda found, wanted: (found[:, 0] - wanted).square().mean(), 1000 + SIGNAL)


def offset_in_a_hidden_unit():
    """The same answers, with a unit that is always 1000 in place of the bias."""
    net = near_a_thousand()
    with torch.no_grad():
        net[2].weight[0], net[2].bias[0] = 0, 1000
        net[4].bias -= 1000
        net[4].weight[0, 0] = 1
    return net


def classes(offset=0.0):
    net = train(Net(10), functional.cross_entropy, CLASSES)
    with torch.no_grad():
        net[4].bias += offset
    return net


def vectors_around_a_common_one():
    net = Net(32)
    with torch.no_grad():
        net[4].bias += 30 * torch.randn(32, generator=torch.Generator().manual_seed(0))
    return net


def a_rare_class():
    """Two classes by the sign of one input less 1.9, whose weight is the smallest of its layer."""
    net = Net(2)
    with torch.no_grad():
        net[0].weight[0] = torch.eye(16)[0] / 100
        net[0].bias[0] = -1.9 / 100
        net[2].weight[:, 0], net[2].weight[0] = 0, torch.eye(64)[0]
        net[2].bias[0] = 0
        net[4].weight[1] = net[4].weight[0]
        net[4].weight[:, 0] = torch.tensor([0.0, 100.0])
        net[4].bias[:] = torch.tensor([1e-3, 0.0])
    return net


NETS = {
    "regression near 1000": near_a_thousand,
    "offset in a hidden unit": offset_in_a_hidden_unit,
    "logits with an offset": lambda: classes(1000.0),
    "vectors with a common mean": vectors_around_a_common_one,
    "classes": classes,
    "rare class": a_rare_class,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("fooled")


@pytest.fixture
def compress(laconic, home, monkeypatch):
    """Compress a net of NETS: the exit code, and what was said on standard error, on one line."""
    monkeypatch.setenv("LACONIC_CACHE", str(home / "cache"))
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])

    def run(name, *options, recipe=None, labels=None, rows=slice(600, None)):
        source = home / f"{name}.safetensors"
        torch.manual_seed(0)
        if not source.exists():
            save_file(NETS[name]().state_dict(), source)
        (home / "recipe.yaml").write_text(
            f"builder: test_fooled_verdict:build_net\narguments: {{outputs: {outputs_of(source)}}}\n{recipe or ''}"
        )
        arrays = {"input": INPUTS[rows]} | ({} if labels is None else {"label": labels[rows]})
        np.savez(home / "samples.npz", **arrays)
        code, out, err = laconic(
            "compress", source, "--recipe", home / "recipe.yaml", "--data", home / "samples.npz", "--trust",
            "--engine-only", "onnxruntime", "-o", home / f"{name}.laconic", *options,
        )  # fmt: skip
        return code, re.sub(r"\s+", " ", out), re.sub(r"\s+", " ", err)

    return run


def outputs_of(source):
    from safetensors import safe_open

    with safe_open(source, "pt") as file:
        return file.get_slice("4.weight").get_shape()[0]


FOOLED = {
    "regression near 1000": (PRUNED, "output 'output' against original: explained_variance is"),
    "offset in a hidden unit": (CRUDE, "output 'output' against original: explained_variance is"),
    "logits with an offset": (PRUNED, "output 'output' against original: explained_variance_centred is"),
    "vectors with a common mean": (PRUNED, "artifact against answers without information (constant): skill is"),
}


@pytest.mark.parametrize("name", FOOLED)
def test_a_useless_model_is_told_by_what_it_lost(compress, name):
    recipe, reason = FOOLED[name]
    code, _, err = compress(name, recipe=recipe)
    assert code == 3
    assert reason in err


@pytest.mark.parametrize("name", [*FOOLED, "classes"])
def test_its_sound_twin_passes(compress, name):
    code, _, err = compress(name)
    assert code == 0, err


def test_labels_bound_the_drop_without_being_asked_to(compress):
    code, _, err = compress("classes", "--fidelity", "0", recipe=PRUNED, labels=CLASSES)
    assert code == 3
    assert "metric_change is" in err
    assert "required -0.01" in err


def test_a_rare_class_that_is_lost_is_named_though_accuracy_hardly_falls(compress):
    code, _, err = compress("rare class", "--max-drop", "7%", recipe=FEWER, labels=RARE)
    assert code == 3
    assert "metric_change" not in err
    assert "class 1 against original: recall is 0 (" in err


def test_three_rows_prove_no_drop_of_one_point(compress):
    code, out, err = compress("classes", "--max-drop", "1%", labels=CLASSES, rows=slice(600, 607))
    assert code == 3
    assert "too few samples to tell, about" in err
    assert "inconclusive" in out


def test_too_few_labels_are_no_failure_where_nobody_asked(compress):
    code, out, _ = compress("classes", labels=CLASSES, rows=slice(600, 800))
    assert code == 0
    assert "inconclusive" in out
    assert "too few samples to tell, about" in out
