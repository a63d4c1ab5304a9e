"""A step: the gradient of a batch's mean loss, however the batch is cut."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainable_models import build, gpt2, make_state, texts

from laconic.models.language_model import LanguageModel
from laconic.tasks.token_positions import IGNORED
from train.objectives.next_token import NextToken
from train.step.objective import TARGETS, Batch, Objective
from train.step.step_parts import StepParts
from train.step.train_state import TrainState
from train.step.train_step import train_step
from train.step.trained_modules import trainable_parameters


@functools.cache
def language_model() -> LanguageModel:
    return LanguageModel(build(gpt2))


def ragged(lengths: list[int]) -> Batch:
    """Texts of these lengths, padded to the longest; a term for each token."""
    width = max(lengths)
    ids = torch.randint(1, 61, (len(lengths), width), generator=torch.Generator().manual_seed(len(lengths)))
    mask = (torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, TARGETS: ids.masked_fill(mask == 0, IGNORED)}


class Still(torch.optim.SGD):
    """Keeps the gradients that it is to step with, and steps nowhere."""

    def step(self, closure=None):
        self.seen = [parameter.grad.clone() for group in self.param_groups for parameter in group["params"]]


def still(
    module: nn.Module, objective: Objective, *, rows: int | None = None, scaler: torch.amp.GradScaler | None = None
) -> TrainState:
    parts = StepParts(
        module=module.train(),
        objective=objective,
        make_optimizer=lambda groups: Still(groups, lr=1.0),
        group_parameters=lambda module: [{"params": trainable_parameters(module)}],
    )
    if rows is not None:
        parts.accumulate_gradients(rows)
    if scaler is not None:
        parts.scale_loss(scaler)
    return parts.assemble()


def gradient(state: TrainState, batch: Batch, **given) -> tuple[float, list[torch.Tensor]]:
    loss = float(train_step(state, batch, **given))
    return loss, state.optimizer.seen


@settings(max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 8))
def test_a_ragged_batch_has_one_loss_and_one_gradient_however_it_is_cut(lengths, rows):
    batch = ragged(lengths)
    loss, whole = gradient(still(language_model(), NextToken(None)), batch)
    cut_loss, cut = gradient(still(language_model(), NextToken(None), rows=rows), batch)
    assert cut_loss == pytest.approx(loss, abs=1e-5)
    for a, b in zip(cut, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_clipped_to_its_norm_and_scaled_back():
    batch = ragged([7, 3])
    _, free = gradient(still(language_model(), NextToken(None)), batch)
    norm = float(torch.stack([each.norm() for each in free]).norm())
    _, clipped = gradient(still(language_model(), NextToken(None), rows=1), batch, max_grad_norm=norm / 4)
    for a, b in zip(clipped, free, strict=True):
        torch.testing.assert_close(a, b / 4, rtol=1e-4, atol=1e-6)
    _, left = gradient(still(language_model(), NextToken(None)), batch, max_grad_norm=2 * norm)
    for a, b in zip(left, free, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    batch = ragged([4, 6])
    off = gradient(still(language_model(), NextToken(None)), batch, max_grad_norm=1.0)
    on = still(language_model(), NextToken(None), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    loss, scaled = gradient(on, batch, max_grad_norm=1.0)
    assert loss == pytest.approx(off[0], abs=1e-6)
    for a, b in zip(scaled, off[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_an_overflow_is_left_out_and_the_scale_falls():
    module = copy.deepcopy(language_model())
    state = still(module, NextToken(None), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    train_step(state, ragged([4, 6]))
    assert not hasattr(state.optimizer, "seen")
    assert state.scaler.get_scale() == 2.0**126
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_step_leaves_no_gradient_behind_and_tells_its_phases_and_the_last_micro_batch():
    state = make_state(build(gpt2), rows=2)
    loss = train_step(state, texts())
    assert not loss.requires_grad
    assert all(parameter.grad is None for parameter in state.module.parameters())
    told = []
    state = make_state(build(gpt2), rows=3)
    state.strategy.synchronize_gradients = lambda loss_module, last: told.append(last) or nullcontext()
    train_step(state, texts())
    assert told == [False, True]
    seen = []
    state = make_state(build(gpt2), rows=2)
    with state.observe_phases(lambda name: seen.append(name) or nullcontext()):
        train_step(state, texts())
    assert seen == ["forward", "backward", "forward", "backward", "optimizer"]
