"""Batches brought to the device while it works on the one before."""

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from laconic.training.data.batch_builder import Batch

T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """The last thing that the thread says: that is all, or why it stopped."""

    error: BaseException | None


class Ahead(Generic[T]):
    """Runs a generator in a thread, at most `depth` items ahead of whoever iterates."""

    def __init__(self, source: Generator[T, None, None], depth: int = 1) -> None:
        self._source = source
        self._ready: queue.SimpleQueue[T | Ended] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="laconic-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._room.acquire() and not self._closed:
                self._ready.put(next(self._source))
        except StopIteration:
            pass
        except BaseException as raised:  # noqa: BLE001 - it is raised again where the items are taken
            error = raised
        finally:
            self._source.close()
            self._ready.put(Ended(error))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._ready.get()
        if isinstance(item, Ended):
            self._ready.put(Ended(None))
            if item.error is not None:
                raise item.error
            raise StopIteration
        self._room.release()
        return item

    def close(self) -> None:
        """Stop the thread, and close the generator."""
        self._closed = True
        self._room.release()
        self._thread.join()


@dataclass(frozen=True)
class Copy:
    """A batch on its way to the device. arrived: an event of the stream that copies."""

    batch: Batch
    arrived: torch.cuda.Event


def copies(batches: Generator[Batch, None, None], device: torch.device) -> Generator[Copy, None, None]:
    """Start to copy each batch, on a stream of its own, so that the copy runs beside the step before."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        # Here and in the threads that this starts: a thread begins on the first GPU, whichever its rank has.
        with torch.cuda.device(device):
            for batch in batches:
                with torch.cuda.stream(stream):
                    copied = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
                yield Copy(copied, stream.record_event())
    finally:
        batches.close()


def on_cuda(batches: Generator[Batch, None, None], device: torch.device) -> Generator[Batch, None, None]:
    """The batches on the device: one in use, and one copied meanwhile."""
    ahead = Ahead(copies(batches, device))
    try:
        for copy in ahead:
            current = torch.cuda.current_stream(device)
            current.wait_event(copy.arrived)
            for tensor in copy.batch.values():
                # Else its memory is handed out again as soon as the copying stream is done with it.
                tensor.record_stream(current)
            yield copy.batch
    finally:
        ahead.close()


def on_device(batches: Generator[Batch, None, None], device: torch.device) -> Generator[Batch, None, None]:
    """The batches on the device; closing it closes what makes them."""
    if device.type == "cuda":
        yield from on_cuda(batches, device)
        return
    try:
        for batch in batches:
            yield {name: tensor.to(device) for name, tensor in batch.items()}
    finally:
        batches.close()
