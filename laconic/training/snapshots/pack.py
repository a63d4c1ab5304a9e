"""Packs of tensors, each tensor under the digest of its content: what is in a pack already is not written again.

They are safetensors, so that reading them executes nothing (torch's own format keeps its metadata as a pickle).
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from laconic.errors import SourceError
from laconic.hashing import seal
from laconic.training.snapshots.card import PACKS, Card, Pack, Piece, Whole, card_path, whole

PACK_SIZE = 64 * 2**20
"""Bytes after which a pack is closed. A pack stays while one of its tensors is in use, so it must not be large; each
costs a wait for the disk, so it must not be small."""


def digest(tensor: Tensor) -> str:
    """Of a tensor's dtype, shape and values: 32 hex digits of SHA-256, which processors compute faster than BLAKE2."""
    sha = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]


class Writer(StorageWriter):
    """Writes what is new into packs, and the card when all ranks are done.

    known: the cards whose packs may be used. keys: of the tensors that did not change since they were looked at last;
    after the write, of all that this rank wrote.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        values: dict[str, Any],
        known: Mapping[int, Card],
        keys: Mapping[MetadataIndex, str],
    ) -> None:
        self.folder = folder
        self.keys = dict(keys)
        self.step = step
        self.values = values
        self.sizes = {name: pack.size for card in known.values() for name, pack in card.packs.items()}
        self.places = {key: name for card in known.values() for key, name in card.places.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        fresh: dict[str, Tensor] = {}
        size = 0
        for item in sorted(plan.items, key=lambda item: (item.index.fqn, tuple(item.index.offset or ()))):
            if self.keys.get(item.index) in self.places:
                continue
            tensor = own(planner.resolve_data(item))
            self.keys[item.index] = key = digest(tensor)
            if key not in self.places:
                fresh[key] = tensor
                size += tensor.nbytes
            if size >= PACK_SIZE:
                self._close(fresh)
                size = 0
        self._close(fresh)
        done: Future[list[WriteResult]] = Future()
        keys = {item.index: self.keys[item.index] for item in plan.items}
        places = {index: (key, self.places[key]) for index, key in keys.items()}
        done.set_result([WriteResult(i, self.sizes[name], (key, name)) for i, (key, name) in places.items()])
        return done

    def _close(self, fresh: dict[str, Tensor]) -> None:
        if not fresh:
            return
        name = f"{hashlib.sha256(' '.join(sorted(fresh)).encode()).hexdigest()[:32]}.safetensors"
        with whole(self.folder / PACKS / name) as half:
            save_file(fresh, half)
            self.sizes[name] = half.stat().st_size
        self.places.update(dict.fromkeys(fresh, name))
        fresh.clear()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result for each in results for result in each}
        places: dict[str, str] = dict(result.storage_data for result in written.values())
        sizes = {result.storage_data[1]: result.size_in_bytes for result in written.values()}
        card = Card(
            step=self.step,
            tensors={
                fqn: Whole(
                    dtype=str(each.properties.dtype),
                    shape=each.size,
                    pieces=tuple(
                        Piece(
                            offset=chunk.offsets,
                            shape=chunk.sizes,
                            key=written[MetadataIndex(fqn, chunk.offsets)].storage_data[0],
                        )
                        for chunk in each.chunks
                    ),
                )
                for fqn, each in metadata.state_dict_metadata.items()
                if isinstance(each, TensorStorageMetadata)
            },
            packs={
                name: Pack(size=sizes[name], keys=tuple(sorted(key for key in places if places[key] == name)))
                for name in sorted(set(places.values()))
            },
            values=self.values,
        )
        with whole(card_path(self.folder, self.step)) as half:
            half.write_bytes(seal(card.model_dump(mode="json")))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class Reader(StorageReader):
    """Reads the tensors of a card, each checked against its digest. Raises SourceError for one that is damaged."""

    def __init__(self, folder: Path, card: Card) -> None:
        self.folder = folder
        self.card = card

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, each.dtype.removeprefix("torch."))),
                torch.Size(each.shape),
                [ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in each.pieces],
            )
            for name, each in self.card.tensors.items()
        }
        return Metadata(dict(tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = self.card.places
        keys = {
            MetadataIndex(name, piece.offset): piece.key
            for name, each in self.card.tensors.items()
            for piece in each.pieces
        }
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(places[keys[item.storage_index]], []).append(item)
        for name, items in sorted(wanted.items()):
            with opened(self.folder / PACKS / name) as read:
                for item in items:
                    window = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
                    target = planner.resolve_tensor(item)
                    target.copy_(read(keys[item.storage_index])[window])
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


@contextmanager
def opened(file: Path) -> Iterator[Callable[[str], Tensor]]:
    """What gives a tensor of a pack by its key. Raises SourceError where one is not as it was written."""

    def read(key: str) -> Tensor:
        tensor: Tensor = pack.get_tensor(key)
        if digest(tensor) != key:
            raise SourceError(f"{file} was changed after it was written")
        return tensor

    try:
        with safe_open(file, framework="pt") as pack:
            yield read
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{file} does not read: {error}") from error


def own(tensor: Any) -> Tensor:
    """A tensor in host memory that it shares with no other, as safetensors wants it."""
    host: Tensor = tensor.detach().cpu().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()
