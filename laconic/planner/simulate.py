"""A step of training that allocates nothing, and one that is watched byte by byte.

The only file that uses names of torch which are not public: FakeTensorMode, the dispatch mode, weak dictionaries, the
fake process group.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from laconic.models.repeated_layers import find_layers
from laconic.offload.memory_accounting import Category, current, simulating
from laconic.planner.memory_timeline import Course, Ledger
from laconic.planner.step_cost import STEPPING, Meter
from laconic.training.step.objective import Batch
from laconic.training.step.train_state import TrainState
from laconic.training.step.train_step import train_step

Prepare = Callable[[], tuple[TrainState, Batch]]

STEPS = 2
"""The optimizer's state is born in the first step, so the second is the one that all others are like."""

ALONE = (4, 2)
"""References to a tensor and to its storage, as the watch sees them, when nobody but autograd has it."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every tensor's storage into a ledger while it is entered. Real and fake tensors alike."""

    def __init__(self, ledger: Ledger, device: torch.device, meter: Meter | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.device = device
        self._numbers = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._makers: dict[int, int] = {}
        self._meter = meter
        self.aside = self._steps = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as operations on what this rank has
        if self.aside:
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and self._adds_in_place(args[0], sys._getframe(2).f_back):
            self.ledger.resized(self.see(args[0])[0], 0)
        if isinstance(out, Tensor):
            self.see(out)
        elif out is not None:
            for value in tree_iter(out):
                if isinstance(value, Tensor):
                    self.see(value)
        if self._meter is not None:
            self._meter(STEPPING if self._steps else self.ledger.phase, func, args, kwargs or {}, out)
        return out

    def steps(self, begins: bool) -> None:
        """The optimizer's own work begins, in whatever phase, or ends."""
        self._steps = begins

    def __enter__(self) -> "Watch":
        self._resize = torch.UntypedStorage.resize_
        watch, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage in watch._numbers:
                watch.ledger.resized(watch._numbers[storage], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        # Where distributed tensors find out the shape of a result, from imagined ones of the size of the whole.
        ShardingPropagator._fake_mode_lock = Aside(self)  # type: ignore[assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._fake_mode_lock = nullcontext()
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def see(self, tensor: Tensor) -> list[int]:
        """The numbers of a tensor's storages in the ledger, where they are entered if they are new. A quantized or a
        distributed tensor is made of several."""
        if not isinstance(tensor, FakeTensor) and hasattr(tensor, "__tensor_flatten__"):
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            return [number for part in parts if isinstance(part, Tensor) for number in self.see(part)]
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            return [int(self._numbers[storage])]
        account = current()
        side = account.side if tensor.device.type == self.device.type else "host"
        number = self.ledger.born(storage.nbytes(), side, account.category)
        self._numbers[storage] = number
        self._makers[number] = node()
        weakref.finalize(storage, self.ledger.resized, number, 0).atexit = False
        return [number]

    def _adds_in_place(self, first: Tensor, caller: FrameType | None) -> bool:
        """Whether this sum is autograd's, of two gradients of which nobody else has the first: without a watch it would
        be put in the first one's place (`can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp).

        A sum within a node's own formula looks alike, only that its first term is of the same node's making.
        """
        storage = first.untyped_storage()
        return (
            (caller is None or caller.f_code is _engine_run_backward.__code__)
            and not torch.is_grad_enabled()
            and (first._use_count(), torch._C._storage_Use_Count(storage._cdata)) == ALONE  # type: ignore[attr-defined]
            and is_non_overlapping_and_dense_or_false(first)
            and self._makers[self.see(first)[0]] != node()
        )

    def claim(self, tensor: Tensor, category: Category, *, beside: Tensor | None = None) -> None:
        """Say what a tensor is for. beside: one that it lies on the same side with."""
        side = None if beside is None else self.ledger.entries[self.see(beside)[0]].side
        for number in self.see(tensor):
            self.ledger.claim(number, category, side)


def node() -> int:
    """The number of the node of autograd's graph whose turn it is; -1 where none has."""
    found = torch._C._current_autograd_node()
    return -1 if found is None else int(found._sequence_nr())


class Aside:
    """A context that can be entered as often as is liked. What happens in it takes no memory."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.aside = True

    def __exit__(self, *details: Any) -> None:
        self._watch.aside = False


@contextmanager
def watched(watch: Watch, state: TrainState) -> Iterator[None]:
    """Tell the watch what the step's tensors are for, and where in the model the step is."""
    ledger = watch.ledger
    handles: list[Any] = []
    place: dict[Tensor, str] = {}
    layers = find_layers(state.module)
    for index, layer in enumerate(layers):
        name = f"{index}/{len(layers)}"
        place.update(dict.fromkeys(layer.parameters(), name))
        handles.append(layer.register_forward_pre_hook(lambda *_, name=name: ledger.move(ledger.phase, name)))
        handles.append(layer.register_forward_hook(lambda *_, name=name: ledger.move(ledger.phase, f"{name} after")))

    def arrived(parameter: nn.Parameter, gradient: Tensor) -> None:
        ledger.move(ledger.phase, place.get(parameter, ""))
        watch.claim(gradient, "gradients")

    def reduced(shard: Tensor) -> None:
        assert shard.grad is not None
        ledger.move(ledger.phase, place.get(shard, ""))
        watch.claim(shard.grad, "gradients", beside=shard)

    def register(parameter: nn.Parameter, call: Callable[[nn.Parameter, Tensor], None]) -> Any:
        hook: Callable[[Tensor], None] = lambda gradient: call(parameter, gradient)  # noqa: E731
        return parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    for parameter in state.module.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(reduced))  # type: ignore[no-untyped-call]
        elif parameter.requires_grad:
            handles.append(register(parameter, arrived))
    handles.append(state.optimizer.register_step_pre_hook(lambda *_: watch.steps(True)))
    handles.append(state.optimizer.register_step_post_hook(lambda *_: watch.steps(False)))
    try:
        with state.observe_phases(ledger.span):
            yield
    finally:
        for handle in handles:
            handle.remove()


def settle(watch: Watch, state: TrainState) -> None:
    """Claim what the step has left: parameters, gradients, the optimizer's state."""
    for parameter in state.module.parameters():
        if parameter.grad is not None:
            watch.claim(parameter.grad, "gradients")
    for values in state.optimizer.state.values():
        for value in tree_iter(values):
            if isinstance(value, Tensor):
                watch.claim(value, "optimizer")
    for tensor in (*state.module.parameters(), *state.module.buffers()):
        watch.claim(tensor, "parameters")


def trace(
    prepare: Prepare,
    device: torch.device,
    steps: int = STEPS,
    *,
    meter: Meter | None = None,
    clip: float | None = None,
    primed: bool = False,
) -> Course:
    """The course of memory over some steps, on tensors of whatever kind `prepare` makes.

    meter: is told of the work of the last step. primed: the optimizer's state is there before the first.
    """
    ledger = Ledger()
    watch = Watch(ledger, device, meter)
    with watch:
        state, batch = prepare()
        if primed:
            prime(state)  # watched, since who makes the state says on which side it lies
            settle(watch, state)
        ledger.begin()
        with watched(watch, state):
            for _ in range(steps):
                if meter:
                    meter.phases.clear()
                train_step(state, batch, max_grad_norm=clip)
                settle(watch, state)
    return ledger.close()


def prime(state: TrainState) -> None:
    """Let the optimizer make its state, without a step of the model."""
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


def simulate(prepare: Prepare, steps: int = 1, *, meter: Meter | None = None, clip: float | None = None) -> Course:
    """The course of memory over steps that are like all later ones, nothing allocated.

    prepare: builds the training state and a batch, from fake tensors (see `imagined`).
    """
    with simulating(), imagining():
        made: Prepare = lambda: never_overflowing(*prepare())  # noqa: E731
        return trace(made, torch.device("cpu"), steps, meter=meter, clip=clip, primed=steps < STEPS)


def never_overflowing(state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
    """The same state with a scaler of the loss that steps without looking for overflows: numbers that are not there."""
    if state.scaler.is_enabled():
        state.scaler._maybe_opt_step = lambda optimizer, _, *args, **kwargs: optimizer.step(*args, **kwargs)  # type: ignore[method-assign]
    return state, batch


def imagining() -> FakeTensorMode:
    """A context in which tensors have shapes and no bytes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def imagined_group(world: int) -> Iterator[None]:
    """This process is the first of a group of so many ranks, of which no other is there, and nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def imagined(module: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Put tensors without bytes in the place of a module's own, which may be on the meta device. Call it within
    `simulate`."""
    made: dict[int, Tensor] = {}

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or "cpu")
            learns = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if learns else fake
        return made[id(tensor)]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    held[name] = like(tensor)  # type: ignore[assignment]
    return module
