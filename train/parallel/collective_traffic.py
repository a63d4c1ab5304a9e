"""What a rank sends to others: the bytes of collectives, counted where they are called."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from train.parallel.ranks import Ranks

COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of the operations that send to other ranks."""
SILENT = ("barrier", "recv")
"""The first parts of the names of those that send nothing."""


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that this rank sends in the body, if the ranks of a collective are a ring.

    sent: so far. sizes: numbers of ranks by the names of their process groups; of others it is `world`.
    """

    def __init__(self, sizes: Mapping[str, int], world: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = 0.0
        self._sizes, self._world = sizes, world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # else what it sends would not be seen: it calls collectives of its own
        output = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVES:
            values = (*args, *(kwargs or {}).values())
            group = find_group(values)
            if group:  # else it waits for another operation, or wraps what that returned
                ranks = self._sizes.get(group, self._world)
                self.sent += count_sent(func, [*find_tensors(values), *find_tensors(output)], ranks)
        return output


def name_groups(ranks: Ranks) -> dict[str, int]:
    """Return the number of ranks along each axis of the mesh, by the name of its process group."""
    meshes = [mesh for mesh in (ranks.axes, ranks.context) if mesh is not None]
    groups = [mesh.get_group(number) for mesh in meshes for number in range(mesh.ndim)]
    return {str(group.group_name): group.size() for group in groups}


def count_sent(func: Any, tensors: Sequence[Tensor], ranks: float = inf) -> float:
    """Count the bytes that a rank sends in a collective, whose ranks are a ring: of the largest of its tensors, and
    twice that where each rank gets the sum. ranks: their number; nearly all of it is sent by very many."""
    name = func.name().partition("::")[2]
    if name.startswith(SILENT):
        return 0
    amount = max((tensor.nbytes for tensor in tensors), default=0)
    if name.startswith("send"):
        return amount
    return amount * (2 if "reduce" in name and "scatter" not in name else 1) * (1 - 1 / ranks)


def find_group(args: Iterable[Any]) -> str:
    """Find the name of the process group among the arguments of a collective; empty without one."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with suppress(RuntimeError, TypeError):
                return str(dist.ProcessGroup.unbox(value).group_name)
    return next((value for value in reversed([*args]) if isinstance(value, str)), "")


def find_tensors(value: Any) -> list[Tensor]:
    """Find the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    tensors: list[Tensor] = []
    for item in value:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, (tuple, list, dict)):
            tensors += find_tensors(item)
    return tensors
