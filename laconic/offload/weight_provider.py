"""Where the weights of a layer are taken from when it runs, and where its gradients go when they are whole."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from laconic.offload.memory_accounting import accounted


class Supply(Protocol):
    """What stands between a stack of layers that run one by one and the memory where their weights lie."""

    def take(self, layer: nn.Module, then: nn.Module | None) -> dict[str, Tensor]:
        """The weights with which a layer computes, by name. `then` is the layer that runs next: a good time to fetch
        it. What was taken before may be let go."""

    def give(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A gradient is whole: the parameter's hooks are called once, as if autograd itself had run its layer."""

    def close(self) -> None:
        """The way up or down the stack is over."""


class Resident:
    """Weights that lie on the device."""

    def take(self, layer: nn.Module, then: nn.Module | None) -> dict[str, Tensor]:
        return dict(layer.named_parameters())

    def give(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        torch.autograd.backward([parameter], [gradient])

    def close(self) -> None:
        pass


class Sums:
    """The gradients of a layer's weights over the parts of a batch, each given away as soon as it is whole.

    They are added in float32, so that more parts do not make them coarser.
    """

    def __init__(self, parts: int, give: Callable[[str, Tensor], None]) -> None:
        self._parts, self._give = parts, give
        self._sums: dict[str, Tensor] = {}
        self._begun = 0

    def begin(self) -> None:
        """The gradients that come now are those of the next part."""
        self._begun += 1

    def add(self, name: str, weight: Tensor) -> None:
        """A weight has the gradient of this part."""
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if name in self._sums:
            gradient = self._sums.pop(name).add_(gradient)
        elif self._parts > 1:
            with accounted(category="gradients"):
                gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if self._begun == self._parts:
            self._give(name, gradient)
        else:
            self._sums[name] = gradient

    def close(self) -> None:
        """Give away those of which the last part had none."""
        while self._sums:
            self._give(*self._sums.popitem())


def on_gradient(leaf: Tensor, call: Callable[[Tensor], None]) -> None:
    """Call with a leaf, whenever its gradient is there."""
    leaf.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
