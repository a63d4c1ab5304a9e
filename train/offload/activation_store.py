"""Stores for activations that are off the device between the forward and the backward pass: host memory, or a file."""

import tempfile
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from laconic.errors import RecipeError, TrainingFailure
from train.offload.host_memory import HostMemory
from train.offload.memory_accounting import account_as


@dataclass(eq=False)
class StoredTensor:
    """A handle on a tensor in a store.

    content: what the store needs to find it. pending: the read or write that is under way.
    """

    content: Any
    pending: Future[Any] | None = field(default=None)


class ActivationStore(ABC):
    """Takes flat tensors [elements] off the device, and gives copies of them on the device back."""

    @abstractmethod
    def store(self, tensor: Tensor) -> StoredTensor:
        """Start to copy a tensor into the store."""

    @abstractmethod
    def fetch(self, stored: StoredTensor) -> Tensor:
        """Start to copy a tensor back; the result on the device is valid after `wait`."""

    @abstractmethod
    def wait(self, stored: StoredTensor) -> None:
        """Let computation continue only when the copy of `stored` is complete."""

    @abstractmethod
    def flush(self) -> None:
        """Complete the writes under way, and release their tensors on the device."""


class HostStore(ActivationStore):
    """Keeps activations in host memory."""

    def __init__(self, host: HostMemory) -> None:
        self.host = host

    def store(self, tensor: Tensor) -> StoredTensor:
        return StoredTensor(self.host.copy_to_host(tensor))

    def fetch(self, stored: StoredTensor) -> Tensor:
        return self.host.copy_to_device(stored.content, category="activations")

    def wait(self, stored: StoredTensor) -> None:
        self.host.wait()

    def flush(self) -> None:
        return


@dataclass(frozen=True)
class FileSpan:
    """A range of a file that holds a tensor.

    start: its offset in bytes. count: elements of the tensor. is_fake: the tensor has no values (on the meta device, or
    in a simulation), so nothing is written or read.
    """

    start: int
    count: int
    dtype: torch.dtype
    is_fake: bool


class FileStore(ActivationStore):
    """Keeps activations in an unnamed temporary file, which is removed with the process, however it ends.

    A single thread reads and writes. A tensor stays in memory until the next one is stored, so that a write overlaps
    with computation and at most one is under way. The thread releases a tensor before it reports completion. The file
    is as large as the most bytes that were ever stored at once.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        """Raises RecipeError if the folder does not exist. The file is created at the first write."""
        self.device = device
        self.folder = folder
        self.file: IO[bytes] | None = None
        if folder is not None and not folder.is_dir():
            raise RecipeError(f"activation-offload: there is no folder {folder}. Give another folder")
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="activation-offload")
        self.writing: tuple[Tensor, StoredTensor] | None = None
        self.end = 0
        self.count = 0

    def store(self, tensor: Tensor) -> StoredTensor:
        self.flush()
        span = FileSpan(self.end, len(tensor), tensor.dtype, tensor.untyped_storage().device.type == "meta")
        stored = StoredTensor(span)
        self.end += tensor.nbytes
        self.count += 1
        weakref.finalize(stored, self._release).atexit = False
        if not span.is_fake:
            stored.pending = self.thread.submit(self._write, [tensor.cpu()], span.start)
        self.writing = tensor, stored
        return stored

    def fetch(self, stored: StoredTensor) -> Tensor:
        span: FileSpan = stored.content
        with account_as("device", "activations"):
            tensor = torch.empty(span.count, dtype=span.dtype, device=self.device)
        if not span.is_fake:
            stored.pending = self.thread.submit(self._read, [tensor], span.start)
        return tensor

    def wait(self, stored: StoredTensor) -> None:
        """Raises TrainingFailure if the file could not be read or written."""
        if stored.pending is not None:
            pending, stored.pending = stored.pending, None
            try:
                pending.result()
            except OSError as error:
                raise TrainingFailure(
                    f"activation-offload: {error.strerror}, at {self.end} bytes. Give a folder with more room"
                ) from error

    def flush(self) -> None:
        if self.writing is not None:
            _, stored = self.writing
            self.writing = None
            self.wait(stored)

    def close(self) -> None:
        """Remove the file."""
        self.thread.shutdown()
        if self.file is not None:
            self.file.close()

    def _release(self) -> None:
        """Reuse the file from its start when no stored tensor is left."""
        self.count -= 1
        if not self.count:
            self.end = 0

    def _write(self, box: list[Tensor], start: int) -> None:
        """Write the tensor in the box. It is taken out of it, since an executor keeps its arguments for a while."""
        source: Any = box.pop().view(torch.uint8).numpy()
        if self.file is None:
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - closed by `close`
        self.file.seek(start)
        self.file.write(source)
        self.file.flush()

    def _read(self, box: list[Tensor], start: int) -> None:
        """Fill the tensor in the box."""
        into = box.pop()
        here = into if self.device.type == "cpu" else torch.empty_like(into, device="cpu")
        file: Any = self.file
        file.seek(start)
        file.readinto(here.view(torch.uint8).numpy())
        if here is not into:
            into.copy_(here)
