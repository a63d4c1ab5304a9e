"""Building batches from rows: in this process, or in worker processes of PyTorch's DataLoader."""

import io
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from laconic.data import dataset as data
from laconic.errors import DataError, InputError, LaconicError, UsageError
from train.data.batch_sampler import BatchSampler
from train.data.fork_server import START

Batch = dict[str, Tensor]
Collate = Callable[[list[Any], list[Any] | None], Batch]
"""From samples and their labels (None without) to a batch. A pure function: the same rows give the same batch."""


@dataclass(frozen=True)
class WorkerError:
    """An error that a worker returns instead of raising it: DataLoader would bury its message in a traceback."""

    kind: type[LaconicError]
    message: str


class BatchBuilder(Dataset[Batch | WorkerError]):
    """Builds the batch of given rows of a dataset. It is sent to the workers, so it holds no more than that takes."""

    def __init__(
        self,
        dataset: data.Dataset,
        samples: Sequence[Any],
        collate: Collate,
        decode: Callable[[list[Any]], list[Any]] | None = None,
    ) -> None:
        """samples: those of the dataset, or a store of them that are decoded; or what `decode` makes them of, a batch
        at a time."""
        self._name, self._per_row, self._labels = dataset.name, dataset.per_row, dataset.labels
        self._samples, self._collate, self._decode = samples, collate, decode

    def __getitem__(self, rows: Sequence[int]) -> Batch | WorkerError:
        try:
            return self.build(rows)
        except LaconicError as error:
            return WorkerError(type(error), str(error))

    def build(self, rows: Sequence[int]) -> Batch:
        """Build the batch of these rows; without any, tensors without rows. Raises DataError with the bad row."""
        if not rows:
            return {name: tensor[:0] if tensor.ndim else tensor for name, tensor in self.build([0]).items()}
        try:
            return self.collate(rows)
        except (InputError, DataError) as error:
            raise self._locate(rows, error) from None

    def collate(self, rows: Sequence[int]) -> Batch:
        """Collate the batch of these rows, of at least one. Its errors name no row: a label may be missing in all."""
        indices = [row * self._per_row + offset for row in rows for offset in range(self._per_row)]
        labels = None if self._labels is None else [self._labels[index] for index in indices]
        samples = [self._samples[index] for index in indices]
        return self._collate(samples if self._decode is None else self._decode(samples), labels)

    def _locate(self, rows: Sequence[int], error: LaconicError) -> DataError:
        """Return the error with the number of the row that causes it, which is the one that also fails alone."""
        for row in rows if len(rows) > 1 else ():
            try:
                self.collate([row])
            except (InputError, DataError) as cause:
                return self._locate([row], cause)
        if len(rows) == 1:
            return DataError(f"{self._name}, row {rows[0] + 1}: {error}. Fix or remove the row")
        numbers = ", ".join(str(row + 1) for row in sorted(rows)[:8]) + (", ..." if len(rows) > 8 else "")
        return DataError(f"{self._name}, rows {numbers} do not fit into one batch: {error}")


class StepRows(Sampler[list[int]]):
    """The rows of the batches of consecutive steps, as DataLoader takes them."""

    def __init__(self, sampler: BatchSampler, steps: range) -> None:
        self._sampler, self._steps = sampler, steps

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._sampler.batch, self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def iterate_batches(
    builder: BatchBuilder, sampler: BatchSampler, steps: range, *, workers: int, prefetch: int, pin: bool
) -> Generator[Batch, None, None]:
    """Yield the batches of some steps; closing the generator stops the workers.

    workers: processes, each with `prefetch` batches ready; 0 for none. pin: put the batches into page-locked memory.
    Raises DataError for a bad row, LaconicError where a worker died.
    """
    options: dict[str, Any] = {}
    if workers:
        context = multiprocessing.get_context(START)
        if START == "forkserver":
            context.set_forkserver_preload([__name__])
        options = {"prefetch_factor": prefetch, "multiprocessing_context": context, "worker_init_fn": init_worker}
    loader = DataLoader(
        builder,
        batch_size=None,
        sampler=StepRows(sampler, steps),
        num_workers=workers,
        collate_fn=pass_through,
        pin_memory=pin,
        # A generator of its own: DataLoader draws a seed, and what training draws must not depend on the workers.
        generator=torch.Generator(),
        **options,
    )
    failed: Exception | None = None
    try:
        for made in loader:
            if isinstance(made, WorkerError):
                raise made.kind(made.message)
            yield made
    except Exception as error:
        if not workers or isinstance(error, LaconicError):
            raise
        failed = clean_error(error)
    if failed is not None:
        raise failed


def clean_error(error: Exception) -> Exception:
    """Remove the traceback of a DataLoader's error: its frames would keep the workers alive for as long as the error.
    The message has the traceback of the worker."""
    if isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error):
        return LaconicError(
            f"a process that prepares the data has died: {error}. The machine may have run out of memory, or of shared "
            f"memory (/dev/shm), or the script that was started runs the training without "
            f"`if __name__ == '__main__':`. Try workers: 0"
        )
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def init_worker(worker: int) -> None:
    """Set up a worker process.

    Ctrl-C, and a SIGTERM to the whole process group, are for the training process to handle, which still needs its
    batches then. Only a second SIGTERM ends a worker: DataLoader's, when it gives up waiting. A worker also ends when
    the training process is killed: DataLoader itself checks the fork server, which lives as long as it has workers.
    """

    def ignore_first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ignore_first)
    threading.Thread(target=exit_with_parent, name="laconic-exit-with-parent", daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core; torch sees to its own threads


def exit_with_parent() -> None:
    """Exit when the parent process has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def pass_through(made: Any) -> Any:
    """Return a batch as it is, which is all that DataLoader's collate function has to do."""
    return made


class WorkerPickler(pickle.Pickler):
    """Pickles what is sent to a worker, except models: no worker should hold a copy of a teacher."""

    def reducer_override(self, value: Any) -> Any:
        """Raise PicklingError for a module; pickle everything else as usual."""
        if isinstance(value, nn.Module):
            raise pickle.PicklingError(f"{type(value).__name__} is a model")
        return NotImplemented


def is_sendable(dataset: data.Dataset, collate: Collate) -> bool:
    """Return whether the collate function and the samples can be sent to a worker process."""
    try:
        WorkerPickler(io.BytesIO()).dump((collate, dataset.samples.pick([])))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def check_main() -> None:
    """Raise UsageError in a worker that is still loading the main script: it would start the training again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "a worker process loads the script that was started, and the script trains as it is loaded. Put what "
            "trains under `if __name__ == '__main__':`, or set workers: 0"
        )
