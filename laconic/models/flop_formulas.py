"""FLOP formulas for kernels that torch's FlopCounterMode does not know."""

import math
from typing import Any

import torch


def uncounted_kernels() -> dict[Any, Any]:
    """Return formulas by operator, for FlopCounterMode, of kernels that torch 2.13 counts as 0: attention on a CPU,
    products of groups, and products with 4-bit weights by bitsandbytes where it is loaded."""
    formulas: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        torch.ops.aten._grouped_mm: group_flops,
    }
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        formulas[torch.ops.bitsandbytes.gemm_4bit] = product_flops
    return formulas


def attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count the FLOPs of attention from the shapes [batch, heads, length, width] of its inputs. A causal mask saves
    none, as in torch's formulas of other kernels."""
    batch, heads, length, width = query
    return int(2 * batch * heads * length * key[-2] * (width + value[-1]))


def group_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Count the FLOPs of a product of groups, as of experts, from the shapes of its inputs: [rows, inner] or [groups,
    rows, inner], and [groups, inner, columns] or [inner, columns]."""
    # The columns of one matrix are divided among the groups of the other input.
    divided = left[0] if len(left) > len(right) else 1
    return int(2 * math.prod(left) * right[-1] // divided)


def product_flops(rows: Any, packed: Any, shape: Any, *args: Any, **kwargs: Any) -> int:
    """Count the FLOPs of a product with 4-bit weights of a shape, [out, in], from the shape of its input, [..., in]."""
    return int(2 * math.prod(rows) * shape[0])
