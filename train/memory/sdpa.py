"""Fused attention (scaled_dot_product_attention), which never holds the matrix of all pairs of tokens."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layers
from laconic.models.signature import replace_forward
from train.step.step_parts import StepParts
from train.step.technique import Proposal, Technique

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Sdpa(Technique):
    """Uses torch's scaled_dot_product_attention in a model of transformers (FlashAttention-2: Dao, arXiv 2307.08691;
    memory-efficient attention: Rabe and Staats, arXiv 2112.05682).

    backend: the kernel; by default torch chooses the fastest that supports the inputs. A given one that does not
    support this device or precision fails in the first step. float32: queries, keys and values in FP32, where the rest
    is in BF16. On a CPU the kernel's backward pass is slow in BF16: 55 ms for 32 rows of 32 tokens and 12 heads on a
    Xeon with AMX, 5 ms in FP32; 120 and 17 ms for 64 tokens, 72 and 70 ms for one row of 1,024.
    """

    slot = "attention"
    exact = True

    backend: Literal["flash", "efficient", "math"] | None = None
    float32: bool = False

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return (Proposal("free"),)

    def apply(self, parts: StepParts) -> None:
        model: Any = next((part for part in parts.module.modules() if hasattr(part, "set_attn_implementation")), None)
        if model is None:
            raise RecipeError("sdpa: this is no model of transformers, so its attention cannot be replaced. Remove it")
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation("sdpa")
        except ValueError as error:
            raise RecipeError(f"sdpa: {type(model).__name__} does not take it: {error}. Remove it") from None
        if model.config._attn_implementation != "sdpa":
            raise RecipeError(f"sdpa: the attention of {type(model).__name__} cannot be replaced. Remove it")
        parts.on_restore(lambda: model.set_attn_implementation(before))
        contexts: list[Callable[[], AbstractContextManager[Any]]] = [Float32Attention] if self.float32 else []
        if self.backend is not None:
            contexts.append(partial(sdpa_kernel, BACKENDS[self.backend]))
        # Around the layers, not the step: recomputation of a layer in the backward pass needs the context too.
        for part in find_layers(parts.module) or (parts.module,):
            for context in contexts:
                parts.on_restore(replace_forward(part, run_within(context, part.forward)))


class Float32Attention(TorchFunctionMode):
    """Computes attention in FP32, also under autocast; the result has the dtype of the queries."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        values = [*args, *kwargs.values()]
        dtype = next(value.dtype for value in values if isinstance(value, Tensor))
        with torch.autocast(values[0].device.type, enabled=False):
            return func(
                *map(cast_to_float32, args), **{name: cast_to_float32(value) for name, value in kwargs.items()}
            ).to(dtype)


def cast_to_float32(value: Any) -> Any:
    """Cast a 16-bit floating-point tensor to FP32; return any other value unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def run_within(context: Callable[[], AbstractContextManager[Any]], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward function so that it runs within a context."""

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    return wrapped
