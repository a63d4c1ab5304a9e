"""Stepping in the backward pass gives the same parameters to the bit."""

import copy

import pytest
import torch
from torch import Tensor, nn

from laconic.memory.gradient_accumulation import GradientAccumulation
from laconic.memory.optimizer_in_backward import OptimizerInBackward
from laconic.training.objectives.cross_entropy import CrossEntropy
from laconic.training.optimizers import parameter_groups
from laconic.training.optimizers.adafactor import Adafactor
from laconic.training.optimizers.adamw import AdamW
from laconic.training.optimizers.low_bit import AdamW8bit
from laconic.training.optimizers.optimizer import Optimizer
from laconic.training.optimizers.sgd import Sgd
from laconic.training.step.legality import conflict
from laconic.training.step.objective import TARGETS, Batch
from laconic.training.step.parts import Kit
from laconic.training.step.step import step


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


def kit_for(optimizer: Optimizer, technique: OptimizerInBackward | None) -> tuple[Kit, Batch]:
    torch.manual_seed(0)
    module = Tied()
    kit = Kit(module, CrossEntropy(None), optimizer.build, lambda module: parameter_groups(module, 0.1))
    if technique:
        technique.apply(kit)
    kit.assemble()
    return kit, {"ids": torch.randint(0, 12, (6, 4)), TARGETS: torch.arange(6)}


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
    kits = [kit_for(optimizer, technique) for technique in (None, OptimizerInBackward())]
    for kit, batch in kits:
        schedule = torch.optim.lr_scheduler.LambdaLR(kit.optimizer, lambda number: 1 / (1 + number))
        for _ in range(4):
            step(kit, batch)
            schedule.step()
    (plain, _), (early, _) = kits
    assert plain.optimizer.param_groups[0]["lr"] == early.optimizer.param_groups[0]["lr"]
    for a, b in zip(plain.module.parameters(), early.module.parameters(), strict=True):
        assert torch.equal(a, b)
    states = [kit.optimizer.state_dict()["state"] for kit, _ in kits]
    assert all(str(states[0][number]) == str(states[1][number]) for number in states[0])


def test_no_gradient_is_left_and_never_are_two_there():
    kit, batch = kit_for(AdamW(), OptimizerInBackward())
    together = []

    def count(parameter: Tensor) -> None:
        together.append(sum(one.grad is not None for one in kit.module.parameters()))

    for parameter in kit.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(count)
    step(kit, batch)
    assert together == [0, 0, 0]
    assert all(one.grad is None for one in kit.module.parameters())


def test_a_state_that_was_saved_is_taken_up_again():
    first, batch = kit_for(AdamW(lr=0.01), OptimizerInBackward())
    step(first, batch)
    second, _ = kit_for(AdamW(lr=0.01), OptimizerInBackward())
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for kit in (first, second):
        step(kit, batch)
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_taken_off_the_gradient_stays():
    kit, batch = kit_for(AdamW(), OptimizerInBackward())
    kit.finish()
    kit.lesson(batch).backward()
    assert kit.module.table.weight.grad is not None


def test_what_needs_the_whole_gradient_is_refused_with_the_reason():
    techniques = {"optimizer-in-backward": OptimizerInBackward(), "gradient-accumulation": GradientAccumulation(rows=2)}
    assert "wait for the last" in str(conflict(techniques, AdamW()))
    assert "Set clip: null" in str(conflict({"optimizer-in-backward": OptimizerInBackward()}, AdamW(), clip=1.0))
    assert conflict({"optimizer-in-backward": OptimizerInBackward()}, AdamW()) is None
