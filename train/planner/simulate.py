"""Training steps on fake tensors, which allocate nothing, and the tracking of every allocation, fake or real.

The only file, with meta_kernels.py, that uses names of torch which are not public.
"""

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from laconic.models.repeated_layers import find_layers
from train.offload.chunked_loops import sample_chunks
from train.offload.memory_accounting import Category, current_account
from train.planner.memory_timeline import AllocationLog, MemoryTimeline
from train.planner.meta_kernels import ShapeMode, run_operation
from train.planner.step_cost import STEPPING, CostMeter
from train.planner.step_sharding import keep_aligned_steps
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step.train_step import train_step

Prepare = Callable[[], tuple[TrainState, Batch]]

STEPS = 2
"""The optimizer allocates its state in the first step, so the second is representative of all later ones."""

DEVICE = torch.ops.prim.device.default
"""What a mode sees where the device of a fake tensor is asked for."""

UNSHARED = (4, 2)
"""References to a tensor and to its storage, as counted by the tracker, when autograd alone holds it."""


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that logs the storages of all tensors, real or fake, and meters the operations.

    paused: whether operations are neither logged nor metered.
    """

    def __init__(self, log: AllocationLog, device: torch.device, meter: CostMeter | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self.device = device
        self._indices = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._nodes: dict[int, int] = {}
        self._meter = meter
        self.paused = self._is_stepping = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls ask for it, and it is no operation
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as operations on local shards
        if self.paused:
            return func(*args, **(kwargs or {}))
        out = run_operation(func, args, kwargs or {})
        if func is torch.ops.aten.add.Tensor and self._adds_in_place(args[0], sys._getframe(2).f_back):
            self.log.resize(self.record(args[0])[0], 0)
        for value in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if isinstance(value, Tensor):
                self.record(value)
        if self._meter is not None:
            self._meter(STEPPING if self._is_stepping else self.log.phase, func, args, kwargs or {}, out)
        return out

    def mark_optimizer(self, begins: bool) -> None:
        """Note that the optimizer's step begins or ends, in whatever phase."""
        self._is_stepping = begins

    def __enter__(self) -> "AllocationTracker":
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def log_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage in tracker._indices:
                tracker.log.resize(tracker._indices[storage], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = log_resize  # type: ignore[method-assign, assignment]
        # DTensor finds the shape of a result with fake tensors of the full, unsharded size.
        ShardingPropagator._fake_mode_lock = PausedTracking(self)  # type: ignore[assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._fake_mode_lock = nullcontext()
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def record(self, tensor: Tensor) -> list[int]:
        """Log a tensor's storages that are new; return the indices of all. Quantized and sharded ones have several."""
        if not isinstance(tensor, FakeTensor) and hasattr(tensor, "__tensor_flatten__"):
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            return [index for part in parts if isinstance(part, Tensor) for index in self.record(part)]
        storage = tensor.untyped_storage()
        if storage in self._indices:
            return [int(self._indices[storage])]
        if tensor.device.type == "meta":
            return []
        account = current_account()
        side = account.side if tensor.device.type == self.device.type else "host"
        index = self.log.allocate(storage.nbytes(), side, account.category)
        self._indices[storage] = index
        self._nodes[index] = get_autograd_node()
        weakref.finalize(storage, self.log.resize, index, 0).atexit = False
        return [index]

    def _adds_in_place(self, first: Tensor, caller: FrameType | None) -> bool:
        """Return whether autograd sums two gradients here and would do so in place, into the first, without a dispatch
        mode (`can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp).

        A sum in the backward formula of a node looks the same, except that the same node allocated its first term.
        """
        storage = first.untyped_storage()
        return (
            (caller is None or caller.f_code is _engine_run_backward.__code__)
            and not torch.is_grad_enabled()
            and (first._use_count(), torch._C._storage_Use_Count(storage._cdata)) == UNSHARED  # type: ignore[attr-defined]
            and is_non_overlapping_and_dense_or_false(first)
            and self._nodes[self.record(first)[0]] != get_autograd_node()
        )

    def assign(self, tensor: Tensor, category: Category, *, beside: Tensor | None = None) -> None:
        """Account a tensor to a category. beside: a tensor on the same side (device or host)."""
        side = None if beside is None else self.log.allocations[self.record(beside)[0]].side
        for index in self.record(tensor):
            self.log.assign(index, category, side)


def get_autograd_node() -> int:
    """Return the sequence number of the node of autograd's graph that is executing; -1 outside a backward pass."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


class PausedTracking:
    """A reusable context in which a tracker is paused."""

    def __init__(self, tracker: AllocationTracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        self._tracker.paused = True

    def __exit__(self, *details: Any) -> None:
        self._tracker.paused = False


@contextmanager
def track_position(tracker: AllocationTracker, state: TrainState) -> Iterator[None]:
    """Log the phase and the layer that the step is in, and account gradients as they arrive, in the body."""
    log = tracker.log
    handles: list[Any] = []
    layer_of: dict[Tensor, str] = {}
    layers = find_layers(state.module)
    for index, layer in enumerate(layers):
        name = f"{index}/{len(layers)}"
        layer_of.update(dict.fromkeys(layer.parameters(), name))
        handles.append(layer.register_forward_pre_hook(lambda *_, name=name: log.enter(log.phase, name)))
        handles.append(layer.register_forward_hook(lambda *_, name=name: log.enter(log.phase, f"{name} after")))

    def log_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
        log.enter(log.phase, layer_of.get(parameter, ""))
        tracker.assign(gradient, "gradients")

    def log_reduced(shard: Tensor) -> None:
        assert shard.grad is not None
        log.enter(log.phase, layer_of.get(shard, ""))
        tracker.assign(shard.grad, "gradients", beside=shard)

    for parameter in state.module.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(log_reduced))  # type: ignore[no-untyped-call]
        elif parameter.requires_grad:
            handles.append(parameter.register_hook(partial(log_gradient, parameter)))  # type: ignore[no-untyped-call]
    handles.append(state.optimizer.register_step_pre_hook(lambda *_: tracker.mark_optimizer(True)))
    handles.append(state.optimizer.register_step_post_hook(lambda *_: tracker.mark_optimizer(False)))
    try:
        with state.observe_phases(log.span):
            yield
    finally:
        for handle in handles:
            handle.remove()


def assign_state(tracker: AllocationTracker, state: TrainState) -> None:
    """Account the tensors that outlive a step: parameters, gradients and the optimizer's state."""
    for parameter in state.module.parameters():
        if parameter.grad is not None:
            tracker.assign(parameter.grad, "gradients")
    for values in state.optimizer.state.values():
        for value in tree_iter(values):
            if isinstance(value, Tensor):
                tracker.assign(value, "optimizer")
    for tensor in (*state.module.parameters(), *state.module.buffers()):
        tracker.assign(tensor, "parameters")


def trace_memory(
    prepare: Prepare,
    device: torch.device,
    steps: int = STEPS,
    *,
    meter: CostMeter | None = None,
    clip: float | None = None,
    primed: bool = False,
) -> MemoryTimeline:
    """Run training steps, and return the memory timeline. Tensors are real or fake, as `prepare` makes them.

    meter: gets the operations of the last step. primed: whether the optimizer has its state before the first step.
    """
    log = AllocationLog()
    tracker = AllocationTracker(log, device, meter)
    with tracker:
        state, batch = prepare()
        if primed:
            initialize_optimizer_state(state)  # tracked, since the code that allocates the state sets its side
            assign_state(tracker, state)
        log.start()
        with track_position(tracker, state):
            for _ in range(steps):
                if meter:
                    meter.phases.clear()
                train_step(state, batch, max_grad_norm=clip)
                assign_state(tracker, state)
    return log.build_timeline()


def initialize_optimizer_state(state: TrainState) -> None:
    """Make the optimizer allocate its state, without a step of the model."""
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


def simulate(
    prepare: Prepare, steps: int = 1, *, meter: CostMeter | None = None, clip: float | None = None
) -> MemoryTimeline:
    """Simulate training steps on fake tensors, for a memory timeline that is representative of all later steps.

    prepare: builds the state and a batch from fake tensors (see `fakify`).
    """
    with sample_chunks(), make_fake_mode():
        made: Prepare = lambda: skip_values(*prepare())  # noqa: E731
        return trace_memory(made, torch.device("cpu"), steps, meter=meter, clip=clip, primed=steps < STEPS)


def skip_values(state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
    """Make the loss scaler step without a check for overflows, and the loss a mean over one term: fake tensors have no
    values, so that neither overflows nor labelled positions can be counted. The objective that the state was made from
    may train afterwards, and is left as it was."""
    objective = copy.copy(state.objective)
    objective.count_terms = lambda batch: 1  # type: ignore[method-assign]
    state.objective = objective
    if state.scaler.is_enabled():
        state.scaler._maybe_opt_step = lambda optimizer, _, *args, **kwargs: optimizer.step(*args, **kwargs)  # type: ignore[method-assign]
    return state, batch


def make_fake_mode() -> FakeTensorMode:
    """Make a context in which new tensors are fake: they have shape and dtype, and no storage."""
    return ShapeMode(allow_non_fake_inputs=True)


@contextmanager
def open_fake_process_group(world: int) -> Iterator[None]:
    """Make this process rank 0 of a fake group of `world` ranks in the body: no other exists, and nothing is sent."""
    hook, concatenate = sys.excepthook, DeviceMesh._concatenate
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)

    def concatenate_really(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():  # it looks for the coordinates of this rank in a tensor
            return concatenate(meshes)

    DeviceMesh._concatenate = staticmethod(concatenate_really)  # type: ignore[method-assign, assignment]
    try:
        with keep_aligned_steps(DTensor._op_dispatcher.sharding_propagator, OutputSharding(None)):
            yield
    finally:
        DeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign]
        dist.destroy_process_group()
        # What DTensor keeps for a mesh serves for equal meshes, whose groups have other names in another world.
        torch._C._clear_DTensor_sharding_propagator_cache()
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
        sys.excepthook = hook  # of the group, it would write "[rank0]" before each line


def fakify(module: nn.Module) -> nn.Module:
    """Replace parameters and buffers of a module, which may be on the meta device, by fake tensors on the CPU, in
    place. Call it in `make_fake_mode`, as within `simulate`."""
    made: dict[int, Tensor] = {}

    def make_fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            trained = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if trained else fake
        return made[id(tensor)]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    held[name] = make_fake(tensor)  # type: ignore[assignment]
        for name, value in vars(part).items():
            if isinstance(value, Tensor):  # as a buffer that is kept under a second name
                setattr(part, name, make_fake(value))
    return module
