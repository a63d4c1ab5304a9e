"""Weights on the host: the optimizer, the loop and the checkpoint notice nothing, and the device holds two layers."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from trainable_models import MODELS, assert_same, build, gpt2, learn, make_state, texts, trace_courses, trained

from train.memory.host_weights import HostWeights
from train.memory.layerwise import Layerwise
from train.offload.memory_accounting import CATEGORIES
from train.offload.weight_provider import add_in_place
from train.planner.simulate import trace_memory
from train.step.compatibility import find_conflict
from train.step.train_step import train_step

EXACT = [HostWeights(dtype="fp32"), Layerwise()]


@pytest.mark.sweep("qwen-*")
@pytest.mark.parametrize("layers", [{}, {"rows": 1, "snapshots": 2}, {"rows": 3, "snapshots_on": "host"}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_in_fp32_losses_and_weights_are_those_of_plain_training(model, layers):
    make, batch = MODELS[model]
    techniques = [HostWeights(dtype="fp32"), Layerwise(**layers)]
    assert_same(trained(make, batch(), techniques), trained(make, batch()))


def test_micro_batches_dropout_and_frozen_weights_are_as_in_plain_training():
    assert_same(trained(gpt2, texts(), EXACT, rows=1), trained(gpt2, texts(), rows=1))
    make = partial(gpt2, dropout=0.3)
    assert_same(trained(make, texts(), EXACT), trained(make, texts()))

    def make():
        model = gpt2()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("h.1" in name or "wpe" in name)
        return model

    assert_same(trained(make, texts(), EXACT), trained(make, texts()))


def mixed(make, batch, steps=5):
    """Losses with a model in BF16 and float32 masters, in a few plain lines."""
    master = build(make).train()
    model = copy.deepcopy(master).bfloat16()
    plain = make_state(model)
    pairs = list(zip(master.parameters(), model.parameters(), strict=True))
    optimizer = torch.optim.AdamW(master.parameters(), lr=3e-3, foreach=False)
    losses = []
    for _ in range(steps):
        loss = plain.loss_module(batch) / plain.objective.count_terms(batch)
        loss.backward()
        losses.append(float(loss.detach()))
        for wide, narrow in pairs:
            wide.grad, narrow.grad = narrow.grad.float(), None
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        for wide, narrow in pairs:
            narrow.data.copy_(wide.data)
    return losses


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_in_bf16_losses_are_those_of_mixed_precision_with_float32_masters(model):
    make, batch = MODELS[model]
    losses, weights = trained(make, batch(), [HostWeights(), Layerwise()])
    assert losses == pytest.approx(mixed(make, batch()), abs=2e-3)
    assert losses == pytest.approx(trained(make, batch())[0], rel=0.02)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_weights_are_float32_at_any_time_and_evaluation_sees_what_was_learned():
    state = make_state(build(gpt2), [HostWeights(), Layerwise()])
    before = {name: weight.clone() for name, weight in state.weights().items()}
    assert list(before) == list(build(gpt2).state_dict())
    learn(state, texts(), steps=1)
    after = state.weights()
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert all(
        not torch.equal(before[name], after[name]) for name in ("transformer.wte.weight", "transformer.ln_f.bias")
    )
    state = make_state(build(gpt2), EXACT)
    learn(state, texts(), steps=2)
    with torch.no_grad(), state.forward_context():
        during = float(state.loss_module(texts()))
    with torch.no_grad():
        assert during == pytest.approx(float(state.objective.loss(state.finish(), texts())), abs=1e-4)


def test_the_state_of_the_optimizer_goes_into_plain_training_and_back():
    host = make_state(build(gpt2), EXACT)
    learn(host, texts(), steps=2)
    plain = make_state(build(gpt2))
    plain.module.load_state_dict(host.weights())
    plain.optimizer.load_state_dict(copy.deepcopy(host.optimizer.state_dict()))
    assert learn(plain, texts(), steps=2) == pytest.approx(learn(host, texts(), steps=2), abs=1e-5)
    assert host.optimizer.state_dict().keys() == plain.optimizer.state_dict().keys()


def test_undone_the_module_is_plain_again():
    model = build(gpt2)
    state = make_state(model, [HostWeights(), Layerwise()])
    learn(state, texts(), steps=1)
    finished = state.finish()
    assert finished is model
    assert type(model.transformer.h) is nn.ModuleList
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in model.parameters())
    assert learn(make_state(model), texts(), steps=1)[0] < 4.2


@pytest.mark.sweep("llama")
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_the_simulated_peaks_are_those_of_real_tensors(model):
    make, batch = MODELS[model]
    found, watched = trace_courses(make, batch(), [HostWeights(), Layerwise(rows=2, snapshots_on="host")])
    assert found.peak() == pytest.approx(watched.peak(), rel=0.01)
    assert found.host.max() == pytest.approx(watched.host.max(), rel=0.01)


def test_the_device_holds_no_more_than_two_layers_and_a_copy_of_the_rest():
    model = build(gpt2)
    size = sum(parameter.numel() for parameter in model.parameters())
    layer = sum(parameter.numel() for parameter in model.transformer.h[0].parameters())
    rest = size - len(model.transformer.h) * layer

    def real():
        return make_state(model, [HostWeights(), Layerwise(rows=1)]), texts()

    course = trace_memory(real, torch.device("cpu"))
    device, host = ({name: values.max() for name, values in course.series(side).items()} for side in ("device", "host"))
    assert device["parameters"] <= 2 * (2 * layer + rest)
    assert device["optimizer"] == 0
    assert 8 * size <= host["optimizer"] < 8.1 * size
    assert 4 * size <= host["gradients"] <= 4 * (size + 2 * layer + rest)
    assert host["parameters"] == 4 * size + 2 * (size - rest)
    assert set(device) == set(CATEGORIES)


def test_what_cannot_be_combined_is_refused():
    assert "works on top of layerwise" in str(find_conflict({"host-weights": HostWeights()}, None))
    for other in HostWeights.excludes:
        conflict = find_conflict({"host-weights": HostWeights(), "layerwise": Layerwise(), other: Layerwise()}, None)
        assert f"host-weights and {other} cannot be combined" in str(conflict)


@pytest.mark.gpu
def test_on_a_gpu_the_weights_are_on_the_host_and_the_losses_those_of_plain_training():
    wanted, _ = trained(gpt2, texts())
    state = make_state(build(gpt2), EXACT, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in texts().items()}
    assert [float(train_step(state, batch, max_grad_norm=1.0)) for _ in range(5)] == pytest.approx(wanted, abs=1e-4)
    assert {parameter.device.type for parameter in state.module.parameters()} == {"cpu"}


@pytest.mark.parametrize("shape", [(), (3,), (37, 64), (64, 8, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_is_added_to_a_wider_sum_as_torch_adds_it(shape, dtype):
    total, gradient = torch.randn(shape), torch.randn(shape).to(dtype)
    expected = total.clone().add_(gradient)
    assert add_in_place(total, gradient) is total
    assert torch.equal(total, expected)


def test_a_narrower_gradient_is_not_cast_as_a_whole():
    total, gradient = torch.zeros(256, 64), torch.ones(256, 64, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        add_in_place(total, gradient)
    sizes = [event.self_cpu_memory_usage for event in found.events() if event.self_cpu_memory_usage > 0]
    assert 0 < max(sizes) <= total.nbytes // 16
