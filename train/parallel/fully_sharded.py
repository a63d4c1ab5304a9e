"""Fully sharded data parallelism: each rank holds a shard of every parameter, its gradient and its optimizer state."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layers
from train.offload.host_memory import account_steps_on_host
from train.offload.memory_accounting import account_as
from train.parallel.mesh import Mesh
from train.parallel.original_module import OriginalModule
from train.parallel.ranks import Ranks, RanksStrategy
from train.step.cast_inputs import cast_inputs_to_bf16
from train.step.step_parts import StepParts


class FullySharded(RanksStrategy):
    """Fully sharded data parallelism, with replicas of the shards or without."""

    def __init__(self, ranks: Ranks, micro_batches: int = 1) -> None:
        super().__init__(ranks, micro_batches)
        self._root: nn.Module | None = None

    def set_root(self, loss_module: nn.Module | None) -> None:
        """Set the sharded loss module; None when the model is whole again."""
        self._root = loss_module

    def synchronize_gradients(self, loss_module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Average gradients over several replicas in the last micro-batch only."""
        if isinstance(loss_module, FSDPModule):
            loss_module.set_requires_all_reduce(last)
        return nullcontext()

    def gather_weights(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._root is None else gather_root(self._root)


def shard_parameters(parts: StepParts, ranks: Ranks, axes: DeviceMesh, micro_batches: int, mesh: Mesh) -> None:
    """Shard the parameters of a model (FSDP2: Zhao et al., arXiv 2304.11277): each repeated layer by itself, and the
    rest together, which stays gathered from the forward pass to the end of the backward pass. axes: of the ranks.

    Every micro-batch is reduced at once: gradients that waited for the last one would wait unsharded. A module can be
    sharded once in its life. Raises RecipeError where a parameter cannot be sharded.
    """
    strategy = FullySharded(ranks, micro_batches)
    check_shards(parts, mesh)

    def wrap(loss_module: nn.Module) -> nn.Module:
        shard_modules(parts, find_layers(parts.module), [loss_module], axes, mesh)
        strategy.set_root(loss_module)
        parts.on_restore(lambda: strategy.set_root(None))
        return loss_module

    parts.wrap_loss_module(wrap, innermost=True)
    parts.parallelize(strategy)


def check_shards(parts: StepParts, mesh: Mesh) -> None:
    """Prepare a step for shards. Raises RecipeError where a parameter cannot be sharded."""
    for name, parameter in parts.module.named_parameters():
        if parameter.ndim == 0:
            raise RecipeError(f"mesh: {name} is a single number, which cannot be sharded. Set shard: 1")
    if mesh.offload:
        parts.wrap_optimizer(lambda make, groups: account_steps_on_host(make(groups)))


def shard_modules(
    parts: StepParts,
    layers: Sequence[nn.Module],
    roots: Sequence[nn.Module],
    axes: DeviceMesh,
    mesh: Mesh,
    *,
    reshard: bool | None = None,
) -> None:
    """Shard layers by themselves, and the rest of each root, whose forward pass contains some of them. reshard: free
    the gathered weights after the forward pass; None does so for all but a root's own."""
    originals = [OriginalModule.of(module) for module in parts.module.modules()]
    with account_as("host" if mesh.offload else None, "parameters"):
        for module in (*layers, *roots):
            policies = make_policies(parts.device, mesh, cast=module not in roots)
            fully_shard(module, mesh=axes, reshard_after_forward=reshard, **policies)
            account_gathering(module)
    if mesh.precision:
        # A root does not cast its inputs: labels that are numbers keep their precision.
        parts.module.register_forward_pre_hook(cast_inputs_to_bf16, with_kwargs=True)
    added = [original.release() for original in originals]

    def undo() -> None:
        for original, names in zip(originals, added, strict=True):
            original.restore(names)

    parts.on_restore(undo)


def make_policies(device: torch.device, mesh: Mesh, *, cast: bool) -> dict[str, Any]:
    """Make the policies of `fully_shard`: the precision of gathered weights (cast: of inputs too), and of the shards'
    place."""
    low = torch.bfloat16 if mesh.precision else None
    pin = device.type == "cuda"
    return {
        "mp_policy": MixedPrecisionPolicy(low, torch.float32 if low else None, cast_forward_inputs=cast),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if mesh.offload else OffloadPolicy(),
    }


def account_gathering(module: nn.Module) -> None:
    """Account what a sharded module allocates before its forward pass to parameters: its gathered weights."""
    stack = ExitStack()

    def begin(*_: Any) -> None:
        stack.enter_context(account_as(category="parameters"))

    def end(*_: Any) -> None:
        stack.close()

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_pre_hook(end)


@contextmanager
def gather_root(loss_module: nn.Module) -> Iterator[None]:
    """Gather the weights outside the repeated layers, so that all ranks can call the model in the body."""
    assert isinstance(loss_module, FSDPModule)
    # The pre-forward hooks gather; the first call also builds the tree of sharded modules. No forward pass is needed.
    loss_module.forward = lambda: None
    try:
        loss_module()
    finally:
        del loss_module.forward
    try:
        yield
    finally:
        loss_module.reset_iter_state()
