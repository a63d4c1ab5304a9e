"""Fully sharded data parallelism: of every parameter, its gradient and its optimizer state a rank holds its part."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from laconic.errors import RecipeError
from laconic.offload.host_memory import account_steps_on_host
from laconic.offload.memory_accounting import account_as
from laconic.training.parallel.mesh import Mesh
from laconic.training.step.cast_inputs import cast_inputs_to_bf16
from laconic.training.step.parts import Kit, blocks


def shard(kit: Kit, mesh: Mesh, ranks: DeviceMesh) -> None:
    """Let the kit's parameters be sharded (FSDP2: Zhao et al., arXiv 2304.11277): each repeated layer by itself, and
    the rest together, which stays gathered from the forward pass to the end of the backward pass.

    ranks: of one axis, or of two: copies, and shards of each. Every part of a batch is reduced at once: gradients that
    waited for the last part would wait unsharded. A module can be sharded once in its life.
    Raises RecipeError where a parameter cannot be cut.
    """
    for name, parameter in kit.module.named_parameters():
        if parameter.ndim == 0:
            raise RecipeError(f"mesh: {name} is a single number, which cannot be sharded. Set shard: 1")

    def wrap(lesson: nn.Module) -> nn.Module:
        before = [Untouched.of(part) for part in kit.module.modules()]
        with account_as("host" if mesh.offload else None, "parameters"):
            for part in (*blocks(kit.module), lesson):
                fully_shard(part, mesh=ranks, **policies(kit, mesh, cast=part is not lesson))
                gathering(part)
        if mesh.precision:
            # The lesson is not cast as a whole: labels that are numbers keep their precision.
            kit.module.register_forward_pre_hook(cast_inputs_to_bf16, with_kwargs=True)
        kit.gathered = partial(gathered, lesson)
        marks = [untouched.release() for untouched in before]

        def undo() -> None:
            for untouched, added in zip(before, marks, strict=True):
                untouched.restore(added)
            kit.lesson, kit.gathered = lesson, nullcontext

        kit.undo.append(undo)
        return lesson

    kit.wrap.insert(0, wrap)
    kit.synchronised = synchronised
    if mesh.offload:
        make = kit.make_optimizer
        kit.make_optimizer = lambda groups: account_steps_on_host(make(groups))


def policies(kit: Kit, mesh: Mesh, *, cast: bool) -> dict[str, Any]:
    """In which precision weights are gathered, and where shards lie. cast: what goes into the module, too."""
    low = torch.bfloat16 if mesh.precision else None
    pin = kit.device.type == "cuda"
    return {
        "mp_policy": MixedPrecisionPolicy(low, torch.float32 if low else None, cast_forward_inputs=cast),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if mesh.offload else OffloadPolicy(),
    }


def gathering(part: nn.Module) -> None:
    """What arises in a sharded part before it runs is its weights, gathered."""
    stack = ExitStack()

    def begin(*_: Any) -> None:
        stack.enter_context(account_as(category="parameters"))

    def end(*_: Any) -> None:
        stack.close()

    part.register_forward_pre_hook(begin, prepend=True)
    part.register_forward_pre_hook(end)


def synchronised(lesson: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients of all but a batch's last part are not averaged over the copies yet, where there are several."""
    if isinstance(lesson, FSDPModule):
        lesson.set_requires_all_reduce(last)
    return nullcontext()


@contextmanager
def gathered(lesson: nn.Module) -> Iterator[None]:
    """The module of the lesson can be called in the body, the same way on all ranks: what is outside its layers is
    gathered."""
    assert isinstance(lesson, FSDPModule)
    # What precedes a lesson gathers, and the first time it finds out who is below whom. No lesson needs to follow.
    lesson.forward = lambda: None
    try:
        lesson()
    finally:
        del lesson.forward
    try:
        yield
    finally:
        lesson.reset_iter_state()


@dataclass(frozen=True, eq=False)
class Untouched:
    """A part of a model as it is before it is sharded: its class, its own parameters, its hooks, what it is made of."""

    part: nn.Module
    kind: type[nn.Module]
    parameters: Mapping[str, nn.Parameter]
    hooks: Mapping[str, Any]
    names: frozenset[str]

    @classmethod
    def of(cls, part: nn.Module) -> "Untouched":
        """The part as it is now."""
        hooks = {name: value.copy() for name, value in vars(part).items() if name.endswith("hooks")}
        return cls(part, type(part), dict(part.named_parameters(recurse=False)), hooks, frozenset(vars(part)))

    def release(self) -> set[str]:
        """Free the memory of the whole parameters, of which there are shards now; gives the names that came with those.

        The parameters stay the objects that they are, for whoever holds them.
        """
        for parameter in self.parameters.values():
            parameter.data = parameter.new_empty(0)
        return set(vars(self.part)) - self.names

    def restore(self, added: set[str]) -> None:
        """The part as it was, with what its parameters have learned, whole on every rank."""
        for name, parameter in self.parameters.items():
            sharded: Any = getattr(self.part, name)
            if isinstance(sharded, DTensor):  # else a shared one, which has come back with another part
                parameter.data = sharded.full_tensor().detach()
        self.part.__class__ = self.kind
        for name in added:
            delattr(self.part, name)
        for name, hooks in self.hooks.items():
            setattr(self.part, name, hooks)
        for name, parameter in self.parameters.items():
            setattr(self.part, name, parameter)
