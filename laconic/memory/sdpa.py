"""Attention in one kernel, which never holds the matrix of all pairs of tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layers
from laconic.models.signature import replace_forward
from laconic.training.step.step_parts import StepParts
from laconic.training.step.technique import Slot, Technique

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Sdpa(Technique):
    """torch's scaled_dot_product_attention in a model of transformers (FlashAttention: Dao, arXiv 2307.08691; memory
    efficient: Rabe and Staats, arXiv 2112.05682).

    backend: the kernel; torch takes the fastest that can where none is given. One that is given and cannot, on this
    device or at this precision, fails in the first step. float32: queries, keys and values in FP32, where the rest is
    in BF16. On a CPU the kernel's backward pass is slow in BF16: 55 ms for 32 rows of 32 tokens and 12 heads on a Xeon
    with AMX, 5 ms in FP32; 120 and 17 ms for 64 tokens, 72 and 70 ms for one row of 1,024.
    """

    slot: ClassVar[Slot] = "attention"
    exact: ClassVar[bool] = True

    backend: Literal["flash", "efficient", "math"] | None = None
    float32: bool = False

    def apply(self, parts: StepParts) -> None:
        model: Any = next((part for part in parts.module.modules() if hasattr(part, "set_attn_implementation")), None)
        if model is None:
            raise RecipeError("sdpa: this is no model of transformers, so its attention cannot be exchanged. Remove it")
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation("sdpa")
        except ValueError as error:
            raise RecipeError(f"sdpa: {type(model).__name__} does not take it: {error}. Remove it") from None
        if model.config._attn_implementation != "sdpa":
            raise RecipeError(f"sdpa: the attention of {type(model).__name__} cannot be exchanged. Remove it")
        parts.on_restore(lambda: model.set_attn_implementation(before))
        contexts: list[Callable[[], AbstractContextManager[Any]]] = [InFloat32] if self.float32 else []
        if self.backend is not None:
            contexts.append(partial(sdpa_kernel, BACKENDS[self.backend]))
        # Round the layers, not round the step: a layer that is computed again in the backward pass needs it too.
        for part in find_layers(parts.module) or (parts.module,):
            for context in contexts:
                parts.on_restore(replace_forward(part, within(context, part.forward)))


class InFloat32(TorchFunctionMode):
    """Attention in FP32, whatever it is given and whatever autocast says; its result in the precision of the values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        dtype = next(value.dtype for value in given if isinstance(value, Tensor))
        with torch.autocast(given[0].device.type, enabled=False):
            return func(*map(raised, args), **{name: raised(value) for name, value in kwargs.items()}).to(dtype)


def raised(value: Any) -> Any:
    """A tensor of 16 bits in FP32; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def within(context: Callable[[], AbstractContextManager[Any]], forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same computation in a context. The backward pass follows by itself."""

    @wraps(forward)
    def computed(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    return computed
