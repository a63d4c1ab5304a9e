"""Activation offloading: tensors saved for the backward pass are moved to host memory or to a file."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from laconic.units import Bytes
from train.offload.activation_store import ActivationStore, FileStore, HostStore, StoredTensor
from train.step.step_parts import StepParts
from train.step.technique import Technique


class ActivationOffload(Technique):
    """Moves activations off the device as soon as they are saved, and prefetches them for the backward pass
    (Rhu et al., vDNN, arXiv 1602.08124). Weights stay where they are.

    destination: the host's memory, or a file in `folder`, for machines whose device is their host. min_bytes: smaller
    tensors stay on the device. prefetch: how many tensors are fetched before they are asked for.
    """

    slot = "activations"
    exact = True
    excludes: ClassVar[Mapping[str, str]] = {"shard": "it would take gathered weights for activations, and keep them"}
    renamed: ClassVar[Mapping[str, str]] = {"where": "destination", "smallest": "min_bytes", "ahead": "prefetch"}

    destination: Literal["host", "disk"] = "host"
    folder: Path | None = None
    min_bytes: Literal[0] | Bytes = 2**20
    prefetch: int = Field(default=1, ge=0)

    def apply(self, parts: StepParts) -> None:
        store: ActivationStore = HostStore(parts.host)
        if self.destination == "disk":
            file_store = FileStore(parts.device, self.folder)
            parts.on_restore(file_store.close)
            store = file_store
        parts.add_forward_context(partial(offload_saved_tensors, parts, store, self.min_bytes, self.prefetch))


@contextmanager
def offload_saved_tensors(parts: StepParts, store: ActivationStore, min_bytes: int, prefetch: int) -> Iterator[None]:
    """Offload what autograd saves in the body, which is one forward pass."""
    hooks = OffloadHooks(parts, store, min_bytes, prefetch)
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield
    store.flush()


class OffloadedStorage:
    """A storage that was moved off the device.

    order: its position in the sequence in which the forward pass saved storages. tensor: its content on the device,
    [elements], while it is prefetched or in use.
    """

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self.order = 0
        self.tensor: Tensor | None = None


class StorageView:
    """The view of a storage that autograd saved."""

    def __init__(self, offloaded: OffloadedStorage, tensor: Tensor) -> None:
        self.offloaded = offloaded
        self.dtype = tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def apply(self, flat: Tensor) -> Tensor:
        """Apply the same view to a flat copy of the storage."""
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class OffloadHooks:
    """Hooks on the tensors that one forward pass saves. A storage that is saved more than once is moved once."""

    def __init__(self, parts: StepParts, store: ActivationStore, min_bytes: int, prefetch: int) -> None:
        self.store, self.min_bytes, self.prefetch = store, min_bytes, prefetch
        self.device = parts.device
        self.weights = WeakIdKeyDictionary(
            {one.untyped_storage(): True for one in (*parts.module.parameters(), *parts.module.buffers())},
            ref_type=weakref.ref,
        )
        self.known = WeakIdKeyDictionary(ref_type=weakref.ref)
        self.sequence: list[weakref.ref[OffloadedStorage]] = []
        self.current: weakref.ref[OffloadedStorage] | None = None
        self.reached: int | None = None

    def pack(self, tensor: Tensor) -> Tensor | StorageView:
        """Return what the graph keeps in the place of a tensor."""
        if tensor.layout is not torch.strided or tensor.device.type != self.device.type:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.min_bytes or storage in self.weights:
            return tensor
        if storage in self.known:
            offloaded: OffloadedStorage = self.known[storage]
        else:
            count = storage.nbytes() // tensor.element_size()
            offloaded = OffloadedStorage(self.store.store(tensor.detach().as_strided((count,), (1,), 0)))
            self.known[storage] = offloaded
        # The position of the last time that it was saved, since that is the first time that it is asked for.
        offloaded.order = len(self.sequence)
        self.sequence.append(weakref.ref(offloaded))
        return StorageView(offloaded, tensor)

    def unpack(self, saved: Tensor | StorageView) -> Tensor:
        """Return the saved tensor, on the device."""
        if isinstance(saved, Tensor):
            return saved
        offloaded = saved.offloaded
        last = self.current() if self.current else None
        if last is not None and last is not offloaded:
            last.tensor = None
        self.current = weakref.ref(offloaded)
        if offloaded.tensor is None:
            offloaded.tensor = self.store.fetch(offloaded.stored)
        self.store.wait(offloaded.stored)
        # A node may ask for what it saved in any order: what it has already had is not fetched again.
        self.reached = offloaded.order if self.reached is None else min(self.reached, offloaded.order)
        for order in range(self.reached - 1, max(self.reached - 1 - self.prefetch, -1), -1):
            following = self.sequence[order]()
            if following is not None and following.order == order and following.tensor is None:
                following.tensor = self.store.fetch(following.stored)
        return saved.apply(offloaded.tensor)
