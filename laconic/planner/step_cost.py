"""How long a step takes, worked out from its operations and from what the device was measured to do."""

from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from laconic.offload.memory_accounting import current_account
from laconic.planner.rates import Rates

FREE = frozenset(
    {"aten.detach", "aten.alias", "aten.lift_fresh", "aten.empty", "aten.empty_like", "aten.empty_strided"}
)
"""Operations that touch no bytes, beside those that say themselves that they are views."""
STEPPING = "stepping"
"""The phase to which the optimizer's own work is counted, wherever in a step it is done."""
ATTENTION = ("scaled_dot_product", "flash_attention")


@dataclass
class Work:
    """Seconds of operations on the device, of copies between device and host, and of operations on the host; and the
    device's floating-point operations."""

    device: float = 0.0
    copies: float = 0.0
    host: float = 0.0
    flops: float = 0.0

    def seconds(self) -> float:
        """Of all: copies go on while the device computes, the host's work does not."""
        return max(self.device, self.copies) + self.host

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        """The two one after the other, the other `times` times."""
        return Work(
            self.device + times * other.device,
            self.copies + times * other.copies,
            self.host + times * other.host,
            self.flops + times * other.flops,
        )


@dataclass(eq=False)
class Meter:
    """Adds up the work of the operations that it is told of, by the phase of the step."""

    rates: Rates
    phases: dict[str, Work] = field(default_factory=dict)
    _free: dict[Any, bool] = field(default_factory=dict)

    def __call__(self, phase: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self.free(func):
            return
        work = self.phases.setdefault(phase, Work())
        inputs, outputs = tensors((args, kwargs)), tensors(out)
        account = current_account()
        if account.copying:
            work.copies += account.times * self.rates.copies(float(size(outputs)))
            return
        rates = (self.rates.host or self.rates) if account.side == "host" else self.rates
        flops = operations(func, args, kwargs, out)
        touched = float(size(inputs) + size(outputs))
        seconds = rates.passes(touched)
        if flops:
            kind = str(outputs[0].dtype).removeprefix("torch.")
            product = rates.products.get(kind, rates.products["float32"])
            # A product reads its matrices at the speed of the largest pass; the small ones' cost is in the curve.
            seconds = max(product(flops), touched * rates.passes.seconds[-1] / rates.passes.amounts[-1])
        if account.side == "host":
            work.host += account.times * seconds
        else:
            work.device += account.times * seconds
            work.flops += account.times * flops

    def free(self, func: Any) -> bool:
        """Whether an operation only looks at memory in another way."""
        if func not in self._free:
            self._free[func] = str(func._overloadpacket) in FREE or bool(getattr(func, "is_view", False))
        return self._free[func]


def operations(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Floating-point operations of a call, 0 for what is no product."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    name = str(packet)
    if any(part in name for part in ATTENTION):  # the CPU's kernels, which torch's table leaves out
        first = [each for each in tensors(args) if each.dim() == 4]
        backward = "backward" in name
        query, key = (first[1], first[2]) if backward else (first[0], first[1])
        batch, heads, rows, width = query.shape
        return 4.0 * batch * heads * rows * key.shape[2] * width * (2.5 if backward else 1.0)
    return 0.0


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in tensors(each)]
    return []


def size(values: list[Tensor]) -> int:
    """Bytes that are looked at, of tensors that may be views of larger ones."""
    return sum(prod(value.shape) * value.element_size() for value in values)
