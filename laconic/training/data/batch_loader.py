"""Brings batches to the training loop, and says how long it waited for them."""

import os
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field

from laconic.cache import Cache
from laconic.config import Strict
from laconic.data.dataset import Dataset
from laconic.errors import RecipeError, UsageError
from laconic.hardware import cores
from laconic.training.data.batch_builder import Batch, Collate, Maker, batches, can_leave, check_main
from laconic.training.data.batch_sampler import Order
from laconic.training.data.prefetch import on_device
from laconic.training.data.sample_store import Store, decodes, keep
from laconic.training.data.worker_search import Search


class FeedSettings(Strict):
    """How the data come. None of it changes a batch, nor what training draws at random.

    workers: processes that make batches; found by measuring by default. pin: page-locked memory for the batches, which
    a GPU copies from while it works; by default where there is one. prefetch: batches that each worker has ready.
    cache: where decoded images are kept, so that each is decoded once.
    """

    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    pin: bool | None = None
    prefetch: int = Field(default=2, ge=1)
    cache: Literal["none", "memory", "disk"] = "none"


class Feed:
    """The batches of the steps from `start` to before `stop`, on the device: iterate over (step, batch), once.

    waited: seconds that the loop waited for a batch; elapsed: seconds from its first step on. The worker processes
    end with the loop; use it as a context where an error may leave the loop, since whoever holds the error holds them.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Collate,
        order: Order,
        *,
        device: torch.device | str,
        settings: FeedSettings | None = None,
        start: int = 0,
        stop: int,
        decoder: str = "",
        cache: Cache | None = None,
    ) -> None:
        """decoder: what decodes the samples (`store.identity` of the task); cache: where they are kept on disk.

        Raises RecipeError for pinned memory without a GPU, UsageError for workers that `collate` cannot be sent to,
        DataError for a sample that cannot be decoded.
        """
        check_main()
        self._settings = settings = settings or FeedSettings()
        # By its number, since a thread begins on the first GPU.
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else torch.device(device)
        )
        if settings.pin and not torch.cuda.is_available():
            raise RecipeError("pin: there is no CUDA device to copy from pinned memory. Leave it out")
        self._pin = self._device.type == "cuda" if settings.pin is None else settings.pin
        samples: Sequence[Any] = dataset.samples
        if settings.cache != "none" and decodes(dataset):
            samples = keep(dataset, settings.cache, decoder=decoder, cache=cache)
        self._maker = Maker(dataset, samples, collate)
        self._kept = samples.describe() if isinstance(samples, Store) else ""
        self._order, self._start, self._stop = order, start, stop
        leaves = settings.workers != 0 and can_leave(dataset, collate)
        if not leaves and settings.workers not in (0, "auto"):
            raise UsageError(
                "what makes the batches cannot be sent to a worker process. Give a function or a class of a module, "
                "not one of a function's body, or set workers: 0"
            )
        self._search = Search(most_workers() if leaves else 0, settings.prefetch)
        # Not held: a loop that is left drops it, and that ends the workers.
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
        """End the worker processes, wherever the loop stands."""
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
                    given = time.perf_counter()
                    self.waited += given - asked
                    self.elapsed = given - began
                    yield step, batch
                    step += 1
                    now = time.perf_counter()
                    self.elapsed = now - began
                    if self._settings.workers == "auto":
                        changed = self._search.observe(given - asked, now - asked, self._stop - step)

    def _batches(self, steps: range) -> Generator[Batch, None, None]:
        made = batches(
            self._maker,
            self._order,
            steps,
            workers=self.workers,
            prefetch=self._settings.prefetch,
            pin=self._pin,
        )
        return on_device(made, self._device)

    def report(self) -> str:
        """One line, as in "waited for data 0.3 s of 41.2 s (0.7 %), 2 workers"."""
        share = self.waited / self.elapsed if self.elapsed else 0.0
        count = {0: "no workers", 1: "1 worker"}.get(self.workers, f"{self.workers} workers")
        parts = [f"waited for data {self.waited:.1f} s of {self.elapsed:.1f} s ({100 * share:.1f} %)", count]
        if self._settings.workers == "auto":
            parts[-1] += f" ({self._search.describe()})"
        return ", ".join([*parts, self._kept] if self._kept else parts)


def most_workers() -> int:
    """Workers that are worth trying: one for each core, the cores shared with the other ranks on this machine."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
