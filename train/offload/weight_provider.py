"""Providers of the weights of layers that run one at a time, and accumulation of these weights' gradients."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from train.offload.memory_accounting import account_as

CAST_PARTS = 16
"""The parts in which a gradient is added to a sum of another dtype."""


class WeightProvider(Protocol):
    """Supplies a layer's weights when the layer runs, and takes its gradients when they are complete.

    It stands between a stack of layers that run one at a time and the memory in which their weights lie.
    """

    def fetch(self, layer: nn.Module, upcoming: nn.Module | None) -> dict[str, Tensor]:
        """Return the weights of a layer on the device, by name.

        upcoming: the layer that runs next, whose weights may be prefetched. Earlier weights may be released.
        """

    def return_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take a complete gradient. The parameter's hooks run once, as if autograd itself had run the layer."""

    def end_pass(self) -> None:
        """Finish the forward or backward pass through the stack."""


class ResidentWeights:
    """Provides weights that lie on the device permanently."""

    def fetch(self, layer: nn.Module, upcoming: nn.Module | None) -> dict[str, Tensor]:
        return dict(layer.named_parameters())

    def return_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        torch.autograd.backward([parameter], [gradient])

    def end_pass(self) -> None:
        pass


class GradientAccumulator:
    """Accumulates the gradients of a layer's weights over micro-batches; passes each on as soon as it is complete.

    in_float32: accumulate in FP32, so that more micro-batches do not cost precision; for more than one of them.
    """

    def __init__(self, pass_on: Callable[[str, Tensor], None], *, in_float32: bool) -> None:
        self._pass_on, self._in_float32 = pass_on, in_float32
        self._sums: dict[str, Tensor] = {}
        self._is_last = False

    def begin(self, *, is_last: bool) -> None:
        """Begin the next micro-batch, or the last one: gradients that are added from now on are its own."""
        self._is_last = is_last

    def add(self, name: str, weight: Tensor) -> None:
        """Take the gradient of a weight for this micro-batch."""
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if name in self._sums:
            gradient = add_in_place(self._sums.pop(name), gradient)
        elif self._in_float32:
            with account_as(category="gradients"):
                gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if self._is_last:
            self._pass_on(name, gradient)
        else:
            self._sums[name] = gradient

    def close(self) -> None:
        """Pass on the gradients to which the last micro-batch added nothing."""
        while self._sums:
            self._pass_on(*self._sums.popitem())


def add_in_place(total: Tensor, gradient: Tensor) -> Tensor:
    """Add a gradient to a sum that may be of a wider dtype; returns the sum.

    On a CPU PyTorch casts the narrower operand as a whole before it adds, in memory that no tensor shows: 0.56 of 6.4
    MiB with the largest weight of a ViT in BF16. In parts it casts one part at a time.
    """
    if total.dtype == gradient.dtype or total.device.type != "cpu" or not total.ndim:
        return total.add_(gradient)
    for rows, added in zip(total.chunk(CAST_PARTS), gradient.chunk(CAST_PARTS), strict=True):
        rows.add_(added)
    return total


def register_gradient_hook(leaf: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with a leaf tensor whenever its gradient has been accumulated."""
    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
