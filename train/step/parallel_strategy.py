"""How a training step cooperates with the steps of other devices."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from train.step.gradient_norm import measure_norm

T = TypeVar("T")


class SteppedModel(Protocol):
    """What the passes of a step take of a `TrainState`, which documents it."""

    @property
    def loss_module(self) -> nn.Module: ...
    @property
    def scaler(self) -> torch.amp.GradScaler: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def phase(self) -> Callable[[str], AbstractContextManager[Any]]: ...
    def forward_context(self) -> AbstractContextManager[None]: ...


class ParallelStrategy:
    """The strategy of a single device, which has nobody to cooperate with.

    Strategies for several devices derive from it (`train.parallel`) and replace it as a whole.
    """

    micro_batches: int = 1
    """How many micro-batches a batch has at least. All ranks take as many, since each is a round of collectives."""

    data_part: tuple[int, int] = (0, 1)
    """Which part of the data this rank has, of how many."""

    def reduce_terms(self, terms: int) -> float:
        """Return the divisor of this rank's sum of losses, from the number of loss terms in its part of the batch; 0 on
        all ranks where none has a term."""
        return float(terms)

    def average(self, loss: Tensor) -> Tensor:
        """Average a loss, [] float32, over all ranks."""
        return loss

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        return bool(flag)

    def synchronize_gradients(self, loss_module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Enter a context for the passes of one micro-batch. last: whether it is the batch's last, after which
        gradients are reduced over the ranks."""
        return nullcontext()

    def gather_weights(self) -> AbstractContextManager[Any]:
        """Enter a context in which the model can be called outside a step, by all ranks alike."""
        return nullcontext()

    def accumulate_gradients(self, state: SteppedModel, parts: Sequence[dict[str, Tensor]], total: float) -> Tensor:
        """Add the gradient of the summed loss of micro-batches over `total` to the parameters, and return that loss,
        [] float32 without a gradient."""
        loss = torch.zeros((), device=state.device)
        for number, part in enumerate(parts, 1):
            with self.synchronize_gradients(state.loss_module, number == len(parts)):
                with state.phase("forward"), state.forward_context():
                    value = state.loss_module(part) / total
                with state.phase("backward"):
                    state.scaler.scale(value).backward()
            loss += value.detach()
            del value
        return loss

    def measure_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Measure the norm of the gradient of the whole model, [] float32. parameters: those of this rank."""
        return measure_norm([parameter.grad for parameter in parameters if parameter.grad is not None])

    def compute(self, function: Callable[[], T]) -> T:
        """Return what a function computes with the model, which it calls once and outside of a step."""
        return function()

    def number_globally(self, optimizer_state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        """Return the state of an optimizer with the parameters numbered as where one process has all of them."""
        return optimizer_state

    def share_module(self, module: nn.Module) -> nn.Module:
        """Return a model that can be called any number of times, outside of a step and by all ranks alike."""
        return module

    def name_mesh(self) -> str:
        """Name the mesh that the model is on, as "shard 2 x tensor 2"."""
        return "1 rank"

    def describe(self) -> str:
        """Describe how the model is cut, in a line; empty where it is not."""
        return ""
