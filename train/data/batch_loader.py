"""Loads batches for the training loop, and measures how long the loop waits for them."""

import os
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Self

import torch

from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.errors import RecipeError, UsageError
from laconic.hardware import cores
from train.data.batch_builder import Batch, BatchBuilder, Collate, check_main, is_sendable, iterate_batches
from train.data.batch_sampler import BatchSampler
from train.data.dali_images import DaliImages
from train.data.loader_settings import LoaderSettings
from train.data.prefetch import move_to_device
from train.data.sample_store import SampleStore, is_decoded_on_access, store_samples
from train.data.worker_count_search import WorkerCountSearch


class BatchLoader:
    """The batches of the steps from `start` to before `stop`, on the device: iterate over (step, batch), once.

    waited: seconds that the loop waited for batches; elapsed: seconds since its first step. The worker processes end
    with the loop. Use it as a context where an error may leave the loop, since its traceback keeps them alive.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Collate,
        sampler: BatchSampler,
        *,
        device: torch.device | str,
        settings: LoaderSettings | None = None,
        start: int = 0,
        stop: int,
        decoder: str = "",
        cache: Cache | None = None,
        images: DaliImages | None = None,
    ) -> None:
        """decoder: the `sample_store.decoder_key` of the task. cache: where decoded samples are kept on disk. images:
        what decodes images in threads of its own, in the place of workers.

        Raises RecipeError for pinned memory without a GPU, UsageError for workers that `collate` cannot be sent to,
        DataError for a sample that cannot be decoded.
        """
        check_main()
        settings = settings or LoaderSettings()
        self._settings = settings = settings if images is None else settings.model_copy(update={"workers": 0})
        # With its index, since a new thread starts on the first GPU.
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else torch.device(device)
        )
        if settings.pin_memory and not torch.cuda.is_available():
            raise RecipeError("pin_memory: there is no CUDA device to copy from pinned memory. Leave it out")
        self._pin = self._device.type == "cuda" if settings.pin_memory is None else settings.pin_memory
        samples: Sequence[Any] = dataset.samples if images is None else dataset.samples.unparsed()
        if settings.cache != "none" and is_decoded_on_access(dataset):
            samples = store_samples(dataset, settings.cache, decoder=decoder, cache=cache)
        self._images = images
        self._builder = BatchBuilder(dataset, samples, collate, images.decode if images else None)
        self._kept = samples.describe() if isinstance(samples, SampleStore) else ""
        self._sampler, self._start, self._stop = sampler, start, stop
        sendable = settings.workers != 0 and is_sendable(dataset, collate)
        if not sendable and settings.workers not in (0, "auto"):
            raise UsageError(
                "the collate function cannot be sent to a worker process. Give a function or a class of a module, "
                "not one of a function's body, or set workers: 0"
            )
        self._search = WorkerCountSearch(most_workers() if sendable else 0, settings.prefetch)
        # A weak reference: a loop that is left drops the generator, which ends the workers.
        self._running: weakref.ref[Generator[tuple[int, Batch], None, None]] | None = None
        self.waited = 0.0
        self.elapsed = 0.0

    @property
    def workers(self) -> int:
        """Worker processes in use."""
        return self._search.workers if self._settings.workers == "auto" else self._settings.workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        self.close()
        running = self._run()
        self._running = weakref.ref(running)
        return running

    def close(self) -> None:
        """End the worker processes, also in the middle of the loop."""
        running = self._running() if self._running else None
        if running is not None:
            running.close()

    def _run(self) -> Generator[tuple[int, Batch], None, None]:
        step, began = self._start, time.perf_counter()
        while step < self._stop:
            with closing(self._batches(range(step, self._stop))) as made:
                changed = False
                while step < self._stop and not changed:
                    asked = time.perf_counter()
                    batch = next(made)
                    received = time.perf_counter()
                    self.waited += received - asked
                    self.elapsed = received - began
                    yield step, batch
                    step += 1
                    now = time.perf_counter()
                    self.elapsed = now - began
                    if self._settings.workers == "auto":
                        changed = self._search.observe(received - asked, now - asked, self._stop - step)

    def _batches(self, steps: range) -> Generator[Batch, None, None]:
        made = iterate_batches(
            self._builder,
            self._sampler,
            steps,
            workers=self.workers,
            prefetch=self._settings.prefetch,
            pin=self._pin,
        )
        return move_to_device(made, self._device)

    def report(self) -> str:
        """Report how long the loop waited, as in "waited for data 0.3 s of 41.2 s (0.7 %), 2 workers"."""
        share = self.waited / self.elapsed if self.elapsed else 0.0
        count = {0: "no workers", 1: "1 worker"}.get(self.workers, f"{self.workers} workers")
        parts = [f"waited for data {self.waited:.1f} s of {self.elapsed:.1f} s ({100 * share:.1f} %)", count]
        if self._settings.workers == "auto":
            parts[-1] += f" ({self._search.describe()})"
        notes = [self._kept, self._images.describe() if self._images else ""]
        return ", ".join([*parts, *filter(None, notes)])


def most_workers() -> int:
    """Return the largest number of workers worth trying: one for each core, shared with this machine's other ranks."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
