"""Where tensors wait that are away from the device: in the host's memory, or in a file."""

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
from laconic.offload.host import Host
from laconic.offload.memory_accounting import accounted


@dataclass(eq=False)
class Place:
    """Where a tensor is. content: what a shelf needs to find it. pending: what must be waited for."""

    content: Any
    pending: Future[Any] | None = field(default=None)


class Shelf(ABC):
    """Takes flat tensors [elements] and gives copies of them on the device."""

    @abstractmethod
    def put(self, tensor: Tensor) -> Place:
        """Send a tensor away."""

    @abstractmethod
    def get(self, place: Place) -> Tensor:
        """A copy on the device, whose content is there after `wait`."""

    @abstractmethod
    def wait(self, place: Place) -> None:
        """Let the computation go on only when the copy is there."""

    @abstractmethod
    def settle(self) -> None:
        """Hold on to nothing that was sent away."""


class HostShelf(Shelf):
    """The host's memory."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def put(self, tensor: Tensor) -> Place:
        return Place(self.host.put(tensor))

    def get(self, place: Place) -> Tensor:
        return self.host.get(place.content, category="activations")

    def wait(self, place: Place) -> None:
        self.host.wait()

    def settle(self) -> None:
        return


@dataclass(frozen=True)
class Stretch:
    """Of a file, in bytes, and of what kind it is. imagined: it has no content, and was not written."""

    start: int
    count: int
    dtype: torch.dtype
    imagined: bool


class Disk(Shelf):
    """A file without a name, which is gone when the process is, however it ends.

    One thread reads and writes. A tensor stays in memory until the next is sent away, so that one is written while the
    other is computed; there is never more than one on its way. The thread lets go of a tensor before it says that it is
    done with it. The file is as large as the most that was ever away at once.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        """Raises RecipeError where there is no such folder. The file is made when something is written."""
        self.device = device
        self.folder = folder
        self.file: IO[bytes] | None = None
        if folder is not None and not folder.is_dir():
            raise RecipeError(f"offload: there is no folder {folder}. Give another folder")
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self.writing: tuple[Tensor, Place] | None = None
        self.end = 0
        self.away = 0

    def put(self, tensor: Tensor) -> Place:
        self.settle()
        size = tensor.nbytes
        stretch = Stretch(self.end, len(tensor), tensor.dtype, tensor.untyped_storage().device.type == "meta")
        place = Place(stretch)
        self.end += size
        self.away += 1
        weakref.finalize(place, self._left).atexit = False
        if not stretch.imagined:
            place.pending = self.thread.submit(self._write, [tensor.cpu()], stretch.start)
        self.writing = tensor, place
        return place

    def get(self, place: Place) -> Tensor:
        stretch: Stretch = place.content
        with accounted("device", "activations"):
            tensor = torch.empty(stretch.count, dtype=stretch.dtype, device=self.device)
        if not stretch.imagined:
            place.pending = self.thread.submit(self._read, [tensor], stretch.start)
        return tensor

    def wait(self, place: Place) -> None:
        if place.pending is not None:
            pending, place.pending = place.pending, None
            try:
                pending.result()
            except OSError as error:
                raise TrainingFailure(
                    f"offload: {error.strerror}, at {self.end} bytes. Give a folder with more room"
                ) from error

    def settle(self) -> None:
        if self.writing is not None:
            _, place = self.writing
            self.writing = None
            self.wait(place)

    def close(self) -> None:
        """Remove the file."""
        self.thread.shutdown()
        if self.file is not None:
            self.file.close()

    def _left(self) -> None:
        self.away -= 1
        if not self.away:
            self.end = 0

    def _write(self, box: list[Tensor], start: int) -> None:
        """Write the tensor that is in the box: taken out of it, since the thread keeps what it was given a while."""
        source: Any = box.pop().view(torch.uint8).numpy()
        if self.file is None:
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - closed by `close`
        self.file.seek(start)
        self.file.write(source)
        self.file.flush()

    def _read(self, box: list[Tensor], start: int) -> None:
        """Fill the tensor that is in the box."""
        into = box.pop()
        here = into if self.device.type == "cpu" else torch.empty_like(into, device="cpu")
        file: Any = self.file
        file.seek(start)
        file.readinto(here.view(torch.uint8).numpy())
        if here is not into:
            into.copy_(here)
