"""The norm of a gradient, and clipping by it, whatever mesh the parameters are spread over."""

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

EPSILON = 1e-6
"""Added to a norm before it divides, as torch does."""


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients in place so that their norm, which is `norm` on all ranks, [] float32, becomes at most
    `max_norm`.

    torch's clip_grad_norm_ raises for a mixture of tensors and distributed tensors, or of meshes, where it uses
    foreach, as on GPUs.
    """
    scale = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            shard = to_shard(parameter.grad)
            shard.mul_(scale.to(shard.device))


def measure_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Measure the norm of all gradients together, [] float32; one collective for each set of axes that they are sharded
    along."""
    shards: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        shards.setdefault(find_sharded_axes(gradient), []).append(to_shard(gradient))
    norms = []
    for axes, group in shards.items():
        norm = get_total_norm(group)
        if axes is not None:
            mesh, dimensions = axes
            square = norm.square()
            for dimension in dimensions:
                dist.all_reduce(square, group=mesh.get_group(dimension))
            norm = square.sqrt()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else get_total_norm(norms)


def find_sharded_axes(tensor: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Return the mesh of a tensor, and the axes that it is sharded along; None where each rank holds all of it."""
    if not isinstance(tensor, DTensor):
        return None
    axes = tuple(axis for axis, kind in enumerate(tensor.placements) if not kind.is_replicate())
    return (tensor.device_mesh, axes) if axes else None


def to_shard(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
