"""What a training step is made of. A technique puts its own part in the place of another."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.offload.host_memory import HostMemory
from laconic.offload.weight_provider import ResidentWeights, WeightProvider
from laconic.training.optimizers.schedule import Scheduler
from laconic.training.step.objective import Batch, Lesson, Objective

Groups = list[dict[str, Any]]
Span = Callable[[str], AbstractContextManager[Any]]
"""A context with a name round a phase of a step: "data", "forward", "backward", "optimizer"."""


def silent(name: str) -> AbstractContextManager[None]:
    """The span of a step that nobody watches."""
    return nullcontext()


@dataclass(eq=False)
class Kit:
    """The parts of a step, on one device.

    module: the model in training mode; techniques may change how it computes, not what its parameters are called.
    make_optimizer: from parameter groups; techniques wrap it. forward: contexts round every forward pass. rows: of a
    micro-batch; None takes a batch whole. scaler: of the loss, for FP16; disabled it passes everything through.
    wrap: round the lesson, in order: compilation, data parallelism. synchronised: a context round each micro-batch,
    told whether it is the batch's last. undo: takes each technique off the module again, last first. weights: the
    parameters and buffers as they are to be kept, by name, wherever they lie; None reads them off the module.
    supply: of weights to layers that run one by one.
    Of several ranks: parts: micro-batches that each takes at least. total: from the terms of this rank's batch to what
    its summed loss is divided by. average: of a loss over the ranks. any: whether something is so on one of them.
    gathered: a context in which the module can be called outside a step, by all ranks alike.
    """

    module: nn.Module
    objective: Objective
    make_optimizer: Callable[[Groups], Optimizer]
    groups: Callable[[nn.Module], Groups]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host: HostMemory = field(default_factory=HostMemory)
    forward: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    rows: int | None = None
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(enabled=False))
    wrap: list[Callable[[nn.Module], nn.Module]] = field(default_factory=list)
    synchronised: Callable[[nn.Module, bool], AbstractContextManager[Any]] = lambda lesson, last: nullcontext()
    parts: int = 1
    total: Callable[[int], float | Tensor] = float
    average: Callable[[Tensor], Tensor] = lambda loss: loss
    any: Callable[[bool], bool] = bool
    gathered: Callable[[], AbstractContextManager[Any]] = nullcontext
    span: Span = silent
    undo: list[Callable[[], None]] = field(default_factory=list)
    weights: Callable[[], dict[str, Tensor]] | None = None
    supply: WeightProvider = field(default_factory=ResidentWeights)

    norm: Tensor | None = None
    """Of the last step's gradient, before it was clipped; None where nobody clips."""
    lesson: nn.Module = field(init=False)
    optimizer: Optimizer = field(init=False)
    schedule: Scheduler = field(init=False)
    """Of the learning rate; there as soon as the steps begin."""

    def assemble(self) -> None:
        """Put the parts together, when every technique has been applied."""
        self.objective.join(self)
        self.lesson = Lesson(self.module, self.objective)
        for wrap in self.wrap:
            self.lesson = wrap(self.lesson)
        self.optimizer = self.make_optimizer(self.groups(self.module))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Round a forward pass."""
        with ExitStack() as stack:
            for context in self.forward:
                stack.enter_context(context())
            yield

    def split(self, batch: Batch) -> list[Batch]:
        """The batch in micro-batches; some without rows, where this rank has fewer than another."""
        parts = self.objective.split(batch, self.rows)
        nothing = {name: tensor[:0] if tensor.ndim else tensor for name, tensor in parts[0].items()}
        return parts + [nothing] * (self.parts - len(parts))

    def state(self) -> dict[str, Tensor]:
        """The weights by name, as they are to be kept."""
        return self.weights() if self.weights else dict(self.module.state_dict())

    def finish(self) -> nn.Module:
        """The module without the techniques, with the weights that it has learned."""
        while self.undo:
            self.undo.pop()()
        return self.module


def stacks(module: nn.Module) -> tuple[nn.Module, ...]:
    """The lists of repeated layers of a model: two or more modules of one class, that have modules of their own."""
    found: list[nn.Module] = []

    def walk(parent: nn.Module) -> None:
        for child in parent.children():
            members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
            alike = len(members) > 1 and len({type(member) for member in members}) == 1
            if alike and any(True for _ in members[0].children()):
                found.append(child)
            else:
                walk(child)

    walk(module)
    return tuple(found)


def blocks(module: nn.Module) -> tuple[nn.Module, ...]:
    """The repeated layers of a model, in order."""
    return tuple(layer for stack in stacks(module) for layer in stack.children())
