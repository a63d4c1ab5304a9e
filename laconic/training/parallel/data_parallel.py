"""Data parallelism: each rank has the whole model, and the gradients of all are averaged while they arise."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from laconic.offload.memory_accounting import account_as
from laconic.training.step.parts import Kit

Compression = Literal["fp16", "bf16"]
HOOKS: Mapping[Compression, Callable[..., Any]] = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


def replicate(kit: Kit, compress: Compression | None) -> None:
    """Let the kit's lesson be averaged over the ranks (DDP: Li et al., PyTorch Distributed, arXiv 2006.15704).

    Buffers are not averaged: a batch normalisation sees the rows of its rank alone, and the first rank's is kept.
    """
    if dist.get_backend() == "fake":
        buckets = Buckets()
        kit.wrap.append(buckets.wrap)
        kit.synchronised = buckets.synchronised
        return

    def wrap(lesson: nn.Module) -> nn.Module:
        # A parameter that a task leaves out is no error, neither here nor on one device.
        parallel = DistributedDataParallel(
            lesson,
            device_ids=[kit.device] if kit.device.type == "cuda" else None,
            forward_sync_buffers=False,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        if compress:
            parallel.register_comm_hook(None, HOOKS[compress])
        kit.undo.append(lambda: setattr(kit, "lesson", lesson))
        return parallel

    kit.wrap.append(wrap)
    kit.synchronised = synchronised


def synchronised(lesson: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients of all but a batch's last part stay on their rank, where they add up."""
    if last or not isinstance(lesson, DistributedDataParallel):
        return nullcontext()
    return lesson.no_sync()


class Buckets:
    """Stands in the place of DDP where the other ranks are imagined, and takes the same memory: room for each gradient,
    for good; gradients of several parts of a batch add up beside it."""

    def __init__(self) -> None:
        self._last = True

    def wrap(self, lesson: nn.Module) -> nn.Module:
        """The lesson, its gradients in buckets."""
        for parameter in lesson.parameters():
            if parameter.requires_grad:
                with account_as(category="gradients"):
                    room = torch.empty_like(parameter)
                parameter.register_post_accumulate_grad_hook(partial(self._move, room))  # type: ignore[no-untyped-call]
        return lesson

    @contextmanager
    def synchronised(self, lesson: nn.Module, last: bool) -> Iterator[None]:
        """As of DDP."""
        self._last = last
        yield

    def _move(self, room: Tensor, parameter: Tensor) -> None:
        if self._last:
            parameter.grad = room
