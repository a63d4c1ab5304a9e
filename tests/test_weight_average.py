"""The moving average of the weights, with every technique, on several ranks' terms, and in the memory plan."""

import models
import pytest
import torch
from test_parameter_settings import HOSTED, TECHNIQUES
from torch import nn

from laconic.errors import RecipeError
from laconic.models.source_loading import load_source
from train.objectives.next_token import NextToken
from train.parallel.ranks import Ranks
from train.planner.device_rates import DeviceRates, RateCurve
from train.planner.meta_model import open_meta_model
from train.planner.prediction import predict
from train.settings import Training
from train.step.train_step import train_step
from train.trainer import start_training

STEPS, DECAY = 5, 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.save_gpt2(tmp_path_factory.mktemp("m") / "gpt2")


def start(folder, **changes):
    """The state before the first step, and the batch of every step."""
    given = {"optimizer": {"sgd": {"lr": 0.05}}, "schedule": "constant", "ema": DECAY} | changes
    training = Training.model_validate(given)
    checkpoint = load_source(folder)
    objective = NextToken(checkpoint.task)
    for part in checkpoint.module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    state = start_training(checkpoint.module, objective, training, Ranks(), STEPS)
    torch.manual_seed(0)
    batch = objective.make_example(4, 10)
    return state, {name: value % 7 if name == "input_ids" else value for name, value in batch.items()}, training


def weights_of(state):
    return {name: value.float().clone() for name, value in state.module.named_parameters()}


@pytest.mark.parametrize("techniques", [[], *TECHNIQUES, ["fp16"]], ids=str)
def test_the_weights_at_the_end_are_the_average_over_the_steps(folder, techniques):
    changes = {"max_grad_norm": None} if "optimizer-in-backward" in techniques else {}
    state, batch, training = start(folder, techniques=techniques, **changes)
    average = {}
    for number in range(STEPS):
        train_step(state, batch, max_grad_norm=training.max_grad_norm)
        share = 1 - min(DECAY, (1 + number) / (10 + number)) if number else 1
        now = weights_of(state)
        average = {
            name: value.lerp(now[name], share) if number else now[name] for name, value in (average or now).items()
        }
    last = weights_of(state)
    with state.averaged_weights():
        within = weights_of(state)
    assert all(torch.equal(value, last[name]) for name, value in weights_of(state).items())
    state.keep_averages()
    after = dict(state.finish().named_parameters())
    for name, value in average.items():
        torch.testing.assert_close(after[name].float(), value, atol=1e-6, rtol=0)
        assert torch.equal(after[name].float(), within[name])
    assert any(not torch.equal(value, last[name]) for name, value in within.items())


def test_copies_on_the_device_hold_the_averages_while_these_are_evaluated(folder):
    techniques = [HOSTED, {"host-weights": {"dtype": "fp32"}}]
    state, batch, _ = start(folder, techniques=techniques)
    plain, _, _ = start(folder)
    for each in (state, plain):
        for _ in range(3):
            train_step(each, batch)
    answers = []
    for each in (state, plain):
        each.module.eval()
        with each.averaged_weights(), torch.no_grad(), each.forward_context():
            answers.append(each.loss_module(batch))
    assert float(answers[0]) == pytest.approx(float(answers[1]), abs=1e-4)


def test_an_average_in_bf16_is_refused():
    rounded = {"adamw": {"stochastic_rounding": True}}
    with pytest.raises(RecipeError, match=r"pure-bf16 and ema cannot be combined: .* Leave ema out"):
        Training.model_validate({"techniques": ["pure-bf16"], "optimizer": rounded, "ema": 0.9})


def test_the_planner_counts_the_averages(folder):
    curve = RateCurve(amounts=(1.0,), seconds=(1e-9,))
    rates = DeviceRates(name="x", kind="cpu", products={"float32": curve}, passes=curve, copies=curve)
    model = open_meta_model(folder, task="text-generation")
    plain, averaged = (predict(model, Training(ema=decay), 8, rates) for decay in (None, 0.9))
    held = sum(parameter.numel() * 4 for parameter in model.module.parameters())
    found = averaged.phases["optimizer"]["optimizer"] - plain.phases["optimizer"]["optimizer"]
    assert found == pytest.approx(held, rel=0.01)
