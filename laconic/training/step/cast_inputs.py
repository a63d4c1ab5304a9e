"""A forward pre-hook for layers with weights in BF16, whose inputs may be FP32."""

from typing import Any

import torch
from torch import Tensor, nn


def cast_inputs_to_bf16(
    part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the FP32 inputs of a layer to the precision of its weights: FP32 comes from images and from buffers."""
    return tuple(map(to_bf16, args)), {name: to_bf16(value) for name, value in kwargs.items()}


def to_bf16(value: Any) -> Any:
    """A tensor of FP32 in BF16; anything else as it is."""
    return value.bfloat16() if isinstance(value, Tensor) and value.dtype is torch.float32 else value
