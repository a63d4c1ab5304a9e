"""Storage of torch.distributed.checkpoint in packs: safetensors files that hold each tensor under the digest of its
content, so that a tensor that is stored already is not written again.
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
from train.snapshots.snapshot_manifest import (
    PACKS,
    PackEntry,
    SnapshotManifest,
    TensorChunk,
    TensorEntry,
    manifest_path,
    write_atomically,
)

PACK_SIZE = 64 * 2**20
"""Bytes after which a pack is written. A pack is kept while one of its tensors is in use, so it must not be large; each
costs an fsync, so it must not be small."""


def hash_tensor(tensor: Tensor) -> str:
    """Hash a tensor's dtype, shape and values: 32 hex digits of SHA-256, on CPUs faster than BLAKE2."""
    sha = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]


class UnchangedPlans:
    """What PackWriter and PackReader share: plans of torch.distributed.checkpoint are taken as they are."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: nothing is kept from one checkpoint to the next."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan of a rank."""
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """Return the plans of all ranks."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path names a checkpoint of this storage: it is opened by a folder and a manifest only."""
        return False


class PackWriter(UnchangedPlans, StorageWriter):
    """Writes new tensors into packs, and the manifest when all ranks are done. known: manifests with packs to use."""

    def __init__(self, folder: Path, step: int, values: dict[str, Any], known: Mapping[int, SnapshotManifest]) -> None:
        self.folder, self.step, self.values = folder, step, values
        self.sizes = {name: pack.size for manifest in known.values() for name, pack in manifest.packs.items()}
        self.pack_names = {key: name for manifest in known.values() for key, name in manifest.pack_names.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        new: dict[str, Tensor] = {}
        keys: dict[MetadataIndex, str] = {}
        size = 0
        for item in sorted(plan.items, key=lambda item: (item.index.fqn, tuple(item.index.offset or ()))):
            tensor = to_host(planner.resolve_data(item))
            keys[item.index] = key = hash_tensor(tensor)
            if key not in self.pack_names:
                new[key] = tensor
                size += tensor.nbytes
            if size >= PACK_SIZE:
                self._write_pack(new)
                size = 0
        self._write_pack(new)
        done: Future[list[WriteResult]] = Future()
        places = {item.index: (keys[item.index], self.pack_names[keys[item.index]]) for item in plan.items}
        done.set_result([WriteResult(i, self.sizes[name], (key, name)) for i, (key, name) in places.items()])
        return done

    def _write_pack(self, new: dict[str, Tensor]) -> None:
        """Write the tensors into a pack, and remove them from `new`."""
        if not new:
            return
        name = f"{hashlib.sha256(' '.join(sorted(new)).encode()).hexdigest()[:32]}.safetensors"
        with write_atomically(self.folder / PACKS / name) as temporary:
            save_file(new, temporary)
            self.sizes[name] = temporary.stat().st_size
        self.pack_names.update(dict.fromkeys(new, name))
        new.clear()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result for ranks in results for result in ranks}
        places: dict[str, str] = dict(result.storage_data for result in written.values())
        sizes = {result.storage_data[1]: result.size_in_bytes for result in written.values()}
        manifest = SnapshotManifest(
            step=self.step,
            tensors={
                fqn: TensorEntry(
                    dtype=str(tensor.properties.dtype),
                    shape=tensor.size,
                    pieces=tuple(
                        TensorChunk(
                            offset=chunk.offsets,
                            shape=chunk.sizes,
                            key=written[MetadataIndex(fqn, chunk.offsets)].storage_data[0],
                        )
                        for chunk in tensor.chunks
                    ),
                )
                for fqn, tensor in metadata.state_dict_metadata.items()
                if isinstance(tensor, TensorStorageMetadata)
            },
            packs={
                name: PackEntry(size=sizes[name], keys=tuple(sorted(key for key in places if places[key] == name)))
                for name in sorted(set(places.values()))
            },
            values=self.values,
        )
        with write_atomically(manifest_path(self.folder, self.step)) as temporary:
            temporary.write_bytes(seal(manifest.model_dump(mode="json")))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass


class PackReader(UnchangedPlans, StorageReader):
    """Reads the tensors of a manifest, each checked against its digest. Raises SourceError for a damaged one."""

    def __init__(self, folder: Path, manifest: SnapshotManifest) -> None:
        self.folder = folder
        self.manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, entry.dtype.removeprefix("torch."))),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in entry.pieces],
            )
            for name, entry in self.manifest.tensors.items()
        }
        return Metadata(dict(tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        pack_names = self.manifest.pack_names
        keys = {
            MetadataIndex(name, piece.offset): piece.key
            for name, entry in self.manifest.tensors.items()
            for piece in entry.pieces
        }
        by_pack: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_pack.setdefault(pack_names[keys[item.storage_index]], []).append(item)
        for name, items in sorted(by_pack.items()):
            with open_pack(self.folder / PACKS / name) as read:
                for item in items:
                    window = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
                    target = planner.resolve_tensor(item)
                    target.copy_(read(keys[item.storage_index])[window])
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass


@contextmanager
def open_pack(file: Path) -> Iterator[Callable[[str], Tensor]]:
    """Yield a function that reads a tensor of a pack by its key, and raises SourceError where it was changed."""

    def read(key: str) -> Tensor:
        tensor: Tensor = pack.get_tensor(key)
        if hash_tensor(tensor) != key:
            raise SourceError(f"{file} was changed after it was written")
        return tensor

    try:
        with safe_open(file, framework="pt") as pack:
            yield read
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{file} cannot be read: {error}") from error


def to_host(tensor: Any) -> Tensor:
    """Return a contiguous tensor in host memory whose storage has no other elements, as safetensors needs it."""
    host: Tensor = tensor.detach().cpu().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()
