"""Stepping in the backward pass gives the same parameters to the bit."""

import copy

import pytest
import torch
from torch import Tensor, nn

from train.memory.gradient_accumulation import GradientAccumulation
from train.memory.optimizer_in_backward import OptimizerInBackward
from train.objectives.cross_entropy import CrossEntropy
from train.optimizers.adafactor import Adafactor
from train.optimizers.adamw import AdamW
from train.optimizers.low_bit import AdamW8bit
from train.optimizers.optimizer import Optimizer, parameter_groups
from train.optimizers.sgd import Sgd
from train.step.compatibility import find_conflict
from train.step.objective import TARGETS, Batch
from train.step.step_parts import StepParts
from train.step.train_state import TrainState
from train.step.train_step import train_step


class Tied(nn.Module):
    """A table that is used twice, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.layer = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids).mean(dim=1)
        return self.layer(self.frozen(self.layer(hidden)).tanh()) @ self.table.weight.T


def make_state(optimizer: Optimizer, technique: OptimizerInBackward | None) -> tuple[TrainState, Batch]:
    torch.manual_seed(0)
    module = Tied()
    parts = StepParts(module, CrossEntropy(None), optimizer.build, lambda module: parameter_groups(module, 0.1))
    if technique:
        technique.apply(parts)
    state = parts.assemble()
    return state, {"ids": torch.randint(0, 12, (6, 4)), TARGETS: torch.arange(6)}


OPTIMIZERS = [
    AdamW(lr=0.01, implementation="fused"),
    AdamW(lr=0.01, implementation="foreach"),
    AdamW(lr=0.01, implementation="loop"),
    Sgd(lr=0.1),
    Adafactor(lr=0.01),
    AdamW8bit(lr=0.01),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_the_parameters_are_the_same_to_the_bit(optimizer):
    states = [make_state(optimizer, technique) for technique in (None, OptimizerInBackward())]
    for state, batch in states:
        schedule = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda number: 1 / (1 + number))
        for _ in range(4):
            train_step(state, batch)
            schedule.step()
    (plain, _), (early, _) = states
    assert plain.optimizer.param_groups[0]["lr"] == early.optimizer.param_groups[0]["lr"]
    for a, b in zip(plain.module.parameters(), early.module.parameters(), strict=True):
        assert torch.equal(a, b)
    states = [state.optimizer.state_dict()["state"] for state, _ in states]
    assert all(str(states[0][number]) == str(states[1][number]) for number in states[0])


def test_never_are_two_gradients_there_and_a_saved_state_is_taken_up_again():
    state, batch = make_state(AdamW(), OptimizerInBackward())
    together = []

    def count(parameter: Tensor) -> None:
        together.append(sum(one.grad is not None for one in state.module.parameters()))

    for parameter in state.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(count)
    train_step(state, batch)
    assert together == [0, 0, 0]
    assert all(one.grad is None for one in state.module.parameters())
    first, batch = make_state(AdamW(lr=0.01), OptimizerInBackward())
    train_step(first, batch)
    second, _ = make_state(AdamW(lr=0.01), OptimizerInBackward())
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for state in (first, second):
        train_step(state, batch)
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_needs_the_whole_gradient_is_refused_with_the_reason():
    techniques = {"optimizer-in-backward": OptimizerInBackward(), "gradient-accumulation": GradientAccumulation(rows=2)}
    assert "wait for the last" in str(find_conflict(techniques, AdamW()))
    assert "Set max_grad_norm: null" in str(
        find_conflict({"optimizer-in-backward": OptimizerInBackward()}, AdamW(), max_grad_norm=1.0)
    )
    assert find_conflict({"optimizer-in-backward": OptimizerInBackward()}, AdamW()) is None
