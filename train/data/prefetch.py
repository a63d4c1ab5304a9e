"""Prefetching: a batch is copied to the device while the device works on the one before."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from train.data.batch_builder import Batch

T = TypeVar("T")


def run_ahead(source: Generator[T, None, None]) -> Generator[T, None, None]:
    """Yield the items of a generator that runs in a thread, one item ahead; it is closed there, with this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="laconic-prefetch") as thread:
        upcoming = thread.submit(next, source, None)
        try:
            while (item := upcoming.result()) is not None:
                upcoming = thread.submit(next, source, None)
                yield item
        finally:
            thread.submit(source.close).result()


def start_copies(
    batches: Generator[Batch, None, None], device: torch.device
) -> Generator[tuple[Batch, torch.cuda.Event], None, None]:
    """Start to copy each batch on a separate stream, so that the copy overlaps with the step before.

    Yields the copies, each with the event of its arrival.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        # Set in this thread: a new thread starts on the first GPU, whatever the device of its rank.
        with torch.cuda.device(device):
            for batch in batches:
                with torch.cuda.stream(stream):
                    copied = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
                yield copied, stream.record_event()
    finally:
        batches.close()


def prefetch_to_cuda(batches: Generator[Batch, None, None], device: torch.device) -> Generator[Batch, None, None]:
    """Yield the batches on a CUDA device: one in use, and one that is copied meanwhile."""
    copies = run_ahead(start_copies(batches, device))
    try:
        for batch, arrived in copies:
            current = torch.cuda.current_stream(device)
            current.wait_event(arrived)
            for tensor in batch.values():
                # Else the allocator reuses its memory as soon as the copying stream is done with it.
                tensor.record_stream(current)
            yield batch
    finally:
        copies.close()


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
