"""The size and cost of a model: parameters, bytes, multiply-adds."""

import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from laconic.models.checkpoint import Checkpoint
from laconic.models.flop_formulas import uncounted_kernels
from laconic.models.signature import call

LENGTH = 128
"""The size of free axes, as tokens of a text, for which multiply-adds are counted, where the bounds allow."""
SHOWN_ZEROS = 0.01
"""The least share of zeros that is reported: trained models have a few."""


@dataclass(frozen=True)
class Footprint:
    """Size and cost of a module.

    parameters: their number, tied ones counted once. bytes: parameters and buffers in memory. multiply_adds: of one
    sample, in matrix products, convolutions and attention, multiplications by zero included. zeros: share of the
    parameters, 0 to 1.
    """

    parameters: int
    bytes: int
    multiply_adds: int
    zeros: float

    def figures(self) -> dict[str, float]:
        """Return the figures of a history record."""
        figures: dict[str, float] = {
            "parameters": self.parameters,
            "bytes": self.bytes,
            "multiply-adds": self.multiply_adds,
        }
        return figures | ({"zeros": round(self.zeros, 4)} if self.zeros >= SHOWN_ZEROS else {})


def measure_footprint(checkpoint: Checkpoint) -> Footprint:
    """Measure the footprint of a checkpoint's module."""
    parameters = list(checkpoint.module.parameters())
    count = sum(each.numel() for each in parameters)
    zeros = sum(int((each == 0).sum()) for each in parameters)
    return Footprint(
        parameters=count,
        bytes=sum(each.nbytes for each in (*parameters, *checkpoint.module.buffers())),
        multiply_adds=count_multiply_adds(checkpoint),
        zeros=zeros / max(count, 1),
    )


def count_multiply_adds(checkpoint: Checkpoint) -> int:
    """Count the multiply-adds of one sample, LENGTH long where its length is free."""
    module: nn.Module = checkpoint.module
    tensors = {name: torch.tensor(array) for name, array in checkpoint.task.typical(1, LENGTH).items()}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the counter, about hooks by module; only the sum is used
        with FlopCounterMode(display=False, custom_mapping=uncounted_kernels()) as counter:
            call(module, tensors)
    return int(counter.get_total_flops()) // 2
