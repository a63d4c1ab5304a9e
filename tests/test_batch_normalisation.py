"""Techniques on layers that keep statistics of the batches that they have seen."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.config import NamedSettings
from train.objectives.cross_entropy import CrossEntropy
from train.optimizers.adamw import AdamW
from train.settings import TrainingComponents
from train.step.objective import TARGETS
from train.step.train_step import train_step
from train.step_assembly import make_step_parts


class Block(nn.Module):
    """[batch, 4, height, width], statistics by momentum and by the mean of all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.first = nn.BatchNorm2d(4)
        self.second = nn.BatchNorm2d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(self.convolution(x)).relu())


def trained(module: nn.Module, **techniques: Any) -> dict[str, Tensor]:
    """The weights and statistics after three steps."""
    found = {
        name: NamedSettings(name=name, config=config).configure("technique") for name, config in techniques.items()
    }
    components = TrainingComponents(AdamW(), None, found)
    state = make_step_parts(module, CrossEntropy(None), components, torch.device("cpu")).assemble()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        image = torch.randn(6, 4, 4, 4, generator=generator)
        train_step(state, {"image": image, TARGETS: torch.tensor([0, 1, 2, 0, 1, 2])})
    return state.finish().state_dict()


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_checkpoint_counts_a_batch_once(policy):
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block(), Block())
    module = nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    plain = trained(copy.deepcopy(module))
    for name, value in trained(module, **{"gradient-checkpointing": {"policy": policy}}).items():
        assert torch.equal(value, plain[name]), name
