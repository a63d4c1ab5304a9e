"""Weights are read by the names that fit the module, whatever wrapper saved them; what was done is said."""

import copy
import shutil

import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from export.sources import open_original_source
from laconic.errors import SourceError
from laconic.models.source_loading import load_source
from laconic.tensor import TensorSpec
from train.finetune.head import open_for
from train.settings import TrainingRecipe

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # by torch.compile

INPUTS = (TensorSpec(name="x", dtype="float32", shape=("batch", 4)),)
OPTIONS = {"builder": "models:Perceptron", "arguments": {"widths": [4, 8, 3]}, "inputs": INPUTS}


def perceptron():
    return models.randomize(models.Perceptron([4, 8, 3]))


def prefixed(prefix, state):
    return {f"{prefix}.{name}": value for name, value in state.items()}


def regional(module):
    module = copy.deepcopy(module)
    module.layers[0] = torch.compile(module.layers[0])
    return module.state_dict()


FORMS = {
    "compiled": (lambda module: torch.compile(module).state_dict(), "'_orig_mod.'"),
    "data parallel": (lambda module: nn.DataParallel(module).state_dict(), "'module.'"),
    "both": (lambda module: prefixed("module._orig_mod", module.state_dict()), "'module._orig_mod.'"),
    "one region": (regional, "'_orig_mod.'"),
    "averaged": (lambda module: AveragedModel(module).state_dict(), "'module.'"),
    "an attribute": (lambda module: prefixed("encoder", module.state_dict()), "'encoder.'"),
    "half": (lambda module: prefixed("net", module.half().state_dict()), "'net.'"),
}
NESTED = {
    "Lightning": (
        lambda state: {"state_dict": prefixed("model", state) | {"loss.weight": torch.ones(3)}, "epoch": 1},
        "under 'state_dict'; removed 'model.' from the names of the weights; ignored 1 weights",
    ),
    "DeepSpeed": (lambda state: {"module": state, "global_steps": 7}, "under 'module'"),
    "net": (lambda state: {"net": state, "epoch": torch.tensor(1)}, "under 'net'"),
    "twice": (lambda state: {"model": {"state_dict": prefixed("module", state)}}, "under 'model.state_dict'"),
}


def check(checkpoint, state):
    assert checkpoint.module.state_dict().keys() == state.keys()
    for name, value in checkpoint.module.state_dict().items():
        torch.testing.assert_close(value, state[name].float())


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("form", FORMS)
def test_a_prefix_is_removed_where_the_names_then_fit_and_is_said(tmp_path, caplog, form, suffix):
    wrap, said = FORMS[form]
    module, path = perceptron(), tmp_path / f"model{suffix}"
    content = {name: value.clone() for name, value in wrap(module).items()}
    save_file(content, path) if suffix == ".safetensors" else torch.save(content, path)
    check(load_source(path, **OPTIONS), module.state_dict())
    assert f"removed {said} from the names" in caplog.text


@pytest.mark.parametrize("form", NESTED)
def test_common_keys_of_training_scripts_are_recognized_and_said(tmp_path, caplog, form):
    wrap, said = NESTED[form]
    state = perceptron().state_dict()
    torch.save(wrap(state), tmp_path / "model.pt")
    check(load_source(tmp_path / "model.pt", **OPTIONS), state)
    assert said in caplog.text


def test_shards_of_deepspeed_are_refused_with_the_script_that_gathers_them(tmp_path):
    state = {name: torch.empty(0) for name in perceptron().state_dict()}
    torch.save({"module": state, "param_shapes": [{"0.weight": torch.Size([2, 2])}]}, tmp_path / "model.pt")
    with pytest.raises(SourceError, match=r"ZeRO 3 and holds no values.*zero_to_fp32\.py \. weights --safe_ser"):
        load_source(tmp_path / "model.pt", **OPTIONS)


def test_plain_weights_are_read_without_a_word(tmp_path, caplog):
    state = perceptron().state_dict()
    torch.save(state, tmp_path / "model.pt")
    check(load_source(tmp_path / "model.pt", **OPTIONS), state)
    assert not caplog.text


@pytest.mark.parametrize("wrap", [lambda module: module, nn.DataParallel, torch.compile])
def test_an_attribute_that_is_called_as_a_wrapper_keeps_its_name(tmp_path, wrap):
    module = models.Enclosing()
    torch.save(wrap(module).state_dict(), tmp_path / "model.pt")
    check(load_source(tmp_path / "model.pt", builder="models:Enclosing", inputs=INPUTS), module.state_dict())


def test_raw_weights_come_before_averaged_ones_which_can_be_chosen(tmp_path, caplog):
    raw, averaged = perceptron().state_dict(), perceptron().state_dict()
    torch.save({"model": raw, "ema": {"decay": 0.9, "module": averaged}}, tmp_path / "model.pt")
    check(load_source(tmp_path / "model.pt", **OPTIONS), raw)
    assert "took the weights under 'model'; those under 'ema.module' fit, too: choose with --weights-key" in caplog.text
    for key in ("ema", "ema.module"):
        checkpoint = load_source(tmp_path / "model.pt", weights_key=key, **OPTIONS)
        check(checkpoint, averaged)
        assert checkpoint.source["weights_key"] == key
    torch.save({"state_dict": prefixed("model", raw) | prefixed("ema_model", averaged)}, tmp_path / "model.ckpt")
    check(load_source(tmp_path / "model.ckpt", **OPTIONS), raw)
    assert "'state_dict.ema_model' fit, too" in caplog.text
    check(load_source(tmp_path / "model.ckpt", weights_key="state_dict.ema_model", **OPTIONS), averaged)


@pytest.mark.parametrize(
    ("wrap", "key", "said"),
    [
        (lambda one, two: {"generator": one, "critic": two}, None, "'generator', 'critic', and .*-key generator"),
        (lambda one, two: prefixed("student", one) | prefixed("teacher", two), None, "with --weights-key student"),
        (lambda one, two: {"ema": one}, None, r"Choose with --weights-key ema \(in a recipe weights_key\)"),
        (lambda one, two: {"model": one}, "ema", "nothing under --weights-key 'ema'. At its top are model"),
        (lambda one, two: {"model": {"more": two["layers.0.bias"]}}, None, r"4 missing .*; 1 unexpected \(more\)"),
        (lambda one, two: {"epoch": 1}, None, "holds no weights by name"),
        (lambda one, two: [1, 2], "ema", "nothing under --weights-key 'ema'. At its top are no keys"),
    ],
)  # fmt: skip
def test_what_only_a_key_can_tell_is_asked_for(tmp_path, wrap, key, said):
    torch.save(wrap(perceptron().state_dict(), perceptron().state_dict()), tmp_path / "model.pt")
    with pytest.raises(SourceError, match=said):
        load_source(tmp_path / "model.pt", weights_key=key, **OPTIONS)


def test_a_key_is_for_files_alone(tmp_path):
    with pytest.raises(SourceError, match="--weights-key has no use"):
        load_source(tmp_path, weights_key="ema")


def test_an_artifact_remembers_which_weights_it_was_made_from(laconic, tmp_path):
    raw, averaged = models.Enclosing().state_dict(), models.Enclosing().state_dict()
    torch.save({"model": raw, "ema": averaged}, tmp_path / "model.pt")
    np.savez(tmp_path / "rows.npz", x=np.random.default_rng(0).normal(size=(200, 4)).astype("float32"))
    code, _, err = laconic(
        "export", tmp_path / "model.pt", "--builder", "models:Enclosing", "--weights-key", "ema",
        "--data", tmp_path / "rows.npz", "-o", tmp_path / "made",
    )  # fmt: skip
    assert code == 0, err
    original = open_original_source(tmp_path / "model.pt", tmp_path / "made", builder="models:Enclosing", trust=False)
    check(original.checkpoint, averaged)
    original = ("--original", tmp_path / "model.pt", "--builder", "models:Enclosing")
    for command in (("bench", "--rounds", "1", "--batches", "1"), ("tune",), ("build", "-o", tmp_path / "again")):
        code, _, err = laconic(command[0], tmp_path / "made", *command[1:], *original)
        assert code == 0, err
    torch.save({"model": raw, "ema": raw}, tmp_path / "model.pt")
    code, _, err = laconic("build", tmp_path / "made", *original, "-o", tmp_path / "other")
    assert code != 0
    assert "gives another graph" in err


def test_training_starts_from_the_weights_of_the_key(tmp_path):
    raw, averaged = models.Enclosing().state_dict(), models.Enclosing().state_dict()
    torch.save({"model": raw, "ema": averaged}, tmp_path / "model.pt")
    np.savez(tmp_path / "rows.npz", x=np.zeros((20, 4), np.float32))
    keys = {"source": str(tmp_path / "model.pt"), "builder": "models:Enclosing", "data": str(tmp_path / "rows.npz")}
    for key, state in (("ema", averaged), ("model", raw)):
        check(open_for(TrainingRecipe.model_validate({**keys, "weights_key": key}), trust=True), state)


@pytest.mark.parametrize("prefix", ["_orig_mod", "module._orig_mod", "net"])
def test_a_folder_of_transformers_opens_whose_weights_have_a_prefix(tmp_path, caplog, prefix):
    models.save_bert(tmp_path / "bert")
    expected = load_source(tmp_path / "bert").module.state_dict()
    assert not caplog.text
    weights = prefixed(prefix, load_file(tmp_path / "bert" / "model.safetensors"))
    shutil.copytree(tmp_path / "bert", tmp_path / "other")
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    check(load_source(tmp_path / "other"), expected)
    assert f"removed '{prefix}.' from the names of the weights" in caplog.text
    weights.pop(next(name for name in weights if name.endswith("classifier.weight")))
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match="has no weights for"):
        load_source(tmp_path / "other")


def test_a_folder_of_transformers_opens_of_which_one_block_was_compiled(tmp_path):
    models.save_bert(tmp_path / "bert")
    expected = load_source(tmp_path / "bert").module.state_dict()
    weights = load_file(tmp_path / "bert" / "model.safetensors")
    weights = {name.replace("layer.0.", "layer.0._orig_mod."): value for name, value in weights.items()}
    save_file(weights, tmp_path / "bert" / "model.safetensors", metadata={"format": "pt"})
    check(load_source(tmp_path / "bert"), expected)
