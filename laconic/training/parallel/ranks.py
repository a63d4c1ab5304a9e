"""The processes of a run that torchrun has started: which one this is, and what they say to one another."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.errors import TrainingFailure, UsageError
from laconic.training.parallel.mesh import Mesh

TIMEOUT = timedelta(minutes=30)
"""After which a rank no longer waits for one that lives and does not answer. A dead one is noticed at once."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What carries the tensors of each device. Offloaded shards, and what the host tells, go through gloo on a GPU too."""
LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "remote process has terminated")
"""What gloo and NCCL say where another rank is gone."""


@dataclass(frozen=True)
class Ranks:
    """rank: the number of this process. world: how many there are. device: of this one. axes: all of them, as copies of
    the model and shards of each, where it is sharded."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - as immutable as a string
    axes: DeviceMesh | None = None

    @classmethod
    def of(cls, rank: int, world: int, device: torch.device, mesh: Mesh) -> "Ranks":
        """This process among those of a group that is there. Raises RecipeError where the mesh does not fit them."""
        copies, shards = mesh.resolve(world)
        if not mesh.sharded:
            return cls(rank, world, device)
        shape, names = ((shards,), ("shard",)) if copies == 1 else ((copies, shards), ("replicate", "shard"))
        return cls(rank, world, device, init_device_mesh(device.type, shape, mesh_dim_names=names))

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def total(self, terms: int) -> Tensor:
        """The mean over the ranks of their terms, [] float32: what a rank's sum of losses is divided by, for the
        average of the ranks' gradients to be that of the whole batch."""
        number = torch.tensor(terms, dtype=torch.int64, device=self.device)
        self._reduce(number)
        return number.float() / self.world

    def average(self, loss: Tensor) -> Tensor:
        """The mean over the ranks, on each."""
        loss = loss.clone()
        self._reduce(loss)
        return loss / self.world

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank: what one decides by, all decide by."""
        number = torch.tensor(int(flag))
        self._reduce(number)
        return bool(number)

    def _reduce(self, tensor: Tensor) -> None:
        """Add up over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)


@contextmanager
def started(device: torch.device, mesh: Mesh, *, timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """The ranks of this run while the body runs: those of torchrun, which tells by RANK, WORLD_SIZE and LOCAL_RANK, or
    this process alone.

    A rank that fails ends the others with it: those raise TrainingFailure. Raises UsageError for a rank without a
    device, RecipeError for a mesh that does not fit the ranks.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mesh.resolve(world)
    if world == 1 and not mesh.sharded:
        yield Ranks(device=device)
        return
    rank, local = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"rank {rank} would be number {local} on a machine with {torch.cuda.device_count()} CUDA devices. "
                f"Start as many processes as there are (torchrun --nproc-per-node)"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = BACKENDS[device.type]
    if world == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
    else:
        dist.init_process_group(backend, timeout=timeout)
    try:
        yield Ranks.of(rank, world, device, mesh)
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in LOST):
            raise TrainingFailure(
                f"rank {rank} stopped, since another rank has. What happened there stands in its own message"
            ) from error
        raise
    # Not after a failure: the others would be waited for, and they wait for this one. Its end is what they notice.
    dist.destroy_process_group()
