"""Activations that wait for the backward pass on the host, or in a file."""

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

from laconic.offload.activation_store import Disk, HostShelf, Place, Shelf
from laconic.training.step.step_parts import StepParts
from laconic.training.step.technique import Slot, Technique
from laconic.units import Bytes


class Offload(Technique):
    """What the forward pass keeps for the backward pass leaves the device at once, and is back before it is needed
    (Rhu et al., vDNN, arXiv 1602.08124). Weights stay where they are.

    where: the host's memory, or a file in `folder`, for machines whose device is their host. smallest: bytes below
    which a tensor stays. ahead: how many tensors are fetched before they are asked for.
    """

    slot: ClassVar[Slot] = "activations"
    exact: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {"shard": "it would take gathered weights for activations, and keep them"}

    where: Literal["host", "disk"] = "host"
    folder: Path | None = None
    smallest: Bytes = Field(default=2**20, ge=0)
    ahead: int = Field(default=1, ge=0)

    def apply(self, parts: StepParts) -> None:
        shelf: Shelf = HostShelf(parts.host)
        if self.where == "disk":
            disk = Disk(parts.device, self.folder)
            parts.on_restore(disk.close)
            shelf = disk
        parts.add_forward_context(partial(offloading, parts, shelf, self.smallest, self.ahead))


@contextmanager
def offloading(parts: StepParts, shelf: Shelf, smallest: int, ahead: int) -> Iterator[None]:
    """Round one forward pass."""
    away = Away(parts, shelf, smallest, ahead)
    with saved_tensors_hooks(away.pack, away.unpack):
        yield
    shelf.settle()


class Kept:
    """A storage that is away. place: where. order: its number among those of the pass. tensor: its content on the
    device, [elements], while it is expected or in use."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.order = 0
        self.tensor: Tensor | None = None


class View:
    """What of a storage was saved."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.kept = kept
        self.dtype = tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def of(self, flat: Tensor) -> Tensor:
        """The same part of a copy of the storage."""
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Away:
    """The storages that one forward pass has sent away. A storage that is saved more than once is sent once."""

    def __init__(self, parts: StepParts, shelf: Shelf, smallest: int, ahead: int) -> None:
        self.shelf, self.smallest, self.ahead = shelf, smallest, ahead
        self.device = parts.device
        self.weights = WeakIdKeyDictionary(
            {one.untyped_storage(): True for one in (*parts.module.parameters(), *parts.module.buffers())},
            ref_type=weakref.ref,
        )
        self.known = WeakIdKeyDictionary(ref_type=weakref.ref)
        self.sequence: list[weakref.ref[Kept]] = []
        self.current: weakref.ref[Kept] | None = None
        self.reached: int | None = None

    def pack(self, tensor: Tensor) -> Tensor | View:
        """What the graph keeps in the place of a tensor."""
        if tensor.layout is not torch.strided or tensor.device.type != self.device.type:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.smallest or storage in self.weights:
            return tensor
        if storage in self.known:
            kept: Kept = self.known[storage]
        else:
            count = storage.nbytes() // tensor.element_size()
            kept = Kept(self.shelf.put(tensor.detach().as_strided((count,), (1,), 0)))
            self.known[storage] = kept
        # In the order of the last time that it was saved, since that is the first time that it is asked for.
        kept.order = len(self.sequence)
        self.sequence.append(weakref.ref(kept))
        return View(kept, tensor)

    def unpack(self, saved: Tensor | View) -> Tensor:
        """The tensor again, on the device."""
        if isinstance(saved, Tensor):
            return saved
        kept = saved.kept
        last = self.current() if self.current else None
        if last is not None and last is not kept:
            last.tensor = None
        self.current = weakref.ref(kept)
        if kept.tensor is None:
            kept.tensor = self.shelf.get(kept.place)
        self.shelf.wait(kept.place)
        # One node may ask for what it saved in any order: what it has had is not fetched again.
        self.reached = kept.order if self.reached is None else min(self.reached, kept.order)
        for order in range(self.reached - 1, max(self.reached - 1 - self.ahead, -1), -1):
            after = self.sequence[order]()
            if after is not None and after.order == order and after.tensor is None:
                after.tensor = self.shelf.get(after.place)
        return saved.of(kept.tensor)
