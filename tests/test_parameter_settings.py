"""Parameters that are frozen by pattern, and learning rates that fall from layer to layer, with every technique."""

import models
import pytest
import torch
from torch import nn

from laconic.errors import RecipeError
from laconic.models.source_loading import load_source
from train.objectives.next_token import NextToken
from train.parallel.ranks import Ranks
from train.planner.device_rates import DeviceRates, RateCurve
from train.planner.meta_model import open_meta_model
from train.planner.prediction import predict
from train.settings import Training
from train.step.parameter_settings import is_match
from train.step.train_step import train_step
from train.trainer import start_training

GIVEN = {"optimizer": {"adamw": {"lr": 0.01}}, "freeze": ["wte", "h.0.mlp"], "layer_decay": 0.5}
HOSTED = {"layerwise": {"snapshots_on": "host"}}
TECHNIQUES = [
    ["gradient-checkpointing"],
    [{"gradient-accumulation": {"rows": 2}}],
    ["chunked-cross-entropy"],
    [{"chunked-cross-entropy": {"defer": True}}],
    [{"activation-offload": {"min_bytes": 0}}],
    [{"layerwise": {"rows": 2, "snapshots": 1}}],
    [HOSTED, {"host-weights": {"dtype": "fp32"}}],
    [HOSTED, {"host-weights": {"dtype": "fp32"}}, {"chunked-cross-entropy": {"defer": True}}],
    ["optimizer-in-backward"],
    ["gradient-checkpointing", "optimizer-in-backward", {"chunked-cross-entropy": {"defer": True}}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.save_gpt2(tmp_path_factory.mktemp("m") / "gpt2")


def learn(folder, **changes):
    """The losses, the state and the weights after three steps, beside those before."""
    training = Training.model_validate(GIVEN | {"schedule": "constant"} | changes)
    checkpoint = load_source(folder)
    before = {name: value.clone() for name, value in checkpoint.module.state_dict().items()}
    objective = NextToken(checkpoint.task)
    for part in checkpoint.module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    state = start_training(checkpoint.module, objective, training, Ranks(), 3)
    torch.manual_seed(0)
    batch = objective.make_example(4, 10)
    batch = {name: value % 7 if name == "input_ids" else value for name, value in batch.items()}
    losses = [float(train_step(state, batch, max_grad_norm=training.max_grad_norm)) for _ in range(3)]
    return losses, state, state.finish(), before


@pytest.mark.parametrize("techniques", TECHNIQUES, ids=str)
def test_frozen_parameters_and_scaled_rates_are_those_of_plain_training_with_every_technique(folder, techniques):
    changes = {"optimizer": {"sgd": {"lr": 0.05}}}  # Adam divides by the size of a gradient, rounding included
    changes |= {"max_grad_norm": None} if "optimizer-in-backward" in techniques else {}
    plain, _, wanted, before = learn(folder, **changes)
    losses, _, found, _ = learn(folder, techniques=techniques, **changes)
    assert losses == pytest.approx(plain, abs=1e-5)
    assert losses[-1] < losses[0]
    after = found.state_dict()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(after[name], value, atol=1e-5, rtol=0)
        is_frozen = "wte" in name or "lm_head" in name or "h.0.mlp" in name
        assert torch.equal(after[name], before[name]) == is_frozen, name
    assert all(parameter.requires_grad for parameter in found.parameters())


def test_rates_fall_from_the_head_to_the_embeddings(folder):
    _, state, module, _ = learn(folder, freeze=[])
    names = {parameter: name for name, parameter in module.named_parameters()}
    rates = {names[each]: group["lr"] for group in state.optimizer.param_groups for each in group["params"]}
    layers = len({name.split(".h.")[1].split(".")[0] for name in rates if ".h." in name})
    assert state.optimizer.param_groups[0]["lr"] == 0.01, "the rate that is shown is the whole one"
    for name, rate in rates.items():
        depth = int(name.split(".h.")[1].split(".")[0]) + 1 if ".h." in name else layers + 1 if "ln_f" in name else 0
        assert rate == pytest.approx(0.01 * 0.5 ** (layers + 1 - depth)), name


def test_a_name_matches_whole_parts_of_a_path():
    assert is_match("model.h.1.mlp.weight", "h.1")
    assert is_match("model.h.1.mlp.weight", "mlp.weight")
    assert is_match("model.h.1.mlp.weight", "h.*.mlp")
    assert not is_match("model.h.11.mlp.weight", "h.1")
    assert not is_match("model.wpeh.1.weight", "h.1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"freeze": ["wtf"]}, "freeze: no parameter matches 'wtf'. Did you mean 'wte'"),
        ({"freeze": ["*"]}, "nothing is left to train"),
        ({"techniques": ["lora"]}, "freeze and lora cannot be combined"),
    ],
)
def test_what_cannot_be_frozen_is_answered_in_one_sentence(folder, changes, said):
    with pytest.raises(RecipeError, match=said):
        learn(folder, **changes)


def test_layer_decay_needs_repeated_layers_and_the_planner_counts_no_gradients_of_what_is_frozen(folder):
    training = Training(layer_decay=0.5)
    with pytest.raises(RecipeError, match="has no repeated layers"):
        start_training(nn.Linear(2, 2), NextToken(None), training, Ranks(), 1)
    curve = RateCurve(amounts=(1.0,), seconds=(1e-9,))
    rates = DeviceRates(name="x", kind="cpu", products={"float32": curve}, passes=curve, copies=curve)
    model = open_meta_model(folder, task="text-generation")
    whole, part = (predict(model, Training(freeze=names), 8, rates) for names in ((), ("wte", "h.1")))
    assert sum(part.at_peak.values()) < sum(whole.at_peak.values())
    assert part.phases["optimizer"]["optimizer"] < whole.phases["optimizer"]["optimizer"]
