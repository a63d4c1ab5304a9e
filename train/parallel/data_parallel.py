"""Data parallelism: each rank holds the whole model, and gradients are averaged over the ranks as they arise."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from train.offload.memory_accounting import account_as
from train.parallel.ranks import Ranks, RanksStrategy
from train.step.step_parts import StepParts

Compression = Literal["fp16", "bf16"]
HOOKS: Mapping[Compression, Callable[..., Any]] = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


class DataParallel(RanksStrategy):
    """Distributed data parallelism (DDP: Li et al., PyTorch Distributed, arXiv 2006.15704)."""

    def synchronize_gradients(self, loss_module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Keep the gradients of all but the last micro-batch on their rank, where they are accumulated."""
        if last or not isinstance(loss_module, DistributedDataParallel):
            return nullcontext()
        return loss_module.no_sync()


class SimulatedDataParallel(RanksStrategy):
    """Takes the memory of DDP where the other ranks are simulated: a buffer for each gradient that is never freed;
    gradients of several micro-batches are accumulated outside of it."""

    _last = True

    def wrap(self, loss_module: nn.Module) -> nn.Module:
        """Give the parameters of the loss module their gradient buffers."""
        for parameter in loss_module.parameters():
            if parameter.requires_grad:
                with account_as(category="gradients"):
                    buffer = torch.empty_like(parameter)
                parameter.register_post_accumulate_grad_hook(partial(self._move, buffer))  # type: ignore[no-untyped-call]
        return loss_module

    @contextmanager
    def synchronize_gradients(self, loss_module: nn.Module, last: bool) -> Iterator[None]:
        self._last = last
        yield

    def _move(self, buffer: Tensor, parameter: Tensor) -> None:
        if self._last:
            parameter.grad = buffer


def replicate_model(parts: StepParts, ranks: Ranks, micro_batches: int, compress: Compression | None) -> None:
    """Average the gradients over the ranks. compress: the precision in which they are sent; None for their own.

    Buffers are not averaged: a batch normalisation sees the rows of its rank alone, and the first rank's is kept.
    """
    if dist.get_backend() == "fake":
        simulated = SimulatedDataParallel(ranks, micro_batches)
        parts.wrap_loss_module(simulated.wrap)
        parts.parallelize(simulated)
        return

    def wrap(loss_module: nn.Module) -> nn.Module:
        # A parameter that a task leaves out is no error, neither here nor on one device.
        parallel = DistributedDataParallel(
            loss_module,
            device_ids=[parts.device] if parts.device.type == "cuda" else None,
            forward_sync_buffers=False,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        if compress:
            parallel.register_comm_hook(None, HOOKS[compress])
        return parallel

    parts.wrap_loss_module(wrap)
    parts.parallelize(DataParallel(ranks, micro_batches))
