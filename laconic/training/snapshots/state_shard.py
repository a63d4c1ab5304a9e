"""The state of a training run, cut into what lies on this rank: tensors or pieces of them, and plain values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
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
class Shard:
    """A tensor of the state, or the piece of it that lies on this rank.

    whole: the tensor's shape over all ranks. offset: where the piece begins in it. tensor: the piece, a plain tensor
    that shares its memory with the state.
    """

    whole: torch.Size
    offset: torch.Size
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The same as torch.distributed.checkpoint says it."""
        return ChunkStorageMetadata(self.offset, self.tensor.shape)

    def copy(self) -> "Shard":
        """The same values in host memory of their own."""
        copied = self.tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return Shard(self.whole, self.offset, copied)


def cut(state: Mapping[str, Any]) -> tuple[dict[str, Shard], dict[str, Any]]:
    """The shards and the plain values of a state, by their dotted path.

    A tensor subclass that is made of tensors (the 8-bit state of an optimizer) is cut into those. Where such a one is
    itself sharded, its pieces belong to their rank and number of ranks: blocks of quantized values do not cut again.
    Raises UsageError for what is neither tensor nor plain value, and for two things of one path.
    """
    shards: dict[str, Shard] = {}
    values: dict[str, Any] = {}
    for path, node, key in leaves(state):
        value = node[key]
        found = dict(pieces(path, value)) if isinstance(value, Tensor) else {}
        if not isinstance(value, Tensor):
            for name, odd in foreign(path, value):
                raise UsageError(
                    f"{name} of the state is a {type(odd).__name__}. A snapshot keeps tensors, and what goes into JSON "
                    f"unchanged: numbers, text, lists, mappings with names as keys"
                )
            values[path] = value
        if twice := [name for name in found or (path,) if name in shards] or (found.keys() & values.keys()):
            raise UsageError(f"the state holds two things called {min(twice)!r}. Rename one of them")
        shards.update(found)
    return shards, values


def put(state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Replace the plain values of a state, by their dotted path; a list becomes a tuple where one was."""
    for path, node, key in leaves(state):
        if path in values and not isinstance(node[key], Tensor):
            node[key] = like(values[path], node[key])


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where the tensors are, and the largest values without tensors: dotted path, container, key in it."""
    for key, value in list(node.items() if isinstance(node, Mapping) else enumerate(node)):
        name = f"{path}.{key}" if path else str(key)
        if is_branch(value):
            yield from leaves(value, name)
        else:
            yield name, node, key


def is_branch(value: Any) -> bool:
    """Whether there are tensors somewhere below, or numbered keys, as optimizers have them."""
    if isinstance(value, Mapping):
        numbered = not all(isinstance(key, str) for key in value)
        return numbered or any(isinstance(each, Tensor) or is_branch(each) for each in value.values())
    return isinstance(value, list) and any(isinstance(each, Tensor) or is_branch(each) for each in value)


def foreign(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What does not come back from JSON as it was, but for tuples: its path and itself."""
    if isinstance(value, (dict, list, tuple)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from foreign(f"{path}.{key}", each)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        yield path, value


def like(saved: Any, given: Any) -> Any:
    """A value from JSON, with tuples where the given one has them."""
    if isinstance(saved, list) and isinstance(given, (list, tuple)):
        items = [like(*pair) for pair in zip_longest(saved, given[: len(saved)])]
        return tuple(items) if isinstance(given, tuple) else items
    if isinstance(saved, dict) and isinstance(given, Mapping):
        return {key: like(value, given.get(key)) for key, value in saved.items()}
    return saved


def pieces(name: str, tensor: Tensor) -> Iterator[tuple[str, Shard]]:
    """What this rank holds of a tensor, as plain tensors."""
    if isinstance(tensor, DTensor):
        mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        if here is None:
            return
        local = tensor.to_local().detach()
        if hasattr(local, "__tensor_flatten__"):
            place, places = ("x".join(map(str, numbers)) for numbers in (here, mesh.shape))
            yield from pieces(f"{name}[{place} of {places}]", local)
        else:
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            yield name, Shard(tensor.shape, chunk.offsets, local)
    elif hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from pieces(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, Shard(tensor.shape, torch.Size([0] * tensor.ndim), tensor.detach())


class Saving(DefaultSavePlanner):
    """Each rank saves the shards that it holds; what several hold alike, one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, shard.offset),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(shard.chunk, TensorProperties(dtype=shard.tensor.dtype), shard.whole),
                )
                for name, shard in self.state_dict.items()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor


class Loading(DefaultLoadPlanner):
    """Each rank loads the shards that it holds, out of pieces that may have been cut otherwise."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, shard in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [shard.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor
