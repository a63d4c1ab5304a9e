"""The process groups of a run, in all of which ranks wait equally long for one that does not answer. Torch gives each
new group a timeout of its own, whatever that of the default group is."""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from laconic.errors import UsageError
from train.snapshots.group_timeout import find_timeout

START = timedelta(minutes=30)
"""How long ranks wait for others to start, which machines do at different times."""


def open_group(backend: str, world: int, timeout: timedelta) -> bool:
    """Open the group of all ranks unless there is one, and return whether there was none; all ranks have started then.
    timeout: of its collectives. Raises UsageError where the one that there is has another backend."""
    if dist.is_initialized():
        check_backend(backend)
        return False
    if world == 1 and "MASTER_ADDR" not in os.environ:
        store, rank = dist.HashStore(), 0  # type: ignore[attr-defined]
    else:
        store, rank, world = next(rendezvous("env://", timeout=START))
    store.set(f"started/{rank}", "")
    store.wait([f"started/{other}" for other in range(world)], START)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return True


def check_backend(expected: str) -> None:
    """Raise UsageError where the process group that is open has no backend for a device that ranks send from."""
    found = str(dist.get_backend_config())
    needed = expected.split(",") if ":" in expected else [f"cpu:{expected}"]
    if not set(needed) <= set(found.split(",")):
        raise UsageError(
            f"the process group of this run is open with the backend {found}, and {expected} is needed. Give it that "
            f'one, in Ray Train TorchConfig(backend="{expected}")'
        )


def open_axes(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Open the device mesh of all ranks, with the groups of those along each axis. sizes: of the axes, outermost
    first."""
    names, timeout = tuple(sizes), find_timeout()
    if timeout is None or len(sizes) == 1:  # an axis of all ranks has the default group
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=names)
    ranks = torch.arange(dist.get_world_size()).reshape(*sizes.values())
    groups = []
    for axis, size in enumerate(ranks.shape):
        neighbours = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        group, _ = dist.new_subgroups_by_enumeration(neighbours, timeout=timeout)  # type: ignore[no-untyped-call]
        groups.append(group)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)
