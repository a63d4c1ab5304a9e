"""Prefetching: a batch is copied to the device while the device works on the one before."""

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from train.data.batch_builder import Batch

T = TypeVar("T")


@dataclass(frozen=True)
class EndOfStream:
    """The last item of a prefetching thread: the source is exhausted, or has raised `error`."""

    error: BaseException | None


class PrefetchThread(Generic[T]):
    """Runs a generator in a thread, at most `depth` items ahead of the consumer."""

    def __init__(self, source: Generator[T, None, None], depth: int = 1) -> None:
        self._source = source
        self._ready: queue.SimpleQueue[T | EndOfStream] = queue.SimpleQueue()
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
        except BaseException as raised:  # noqa: BLE001 - it is raised again in the consumer
            error = raised
        finally:
            self._source.close()
            self._ready.put(EndOfStream(error))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._ready.get()
        if isinstance(item, EndOfStream):
            self._ready.put(EndOfStream(None))
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
class CopiedBatch:
    """A batch that is being copied to the device. arrived: an event of the copying stream."""

    batch: Batch
    arrived: torch.cuda.Event


def start_copies(batches: Generator[Batch, None, None], device: torch.device) -> Generator[CopiedBatch, None, None]:
    """Start to copy each batch on a separate stream, so that the copy overlaps with the step before."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        # Set in this thread: a new thread starts on the first GPU, whatever the device of its rank.
        with torch.cuda.device(device):
            for batch in batches:
                with torch.cuda.stream(stream):
                    copied = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
                yield CopiedBatch(copied, stream.record_event())
    finally:
        batches.close()


def prefetch_to_cuda(batches: Generator[Batch, None, None], device: torch.device) -> Generator[Batch, None, None]:
    """Yield the batches on a CUDA device: one in use, and one that is copied meanwhile."""
    ahead = PrefetchThread(start_copies(batches, device))
    try:
        for copy in ahead:
            current = torch.cuda.current_stream(device)
            current.wait_event(copy.arrived)
            for tensor in copy.batch.values():
                # Else the allocator reuses its memory as soon as the copying stream is done with it.
                tensor.record_stream(current)
            yield copy.batch
    finally:
        ahead.close()


def move_to_device(batches: Generator[Batch, None, None], device: torch.device) -> Generator[Batch, None, None]:
    """Yield the batches on the device; closing this generator closes their source."""
    if device.type == "cuda":
        yield from prefetch_to_cuda(batches, device)
        return
    try:
        for batch in batches:
            yield {name: tensor.to(device) for name, tensor in batch.items()}
    finally:
        batches.close()
