"""The processes of a distributed run, as torchrun started them, and the collectives among them."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laconic.errors import LaconicError, MissingPackage, RecipeError, TrainingFailure, UsageError
from laconic.registry import missing_package
from train.parallel.mesh import Axis, AxisSizes, Mesh
from train.parallel.rank_groups import open_axes, open_group
from train.snapshots.group_timeout import find_timeout
from train.step.parallel_strategy import ParallelStrategy

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""torch.distributed backends by device type. With a GPU, offloaded shards and flags of the host go through gloo too."""
LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "remote process has terminated")
"""Parts of the messages of gloo and NCCL when another rank has ended."""
SILENT = ("timed out waiting", "application timeout", "wait timeout after", "collective operation timeout")
"""Parts of those when another rank has not answered in time."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run. rank: the number of this process. world: the number of processes. device: of this process.
    sizes: of the mesh. axes: the device mesh where parameters are distributed tensors, with the axes that it has; its
    `shard` goes along `context`, too. context: the ranks that have the same rows as this one, and other positions."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - as immutable as a string
    sizes: AxisSizes = AxisSizes()  # noqa: RUF009 - a tuple
    axes: DeviceMesh | None = None
    context: DeviceMesh | None = None

    @classmethod
    def of(cls, rank: int, world: int, device: torch.device, mesh: Mesh) -> "Ranks":
        """Make this rank of an initialized process group. Raises RecipeError where the mesh does not fit `world`."""
        sizes = mesh.resolve(world)
        context = None
        if sizes.context > 1:
            context = open_axes(device.type, {"rows": world // sizes.context, "context": sizes.context})["context"]
        is_cut = sizes.tensor > 1 or sizes.pipeline > 1
        if not mesh.is_sharded and not is_cut:
            return cls(rank, world, device, sizes, context=context)
        # Copies of a model that is cut are the replicas of one shard each: DDP takes no distributed tensors.
        needed = {"shard"} if mesh.is_sharded or sizes.replicate > 1 else set()
        named = sizes._replace(shard=sizes.shard * sizes.context, context=1)._asdict().items()
        shape = {name: size for name, size in named if size > 1 or name in needed}
        return cls(rank, world, device, sizes, open_axes(device.type, shape), context)

    def select_axes(self, *names: Axis) -> DeviceMesh | None:
        """Return the part of the device mesh along those of the named axes that it has; None without any."""
        present = tuple(name for name in names if self.axes is not None and name in (self.axes.mesh_dim_names or ()))
        return self.axes[present] if self.axes is not None and present else None

    @property
    def data_rank(self) -> int:
        """Which part of each batch this rank trains on: ranks along `context`, `tensor` and `pipeline` have the same
        rows."""
        return self.rank // (self.sizes.context * self.sizes.tensor) % self.data_world

    @property
    def seed_rank(self) -> int:
        """The same number on ranks that draw the same random numbers, which are those along `tensor`."""
        return self.rank // self.sizes.tensor

    @property
    def data_world(self) -> int:
        """How many parts each batch has."""
        return self.sizes.replicate * self.sizes.shard

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    @property
    def is_group(self) -> bool:
        """Whether there are several ranks, or a single one that holds shards."""
        return self.world > 1 or self.axes is not None

    def reduce_terms(self, terms: int) -> float:
        """Return the mean over the ranks of their numbers of loss terms. Each rank divides its sum of losses by it, so
        that the average of the ranks' gradients is that of the batch. The host has to know whether there is any. Ranks
        that compute the same terms count as often in the sum as in their number; those along `context` compute a part
        each of the terms that they count."""
        if self.world == 1 or dist.get_backend() == "fake":  # without other ranks; and its tensors may have no values
            return float(terms)
        number = torch.tensor(terms)
        self._reduce(number)
        return int(number) / self.world / self.sizes.context

    def average(self, loss: Tensor) -> Tensor:
        """Average a tensor over the ranks."""
        loss = loss.clone()
        self._reduce(loss)
        return loss / self.world

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank, so that all ranks decide alike."""
        number = torch.tensor(int(flag))
        self._reduce(number)
        return bool(number)

    def _reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)


class RanksStrategy(ParallelStrategy):
    """What all strategies for several ranks share: reductions over them."""

    def __init__(self, ranks: Ranks, micro_batches: int = 1) -> None:
        """micro_batches: of each batch, the same number on every rank."""
        self.ranks, self.micro_batches = ranks, micro_batches
        self.data_part = ranks.data_rank, ranks.data_world

    def reduce_terms(self, terms: int) -> float:
        return self.ranks.reduce_terms(terms)

    def average(self, loss: Tensor) -> Tensor:
        return self.ranks.average(loss)

    def any(self, flag: bool) -> bool:
        return self.ranks.any(flag)

    def name_mesh(self) -> str:
        return str(self.ranks.sizes)


@contextmanager
def open_ranks(device: torch.device, mesh: Mesh) -> Iterator[Ranks]:
    """Open the ranks of this run for the body: those that torchrun started (RANK, WORLD_SIZE and LOCAL_RANK in the
    environment), or this process alone. Whoever has opened the process group already, as Ray Train does, closes it.

    When a rank fails, the others raise TrainingFailure. Raises UsageError for a rank without a device, RecipeError for
    a mesh that does not fit the world size or the device, MissingPackage where the mesh needs DeepSpeed. A RecipeError
    is that of all ranks: the first raises it, and the others exit without a message.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    try:
        mesh.resolve(world)
        if mesh.compress == "bf16" and device.type == "cpu" and world > 1:
            raise RecipeError("mesh: DDP sends gradients in bf16 between GPUs alone. Set compress: fp16")
        if mesh.zero is not None and importlib.util.find_spec("deepspeed") is None:
            raise missing_package("deepspeed")
    except (RecipeError, MissingPackage) as error:
        exit_unless_first(rank, error)
        raise
    if world == 1 and not mesh.is_sharded:
        yield Ranks(device=device)
        return
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"rank {rank} would be number {local} on a machine with {torch.cuda.device_count()} CUDA devices. "
                f"Start as many processes as there are (torchrun --nproc-per-node)"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    try:
        is_ours = open_group(BACKENDS[device.type], world, timedelta(seconds=mesh.timeout))
        yield Ranks.of(rank, world, device, mesh)
    except RecipeError as error:
        exit_unless_first(rank, error)
        raise
    except RuntimeError as error:
        if reason := explain_loss(error, find_timeout() or timedelta(seconds=mesh.timeout)):
            raise TrainingFailure(f"rank {rank} {reason}") from error
        raise
    # Not after a failure: the ranks would wait for one another. The others notice the end of this process.
    if is_ours:
        dist.destroy_process_group()


def explain_loss(error: RuntimeError, timeout: timedelta) -> str:
    """Say what of another rank is the cause of an error; "" for anything else. timeout: how long ranks wait."""
    message = str(error).lower()
    if any(sign in message for sign in LOST):
        return "stopped, since another rank has. What happened there stands in its own message"
    if any(sign in message for sign in SILENT):
        return (
            f"has waited {timeout.total_seconds():g} s (mesh.timeout) for another rank, which does not answer: it is "
            f"stopped, or its network is down. Start the same command again when it has ended: it goes on from the "
            f"last snapshot"
        )
    return ""


def exit_unless_first(rank: int, error: LaconicError) -> None:
    """End the process with the exit code of an error that all ranks have, unless it is the first, which says so."""
    if rank > 0:
        sys.exit(error.exit_code)
