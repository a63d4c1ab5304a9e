"""A step of training that allocates nothing, and one that is watched byte by byte.

The only file that uses names of torch which are not public: FakeTensorMode, the dispatch mode, weak dictionaries.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from laconic.memory.account import Category, current
from laconic.planner.ledger import Course, Ledger
from laconic.planner.work import Meter
from laconic.training.kit import Kit, blocks
from laconic.training.objective import Batch
from laconic.training.step import step

Prepare = Callable[[], tuple[Kit, Batch]]

STEPS = 2
"""The optimizer's state is born in the first step, so the second is the one that all others are like."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every tensor's storage into a ledger while it is entered. Real and fake tensors alike."""

    def __init__(self, ledger: Ledger, device: torch.device, meter: Meter | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.device = device
        self._numbers = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self.see(value)
        if self._meter is not None:
            self._meter(self.ledger.phase, func, args, kwargs or {}, out)
        return out

    def __enter__(self) -> "Watch":
        self._resize = torch.UntypedStorage.resize_
        watch, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage in watch._numbers:
                watch.ledger.resized(watch._numbers[storage], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def see(self, tensor: Tensor) -> list[int]:
        """The numbers of a tensor's storages in the ledger, where they are entered if they are new.

        A quantized or a distributed tensor is made of several.
        """
        if not isinstance(tensor, FakeTensor) and hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            return [number for name in names for number in self.see(getattr(tensor, name))]
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            return [int(self._numbers[storage])]
        account = current()
        side = account.side if tensor.device.type == self.device.type else "host"
        number = self.ledger.born(storage.nbytes(), side, account.category)
        self._numbers[storage] = number
        weakref.finalize(storage, self.ledger.resized, number, 0).atexit = False
        return [number]

    def claim(self, tensor: Tensor, category: Category) -> None:
        """Say what a tensor is for."""
        for number in self.see(tensor):
            self.ledger.claim(number, category)


@contextmanager
def watched(watch: Watch, kit: Kit) -> Iterator[None]:
    """Tell the watch what the kit's tensors are for, and where in the model the step is."""
    ledger = watch.ledger
    handles: list[Any] = []
    place: dict[nn.Parameter, str] = {}
    layers = blocks(kit.module)
    for index, layer in enumerate(layers):
        name = f"{index}/{len(layers)}"
        place.update(dict.fromkeys(layer.parameters(), name))
        handles.append(layer.register_forward_pre_hook(lambda *_, name=name: ledger.move(ledger.phase, name)))
        handles.append(layer.register_forward_hook(lambda *_, name=name: ledger.move(ledger.phase, f"{name} after")))

    def arrived(parameter: nn.Parameter, gradient: Tensor) -> None:
        ledger.move(ledger.phase, place.get(parameter, ""))
        watch.claim(gradient, "gradients")

    def register(parameter: nn.Parameter, call: Callable[[nn.Parameter, Tensor], None]) -> Any:
        hook: Callable[[Tensor], None] = lambda gradient: call(parameter, gradient)  # noqa: E731
        return parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    for parameter in kit.module.parameters():
        if parameter.requires_grad:
            handles.append(register(parameter, arrived))
    kept, kit.span = kit.span, phases(ledger)
    try:
        yield
    finally:
        kit.span = kept
        for handle in handles:
            handle.remove()


def phases(ledger: Ledger) -> Callable[[str], Any]:
    """A span that tells the ledger the phase."""

    @contextmanager
    def span(name: str) -> Iterator[None]:
        before = ledger.phase
        ledger.move(name)
        try:
            yield
        finally:
            ledger.move(before)

    return span


def settle(watch: Watch, kit: Kit) -> None:
    """Claim what the step has left: parameters, gradients, the optimizer's state."""
    for parameter in kit.module.parameters():
        if parameter.grad is not None:
            watch.claim(parameter.grad, "gradients")
    for state in kit.optimizer.state.values():
        for value in tree_iter(state):
            if isinstance(value, Tensor):
                watch.claim(value, "optimizer")
    for tensor in (*kit.module.parameters(), *kit.module.buffers()):
        watch.claim(tensor, "parameters")


def trace(
    prepare: Prepare, device: torch.device, steps: int = STEPS, *, meter: Meter | None = None, clip: float | None = None
) -> Course:
    """The course of memory over some steps of a kit, on tensors of whatever kind `prepare` makes.

    meter: is told of the work of the last step.
    """
    ledger = Ledger()
    watch = Watch(ledger, device, meter)
    with watch:
        kit, batch = prepare()
        ledger.begin()
        with watched(watch, kit):
            for _ in range(steps):
                if meter:
                    meter.phases.clear()
                step(kit, batch, clip=clip)
                settle(watch, kit)
    return ledger.close()


def simulate(prepare: Prepare, steps: int = STEPS, *, meter: Meter | None = None, clip: float | None = None) -> Course:
    """The course of memory over some steps, nothing allocated.

    prepare: builds the kit and a batch, from fake tensors (see `imagined`).
    """
    with imagining():
        return trace(lambda: never_overflowing(*prepare()), torch.device("cpu"), steps, meter=meter, clip=clip)


def never_overflowing(kit: Kit, batch: Batch) -> tuple[Kit, Batch]:
    """The same kit with a scaler of the loss that steps without looking for overflows: numbers that are not there."""
    if kit.scaler.is_enabled():
        kit.scaler._maybe_opt_step = lambda optimizer, _, *args, **kwargs: optimizer.step(*args, **kwargs)  # type: ignore[method-assign]
    return kit, batch


def imagining() -> FakeTensorMode:
    """A context in which tensors have shapes and no bytes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def imagined(module: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Put tensors without bytes in the place of a module's own, which may be on the meta device. Call it within
    `simulate`."""
    made: dict[int, Tensor] = {}

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or "cpu"
            )
        return made[id(tensor)]

    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                fake = made.get(id(parameter))
                if fake is None:
                    fake = nn.Parameter(like(parameter), requires_grad=parameter.requires_grad)
                    made[id(parameter)] = fake
                part._parameters[name] = fake  # type: ignore[assignment]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = like(buffer)
    return module
