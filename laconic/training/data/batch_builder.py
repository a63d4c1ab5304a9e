"""Batches made from rows: in this process, or in worker processes of PyTorch's DataLoader."""

import io
import multiprocessing
import os
import pickle
import signal
import sys
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
from laconic.training.data.batch_sampler import Order

Batch = dict[str, Tensor]
Collate = Callable[[list[Any], list[Any] | None], Batch]
"""From samples and their labels, if they have any. A pure function: the same rows must give the same batch."""

START = "forkserver" if sys.platform == "linux" else "spawn"
"""How a worker starts: not as a fork of this process, which would lose the threads (OpenMP's, autograd's, NCCL's) and
keep the locks that they held. The server that is forked instead has torch loaded, and no threads."""


@dataclass(frozen=True)
class Failure:
    """An error on its way from a worker: DataLoader would bury its sentence in a traceback."""

    kind: type[LaconicError]
    message: str


class Maker(Dataset[Batch | Failure]):
    """Makes the batch of some rows. It goes to the workers, so it holds no more than that takes."""

    def __init__(self, dataset: data.Dataset, samples: Sequence[Any], collate: Collate) -> None:
        """samples: those of the dataset, or what keeps them decoded."""
        self._name, self._per_row, self._labels = dataset.name, dataset.per_row, dataset.labels
        self._samples, self._collate = samples, collate

    def __getitem__(self, rows: Sequence[int]) -> Batch | Failure:
        try:
            return self.make(rows)
        except LaconicError as error:
            return Failure(type(error), str(error))

    def make(self, rows: Sequence[int]) -> Batch:
        """The batch of these rows; of none, tensors without rows. Raises DataError, naming a row that does not fit."""
        if not rows:
            return {name: tensor[:0] if tensor.ndim else tensor for name, tensor in self.make([0]).items()}
        try:
            return self.collated(rows)
        except (InputError, DataError) as error:
            raise self._naming(rows, error) from None

    def collated(self, rows: Sequence[int]) -> Batch:
        """The same, with an error that names no row: what all rows lack is no one row's fault."""
        indices = [row * self._per_row + offset for row in rows for offset in range(self._per_row)]
        labels = None if self._labels is None else [self._labels[index] for index in indices]
        return self._collate([self._samples[index] for index in indices], labels)

    def _naming(self, rows: Sequence[int], error: LaconicError) -> DataError:
        """The error with the row that causes it: the one that fails alone, too."""
        for row in rows if len(rows) > 1 else ():
            try:
                self.collated([row])
            except (InputError, DataError) as own:
                return self._naming([row], own)
        if len(rows) == 1:
            return DataError(f"{self._name}, row {rows[0] + 1}: {error}. Fix or remove the row")
        numbers = ", ".join(str(row + 1) for row in sorted(rows)[:8]) + (", ..." if len(rows) > 8 else "")
        return DataError(f"{self._name}, rows {numbers} do not fit into one batch: {error}")


class Rows(Sampler[list[int]]):
    """The rows of some steps, in their order."""

    def __init__(self, order: Order, steps: range) -> None:
        self._order, self._steps = order, steps

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._order.batch, self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def batches(
    maker: Maker, order: Order, steps: range, *, workers: int, prefetch: int, pin: bool
) -> Generator[Batch, None, None]:
    """The batches of some steps; to close it stops the workers.

    workers: processes, each with `prefetch` batches ready; 0 for none. pin: put the batches into page-locked memory.
    Raises DataError for a row that does not fit, LaconicError where a worker died.
    """
    options: dict[str, Any] = {}
    if workers:
        context = multiprocessing.get_context(START)
        if START == "forkserver":
            context.set_forkserver_preload([__name__])
        options = {"prefetch_factor": prefetch, "multiprocessing_context": context, "worker_init_fn": begin}
    loader = DataLoader(
        maker,
        batch_size=None,
        sampler=Rows(order, steps),
        num_workers=workers,
        collate_fn=as_it_is,
        pin_memory=pin,
        # A generator of its own: DataLoader draws a seed, and what training draws must not depend on the workers.
        generator=torch.Generator(),
        **options,
    )
    failed: Exception | None = None
    try:
        for made in loader:
            if isinstance(made, Failure):
                raise made.kind(made.message)
            yield made
    except Exception as error:
        if not workers or isinstance(error, LaconicError):
            raise
        failed = told(error)
    if failed is not None:
        raise failed


def told(error: Exception) -> Exception:
    """What DataLoader raised, without the frames behind it: they hold its workers, for as long as somebody looks at the
    error. Its message has the traceback of the worker."""
    if isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error):
        return LaconicError(
            f"a process that prepares the data has died: {error}. The machine may have run out of memory, or of shared "
            f"memory (/dev/shm), or the script that was started runs the training without "
            f"`if __name__ == '__main__':`. Try workers: 0"
        )
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def begin(worker: int) -> None:
    """What a worker does first.

    Ctrl-C, and a SIGTERM to the whole group, are for the training to answer, which still needs its batches then. Only
    the second SIGTERM ends a worker: DataLoader's, which gives up waiting. Where the training is killed, the worker
    ends, too: DataLoader looks for the server that forked it, and that one lives as long as it has workers.
    """

    def spared(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, spared)
    threading.Thread(target=follow, name="laconic-follow", daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core; torch sees to its own threads


def follow() -> None:
    """End this process when the one that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def as_it_is(made: Any) -> Any:
    """What the maker made is a batch already."""
    return made


class Parcel(pickle.Pickler):
    """Pickles what goes to a worker, but for a model: a copy of a teacher in each process is not meant."""

    def reducer_override(self, value: Any) -> Any:
        """Raise PicklingError for a module; leave all else as it is."""
        if isinstance(value, nn.Module):
            raise pickle.PicklingError(f"{type(value).__name__} is a model")
        return NotImplemented


def can_leave(dataset: data.Dataset, collate: Collate) -> bool:
    """Whether what makes the batches can be sent to another process."""
    try:
        Parcel(io.BytesIO()).dump((collate, dataset.samples.pick([])))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def check_main() -> None:
    """Raise UsageError in a worker that is still loading the script: it would start the whole training again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "a worker process loads the script that was started, and the script trains as it is loaded. Put what "
            "trains under `if __name__ == '__main__':`, or set workers: 0"
        )
