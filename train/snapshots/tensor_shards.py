"""The state of a training run, split into the tensor shards of this rank and plain values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product, zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from laconic.errors import UsageError


@dataclass(frozen=True, eq=False)
class TensorShard:
    """A tensor of the state, or a contiguous piece of it on this rank. name: of the tensor. shape: of the tensor over
    all ranks. offset: of the piece in it. tensor: the piece, a plain tensor that shares its memory with the state."""

    name: str
    shape: torch.Size
    offset: torch.Size
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Offset and shape of the shard, as torch.distributed.checkpoint takes them."""
        return ChunkStorageMetadata(self.offset, self.tensor.shape)

    def copy(self) -> "TensorShard":
        """Copy the shard to host memory."""
        copied = self.tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return TensorShard(self.name, self.shape, self.offset, copied)


@dataclass(frozen=True, eq=False)
class FlatFragment:
    """Consecutive elements of a tensor in the order of its rows, which need not end where a row does. shape: of the
    tensor. start: of the first element in it. values: [elements], which shares its memory with the state."""

    shape: torch.Size
    start: int
    values: Tensor


def iterate_boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the offset and the size of boxes that have the elements from `start` to `end` of a tensor, in order."""
    if not shape and start < end:
        yield (), ()
        return
    width = prod(shape[1:])
    while start < end:
        row, begin = divmod(start, width)
        rows = 0 if begin else (end - start) // width
        stop = min(end, start + max(1, rows) * width - begin)
        if rows:
            yield (row, *[0] * len(shape[1:])), (rows, *shape[1:])
        else:
            for offset, size in iterate_boxes(shape[1:], begin, begin + stop - start):
                yield (row, *offset), (1, *size)
        start = stop


LEAVES = (Tensor, FlatFragment)
"""What a state has tensors as."""


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, TensorShard], dict[str, Any]]:
    """Split a state into tensor shards and plain values, by dotted path; the second and later pieces of one tensor have
    their offset behind it.

    A tensor subclass that is made of tensors (the 8-bit state of an optimizer) is split into these. If it is sharded,
    its parts are bound to their rank and number of ranks: blocks of quantized values cannot be resharded. Raises
    UsageError for a value that is neither tensor nor plain, and for two values of one path.
    """
    shards: dict[str, TensorShard] = {}
    values: dict[str, Any] = {}
    for path, node, key in iterate_leaves(state):
        value = node[key]
        parts: dict[str, TensorShard] = {}
        for shard in iterate_shards(path, value) if isinstance(value, LEAVES) else ():
            parts[f"{shard.name}@{list(shard.offset)}" if shard.name in parts else shard.name] = shard
        if not isinstance(value, LEAVES):
            for name, odd in find_unsupported(path, value):
                raise UsageError(
                    f"{name} of the state is a {type(odd).__name__}. A snapshot keeps tensors, and what goes into JSON "
                    f"unchanged: numbers, text, lists, mappings with names as keys"
                )
            values[path] = value
        if twice := [name for name in parts or (path,) if name in shards] or (parts.keys() & values.keys()):
            raise UsageError(f"the state holds two things called {min(twice)!r}. Rename one of them")
        shards.update(parts)
    return shards, values


def restore_values(state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Replace the plain values of a state, by dotted path; a list becomes a tuple where the state has one."""
    for path, node, key in iterate_leaves(state):
        if path in values and not isinstance(node[key], LEAVES):
            node[key] = restore_tuples(values[path], node[key])


def iterate_leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted path, container and key of each tensor, and of each outermost value without tensors in it."""
    for key, value in list(node.items() if isinstance(node, Mapping) else enumerate(node)):
        name = f"{path}.{key}" if path else str(key)
        if is_branch(value):
            yield from iterate_leaves(value, name)
        else:
            yield name, node, key


def is_branch(value: Any) -> bool:
    """Return whether a value contains tensors, or integer keys, as the state of an optimizer has them."""
    if isinstance(value, Mapping):
        numbered = not all(isinstance(key, str) for key in value)
        return numbered or any(isinstance(item, LEAVES) or is_branch(item) for item in value.values())
    return isinstance(value, list) and any(isinstance(item, LEAVES) or is_branch(item) for item in value)


def find_unsupported(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of everything that JSON does not restore as it was, apart from tuples."""
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from find_unsupported(f"{path}.{key}", item)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        yield path, value


def restore_tuples(saved: Any, like: Any) -> Any:
    """Restore a value from JSON, with tuples where `like` has them."""
    if isinstance(saved, list) and isinstance(like, (list, tuple)):
        items = [restore_tuples(*pair) for pair in zip_longest(saved, like[: len(saved)])]
        return tuple(items) if isinstance(like, tuple) else items
    if isinstance(saved, dict) and isinstance(like, Mapping):
        return {key: restore_tuples(value, like.get(key)) for key, value in saved.items()}
    return saved


def iterate_shards(name: str, tensor: Tensor | FlatFragment) -> Iterator[TensorShard]:
    """Yield the pieces of a tensor on this rank, as plain tensors."""
    if isinstance(tensor, FlatFragment):
        rest = tensor.values
        for offset, size in iterate_boxes(tensor.shape, tensor.start, tensor.start + len(rest)):
            piece, rest = rest[: prod(size)], rest[prod(size) :]
            yield TensorShard(name, tensor.shape, torch.Size(offset), piece.view(size))
    elif isinstance(tensor, DTensor):
        mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        if here is None:
            return
        local = tensor.to_local().detach()
        if hasattr(local, "__tensor_flatten__"):
            place, places = ("x".join(map(str, numbers)) for numbers in (here, mesh.shape))
            yield from iterate_shards(f"{name}[{place} of {places}]", local)
        else:
            for pieces in product(*(list_pieces(tensor, here, axis) for axis in range(tensor.ndim))):
                window = tuple(slice(begin, end) for _, begin, end in pieces)
                yield TensorShard(name, tensor.shape, torch.Size(start for start, _, _ in pieces), local[window])
    elif hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from iterate_shards(f"{name}.{part}", getattr(tensor, part))
    else:
        yield TensorShard(name, tensor.shape, torch.Size([0] * tensor.ndim), tensor.detach())


def list_pieces(tensor: DTensor, here: Sequence[int], axis: int) -> list[tuple[int, int, int]]:
    """List the contiguous pieces of this rank along an axis of a tensor: where each begins in the tensor, where it
    begins in the rank's shard, and where it ends there.

    There are several where a layer computes queries, keys and values, and each rank has its heads of all three.
    here: the place of the rank in the tensor's mesh.
    """
    splits: list[tuple[int, int, int]] = []  # place, number of ranks, blocks that are split alike; in their order
    for place, size, placement in zip(here, tensor.device_mesh.shape, tensor.placements, strict=True):
        split: Any = placement
        if not split.is_replicate() and split.dim == axis:
            # An axis whose split counts blocks comes behind the next one: fully_shard splits parts of layers.
            is_late = bool(splits) and splits[-1][2] > 1
            splits.insert(len(splits) - is_late, (place, size, getattr(split, "split_factor", 1)))
            if is_late:
                splits[-1] = (*splits[-1][:2], 1)
    index = torch.arange(tensor.shape[axis])
    for place, size, factor in splits:
        shards = [block.chunk(size)[place] for block in index.chunk(factor) if place < len(block.chunk(size))]
        index = torch.cat(shards) if shards else index[:0]
    ends = [*(torch.nonzero(index.diff() != 1).flatten() + 1).tolist(), len(index)] if len(index) else []
    return [(int(index[begin]), begin, end) for begin, end in pairwise([0, *ends])]


class ShardSavePlanner(DefaultSavePlanner):
    """Each rank saves its shards; a shard that several ranks hold is saved by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(shard.name, shard.offset),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(shard.chunk, TensorProperties(dtype=shard.tensor.dtype), shard.shape),
                )
                for shard in self.state_dict.values()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return find_piece(self.state_dict, index)


def find_piece(shards: Mapping[str, TensorShard], index: MetadataIndex) -> Tensor:
    """Find the piece of a tensor that an index names."""
    first = shards[index.fqn]
    return (first if first.offset == index.offset else shards[f"{index.fqn}@{list(index.offset or ())}"]).tensor


class ShardLoadPlanner(DefaultLoadPlanner):
    """Each rank loads its shards, from chunks that may have been sharded differently."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for shard in self.state_dict.values():
            saved = self.metadata.state_dict_metadata[shard.name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(shard.name, saved, [shard.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return find_piece(self.state_dict, index)
