"""Rounding to BF16 that keeps what is smaller than the last digit, on average."""

import torch
from torch import Tensor


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """BF16 neighbours of finite float32 values, the nearer one the more often, so that the mean is the value.

    BF16 has 8 bits of mantissa: rounding to nearest drops every update below 1/512 of its weight, and training stands
    still. (Zamirai et al., Revisiting BFloat16 Training, arXiv 2010.06192.) Same shape as `values`.
    """
    bits = values.view(torch.int32)
    low = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return low.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()
