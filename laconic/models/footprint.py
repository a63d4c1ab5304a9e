"""What a model takes: parameters, bytes, multiply-adds."""

import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from laconic.models.checkpoint import Checkpoint
from laconic.models.flop_formulas import uncounted_kernels
from laconic.models.signature import call

LENGTH = 128
"""Of the free axes where multiply-adds are counted, as tokens of a text, where the bounds allow."""
SHOWN_ZEROS = 0.01
"""The share of zeros from which on they are told of: a few come by themselves."""


@dataclass(frozen=True)
class Footprint:
    """parameters: numbers that were learned, tied ones once. bytes: of all weights, in memory. multiply_adds: of one
    sample; products of matrices, convolutions and attention, zeros not left out. zeros: share of the parameters."""

    parameters: int
    bytes: int
    multiply_adds: int
    zeros: float

    def figures(self) -> dict[str, float]:
        """As they stand in the history."""
        found: dict[str, float] = {
            "parameters": self.parameters,
            "bytes": self.bytes,
            "multiply-adds": self.multiply_adds,
        }
        return found | ({"zeros": round(self.zeros, 4)} if self.zeros >= SHOWN_ZEROS else {})


def footprint(checkpoint: Checkpoint) -> Footprint:
    """Of a checkpoint's module."""
    parameters = list(checkpoint.module.parameters())
    count = sum(each.numel() for each in parameters)
    zeros = sum(int((each == 0).sum()) for each in parameters)
    return Footprint(
        parameters=count,
        bytes=sum(each.nbytes for each in (*parameters, *checkpoint.module.buffers())),
        multiply_adds=multiply_adds(checkpoint),
        zeros=zeros / max(count, 1),
    )


def multiply_adds(checkpoint: Checkpoint) -> int:
    """Of one sample, LENGTH long where its length is free."""
    module: nn.Module = checkpoint.module
    tensors = {name: torch.tensor(array) for name, array in checkpoint.task.typical(1, LENGTH).items()}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the counter, about hooks by module; only the sum is used
        with FlopCounterMode(display=False, custom_mapping=uncounted_kernels()) as counter:
            call(module, tensors)
    return int(counter.get_total_flops()) // 2
