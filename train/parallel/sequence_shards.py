"""Sequence parallelism: between attention and FFN, where layers normalize and add, each rank along `tensor` has a part
of the positions alone (Korthikanti et al., arXiv 2205.05198)."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layer_lists
from train.parallel.tensor_plan import FUSED, PER_HEAD

Forward = Callable[..., Any]

HIDDEN = "hidden_states"
"""What blocks of transformers call the tensor [rows, positions, width] that they read, where it is not the first."""
POSITIONS = 1
"""The axis of the positions."""
CUT = ("colwise", "rowwise", FUSED, PER_HEAD)
"""The styles of layers between which positions can be spread."""


class SequenceShards:
    """Tensors [rows, positions, width] of which each rank has some positions, and back. All of the layers of a pass
    have the same number of positions."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._positions = 0

    def scatter(self, hidden: Tensor) -> Tensor:
        """Return this rank's positions of a tensor that all ranks have. Raises RecipeError where it has none."""
        if hidden.ndim != 3:
            raise refuse("its blocks read a tensor that is not [rows, positions, width]")
        self._positions = hidden.shape[POSITIONS]
        whole = DTensor.from_local(hidden, self._mesh, [Replicate()], run_check=False)
        part: Tensor = whole.redistribute(placements=[Shard(POSITIONS)]).to_local()
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Return all positions, of which the ranks then compute the same."""
        return self._join(part).to_local().clone()  # FSDP warns of a block that returns a view

    def gather_for_parts(self, part: Tensor) -> Tensor:
        """Return all positions, of which each rank then computes something else: their gradients are summed."""
        return self._join(part).to_local(grad_placements=[Partial()])

    def sum_up(self, partial: Tensor) -> Tensor:
        """Sum tensors over the ranks, and return this rank's positions of the sum."""
        summed = DTensor.from_local(partial, self._mesh, [Partial()], run_check=False)
        part: Tensor = summed.redistribute(placements=[Shard(POSITIONS)]).to_local()
        return part

    def _join(self, part: Tensor) -> DTensor:
        shape = torch.Size((part.shape[0], self._positions, part.shape[2]))
        stride = (shape[1] * shape[2], shape[2], 1)
        parts = DTensor.from_local(
            part.contiguous(), self._mesh, [Shard(POSITIONS)], run_check=False, shape=shape, stride=stride
        )
        return parts.redistribute(placements=[Replicate()])


def find_blocks(module: nn.Module, styles: Mapping[str, str]) -> dict[str, nn.Module]:
    """Find the blocks between whose attention and FFN positions can be spread, by their names, in order.

    styles: of the layers that the ranks cut. Raises RecipeError for a model in which something else is between them.
    """
    if any(hasattr(part, "base_layer") for part in module.modules()):
        raise refuse("it has adapters, which compute with positions of their own")
    names = {part: name for name, part in module.named_modules()}
    lists = [each for each in find_layer_lists(module) if any(name.startswith(f"{names[each]}.") for name in styles)]
    if len(lists) != 1:
        raise refuse(f"one stack of two or more blocks was expected, and {len(lists)} were found")
    blocks = {names[block]: block for block in lists[0].children()}
    for name, block in blocks.items():
        check_block(name, block, styles)
    return blocks


def check_block(name: str, block: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise RecipeError for a block with weights that are neither cut nor those of norms beside what is cut."""
    inside = {key: style for key, style in styles.items() if key.startswith(f"{name}.")}
    homes = {key.rpartition(".")[0] for key, style in inside.items() if style in ("colwise", FUSED)}
    if not homes or not set(inside.values()) <= set(CUT):
        raise refuse("a block has layers that are cut in another way, such as experts")
    for path, part in block.named_modules():
        full = f"{name}.{path}".rstrip(".")
        own = list(part.named_parameters(recurse=False))
        if not own or full in inside:
            continue
        is_home = any(full == home or full.startswith(f"{home}.") for home in homes)
        if is_home or any(weight.ndim > 1 for _, weight in own):
            raise refuse(f"{full} has weights of its own beside those that are cut, and is no norm between them")


def refuse(reason: str) -> RecipeError:
    """Make the error for a model whose positions cannot be spread."""
    return RecipeError(f"mesh: sequence cannot spread the positions of this model: {reason}. Leave sequence out")


def change_hidden(forward: Forward, before: Callable[[Tensor], Tensor]) -> Forward:
    """Return a forward pass that changes the hidden states before it reads them."""

    @wraps(forward)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if args:
            return forward(before(args[0]), *args[1:], **kwargs)
        return forward(**kwargs | {HIDDEN: before(kwargs[HIDDEN])})

    return compute


def change_output(forward: Forward, after: Callable[[Tensor], Tensor]) -> Forward:
    """Return a forward pass that changes the hidden states that it returns, alone or first in a tuple."""

    @wraps(forward)
    def compute(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return (after(output[0]), *output[1:]) if isinstance(output, tuple) else after(output)

    return compute
