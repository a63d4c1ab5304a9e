"""Decoded samples, kept in memory that worker processes share, or in a file that they all map.

Only decoding an image is expensive: building a batch of decoded images, or of texts, is cheap compared with a step. So
decoded images are kept, and a batch is the same with the store as without.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from laconic.arrays import Array
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.errors import DataError, InputError
from laconic.hardware import cores, this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.tasks.task import Task

SHARE = 0.5
"""Share of the machine's memory, or of the free disk, that the store may take; other samples are decoded each time."""
FILE = "samples.npy"


class SampleStore(Sequence[Any]):
    """The samples of a dataset, of which the first `kept` are stored decoded.

    flat: the decoded samples, concatenated: a tensor, which is sent to worker processes as shared memory, or the file
    to map. offsets: where each begins, in elements, and where the last ends.
    """

    def __init__(self, dataset: Dataset, flat: Tensor | Path, offsets: Array) -> None:
        self._samples, self._shapes = dataset.samples, dataset.shapes
        self._where, self._offsets = flat, offsets
        self.kept = len(offsets) - 1

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        if index >= self.kept:
            return self._samples[index]
        start, stop = self._offsets[index : index + 2]
        # A copy, so that changing a sample does not change it in the next epoch.
        return self._flat[start:stop].reshape(self._shapes[index]).copy()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_flat"}

    @cached_property
    def _flat(self) -> Array:
        if isinstance(self._where, Path):
            mapped: Array = np.load(self._where, mmap_mode="r")
            return mapped
        flat: Array = self._where.numpy()
        return flat

    def describe(self) -> str:
        """Describe how many samples are stored where, as in "1797 samples kept on disk"."""
        place = "on disk" if isinstance(self._where, Path) else "in memory"
        some = "" if self.kept == len(self) else f" of {len(self)}"
        return f"{self.kept}{some} samples kept {place}"


def is_decoded_on_access(dataset: Dataset) -> bool:
    """Return whether a sample is decoded each time that it is read: else there is nothing to store."""
    sample = dataset.samples[0]
    return isinstance(sample, np.ndarray) and dataset.samples[0] is not sample


def decoder_key(task: Task) -> str:
    """Return a key of how a task decodes samples: tasks that decode them differently have different keys."""
    return hash_of(task.name, {name: content.decode() for name, content in task.assets().items()})


def store_samples(
    dataset: Dataset,
    place: Literal["memory", "disk"],
    *,
    decoder: str = "",
    cache: Cache | None = None,
    limit: int | None = None,
) -> SampleStore:
    """Decode every sample, up to `limit` bytes in all; on disk only where no earlier run has done so.

    decoder: the `decoder_key` of the task, part of the name of the file on disk. limit: half of the machine's memory or
    of the free disk by default. Raises DataError, naming the row, for a sample that cannot be decoded any more.
    """
    cache = cache or Cache()
    dtype = dataset.samples[0].dtype
    if limit is None:
        limit = int(SHARE * (this_machine().memory if place == "memory" else free_space(cache.folder)))
    offsets = np.cumsum([0, *(int(np.prod(shape)) for shape in dataset.shapes)])
    offsets = offsets[: max(1, int(np.searchsorted(offsets * dtype.itemsize, limit, side="right")))]
    if place == "memory":
        flat = torch.empty(int(offsets[-1]), dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
        decode_samples(flat.numpy(), dataset, offsets)
        return SampleStore(dataset, flat, offsets)
    if not decoder:
        raise ValueError("samples on disk are named by what decoded them: `decoder` must be given")
    shapes = [list(shape) for shape in dataset.shapes]
    key = f"samples-{hash_of(dataset.fingerprint, shapes, len(offsets), decoder, environment_digest())}"

    def write(folder: Path) -> None:
        mapped = np.lib.format.open_memmap(folder / FILE, mode="w+", dtype=dtype, shape=(int(offsets[-1]),))
        decode_samples(mapped, dataset, offsets)
        mapped.flush()

    try:
        folder = cache.directory(key, write)
    except OSError:
        folder = cache.folder / key
        if not folder.is_dir():  # else another rank was faster
            raise
    return SampleStore(dataset, folder / FILE, offsets)


def decode_samples(flat: Array, dataset: Dataset, offsets: Array) -> None:
    """Decode samples into `flat`, with a thread for each core: decoding releases the interpreter lock."""

    def decode(index: int) -> None:
        try:
            sample = dataset.samples[index]
        except (InputError, OSError) as error:
            row = index // dataset.per_row + 1
            raise DataError(f"{dataset.name}, row {row}: {error}. Fix or remove the row") from None
        if sample.shape != tuple(dataset.shapes[index]) or sample.dtype != flat.dtype:
            row = index // dataset.per_row + 1
            raise DataError(f"{dataset.name}, row {row} has changed since it was read. Start again")
        flat[offsets[index] : offsets[index + 1]] = sample.reshape(-1)

    with ThreadPoolExecutor(cores()) as pool:
        for _ in pool.map(decode, range(len(offsets) - 1)):
            pass


def free_space(folder: Path) -> int:
    """Free bytes of the disk that a folder is on, or will be on."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(there).free
