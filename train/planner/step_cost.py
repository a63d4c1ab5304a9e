"""The time of a training step: a roofline estimate from FLOPs and bytes of its operations and the device's rates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from laconic.models.flop_formulas import group_flops
from train.offload.memory_accounting import current_account
from train.parallel.collective_traffic import COLLECTIVES, count_sent, find_group, find_tensors
from train.parallel.mesh import Axis
from train.planner.device_rates import DeviceRates

FREE = frozenset(
    {"aten.detach", "aten.alias", "aten.lift_fresh", "aten.empty", "aten.empty_like", "aten.empty_strided"}
)
"""Operations that read and write no bytes, besides those that are marked as views."""
STEPPING = "stepping"
"""The phase that the optimizer's own operations are counted in, wherever in the step they run."""
ATTENTION = ("scaled_dot_product", "flash_attention")
GROUPED = torch.ops.aten._grouped_mm


@dataclass
class StepCost:
    """The cost of a step or of a part of it.

    device: seconds of operations on the device. copies: seconds of copies between device and host. host: seconds of
    operations on the host. flops: the device's floating-point operations. shard, context, tensor: bytes that a rank
    sends along these axes of a mesh, if they are very long: n ranks in a ring send (n - 1) / n of it. Its time is in
    none of the others.
    """

    device: float = 0.0
    copies: float = 0.0
    host: float = 0.0
    flops: float = 0.0
    shard: float = 0.0
    context: float = 0.0
    tensor: float = 0.0

    def seconds(self) -> float:
        """Return the duration: copies overlap with the device's operations, the host's operations do not."""
        return max(self.device, self.copies) + self.host

    def plus(self, other: "StepCost", times: float = 1.0) -> "StepCost":
        """Add `times` times another cost to this one."""
        return StepCost(
            self.device + times * other.device,
            self.copies + times * other.copies,
            self.host + times * other.host,
            self.flops + times * other.flops,
            self.shard + times * other.shard,
            self.context + times * other.context,
            self.tensor + times * other.tensor,
        )


@dataclass(eq=False)
class CostMeter:
    """Adds up the cost of operations by phase of the step, from their FLOPs and bytes. groups: axes of the mesh by the
    names of their process groups."""

    rates: DeviceRates
    groups: Mapping[str, Axis] = field(default_factory=dict)
    phases: dict[str, StepCost] = field(default_factory=dict)
    _passes: dict[tuple[int, int], float] = field(default_factory=dict)

    def __call__(self, phase: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if is_free(func):
            return
        cost = self.phases.setdefault(phase, StepCost())
        outputs = find_tensors(out)
        account = current_account()
        if func.namespace in COLLECTIVES:
            self.add_traffic(cost, func, (*args, *kwargs.values()), outputs, account.times)
            return
        if account.copying:
            cost.copies += account.times * self.rates.copies(float(count_bytes(outputs)))
            return
        rates = (self.rates.host or self.rates) if account.side == "host" else self.rates
        flops = count_flops(func, args, kwargs, out) if has_flops(func) else 0.0
        touched = count_bytes(find_tensors(args)) + count_bytes(find_tensors(kwargs)) + count_bytes(outputs)
        seconds = self.pass_over(rates, touched)
        if flops:
            kind = str(outputs[0].dtype).removeprefix("torch.")
            product = rates.products.get(kind, rates.products["float32"])
            # Roofline: compute, or memory traffic at the rate of the largest pass. The curve has the overheads.
            seconds = max(product(flops), touched * rates.passes.seconds[-1] / rates.passes.amounts[-1])
        if account.side == "host":
            cost.host += account.times * seconds
        else:
            cost.device += account.times * seconds
            cost.flops += account.times * flops

    def add_traffic(self, cost: StepCost, func: Any, args: Any, outputs: list[Tensor], times: int) -> None:
        """Add the bytes that a rank sends in a collective, if its ranks are very many."""
        axis = self.groups.get(find_group(args))
        amount = times * count_sent(func, [*find_tensors(args), *outputs])
        if axis == "shard":
            cost.shard += amount
        elif axis == "context":
            cost.context += amount
        elif axis == "tensor":
            cost.tensor += amount

    def pass_over(self, rates: DeviceRates, touched: int) -> float:
        """Return the seconds of an elementwise operation on so many bytes; most sizes occur many times in a step."""
        key = id(rates), touched
        if key not in self._passes:
            self._passes[key] = rates.passes(float(touched))
        return self._passes[key]


@cache
def is_free(func: Any) -> bool:
    """Return whether an operation reads and writes no bytes, as a view."""
    return str(func._overloadpacket) in FREE or bool(getattr(func, "is_view", False))


@cache
def has_flops(func: Any) -> bool:
    """Return whether an operation is a matrix product, a convolution or attention."""
    packet = func._overloadpacket
    return packet in flop_registry or packet is GROUPED or any(part in str(packet) for part in ATTENTION)


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Count the floating-point operations of a call to an operation that `has_flops`."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is GROUPED:
        return float(group_flops(args[0].shape, args[1].shape))
    # The CPU's kernels of attention, which torch's registry of FLOP formulas lacks.
    first = [tensor for tensor in find_tensors(args) if tensor.dim() == 4]
    backward = "backward" in str(packet)
    query, key = (first[1], first[2]) if backward else (first[0], first[1])
    batch, heads, rows, width = query.shape
    return 4.0 * batch * heads * rows * key.shape[2] * width * (2.5 if backward else 1.0)


def count_bytes(values: list[Tensor]) -> int:
    """Count the bytes of the elements of tensors, which may be views of larger ones."""
    return sum([value.nbytes for value in values])
