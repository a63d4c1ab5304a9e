"""Forward pre-hooks that cast a module's FP32 inputs to BF16, for modules whose weights are BF16."""

from typing import Any

import torch
from torch import Tensor, nn


def cast_inputs_to_bf16(
    part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the FP32 arguments of a forward pass to BF16: FP32 comes from images and from buffers."""
    return tuple(map(cast_to_bf16, args)), {name: cast_to_bf16(value) for name, value in kwargs.items()}


def cast_to_bf16(value: Any) -> Any:
    """Cast an FP32 tensor to BF16; return any other value unchanged."""
    return value.bfloat16() if isinstance(value, Tensor) and value.dtype is torch.float32 else value
