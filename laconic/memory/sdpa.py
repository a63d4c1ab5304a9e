"""Attention in one kernel, which never holds the matrix of all pairs of tokens."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Literal

from torch.nn.attention import SDPBackend, sdpa_kernel

from laconic.errors import RecipeError
from laconic.memory.technique import Slot, Technique, replace_forward
from laconic.training.kit import Kit, blocks

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Sdpa(Technique):
    """torch's scaled_dot_product_attention in a model of transformers (FlashAttention: Dao, arXiv 2307.08691; memory
    efficient: Rabe and Staats, arXiv 2112.05682).

    backend: the kernel; torch takes the fastest that can where none is given. One that is given and cannot, on this
    device or at this precision, fails in the first step.
    """

    slot: ClassVar[Slot] = "attention"
    exact: ClassVar[bool] = True

    backend: Literal["flash", "efficient", "math"] | None = None

    def apply(self, kit: Kit) -> None:
        model: Any = next((part for part in kit.module.modules() if hasattr(part, "set_attn_implementation")), None)
        if model is None:
            raise RecipeError("sdpa: this is no model of transformers, so its attention cannot be exchanged. Remove it")
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation("sdpa")
        except ValueError as error:
            raise RecipeError(f"sdpa: {type(model).__name__} does not take it: {error}. Remove it") from None
        if model.config._attn_implementation != "sdpa":
            raise RecipeError(f"sdpa: the attention of {type(model).__name__} cannot be exchanged. Remove it")
        kit.undo.append(lambda: model.set_attn_implementation(before))
        if self.backend is not None:
            # Round the layers, not round the step: a layer that is computed again in the backward pass needs it too.
            for part in blocks(kit.module) or (kit.module,):
                replace_forward(kit, part, with_kernel(part.forward, BACKENDS[self.backend]))


def with_kernel(forward: Callable[..., Any], backend: SDPBackend) -> Callable[..., Any]:
    """The same computation with attention in one kernel alone. The backward pass follows by itself."""

    @wraps(forward)
    def computed(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(backend):
            return forward(*args, **kwargs)

    return computed
