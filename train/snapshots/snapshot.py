"""Snapshots of a training run to resume from: asynchronous, incremental, atomic, and loaded on any number of ranks."""

import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from laconic.errors import SourceError, TrainingFailure, UsageError
from train.snapshots.group_timeout import find_timeout
from train.snapshots.snapshot_manifest import (
    PACKS,
    SnapshotManifest,
    check_packs,
    list_steps,
    read_manifest,
    remove_unused,
)
from train.snapshots.tensor_packs import PackReader, PackWriter
from train.snapshots.tensor_shards import (
    ShardLoadPlanner,
    ShardSavePlanner,
    TensorShard,
    restore_values,
    split_state,
)

SHOWN = 3
log = logging.getLogger("laconic.train")


class Snapshots:
    """The snapshots of one run, in a folder of their own that all ranks can access.

    keep: how many intact snapshots are kept. With torch.distributed initialized, every rank has an instance, and all
    ranks call each method; writing uses a process group of its own (gloo), apart from the collectives of training.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise UsageError(f"at least 1 snapshot must be kept, not {keep}")
        try:
            (folder / PACKS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder} cannot hold the snapshots: {error}. Choose another folder") from error
        self.folder = folder
        self.keep = keep
        self._damaged: set[int] = set()

        self._group = dist.new_group(backend="gloo", timeout=find_timeout()) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None
        # torch warns at each save of a single process. Warning filters are global, so it is not set in the thread.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

    def save(self, step: int, state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Copy the state to host memory, and write it in the background; tensors that are stored already are skipped.

        state: nested mappings and lists of tensors, DTensors and plain JSON values. Plain values, and tensors that are
        not sharded, must be equal on all ranks that have them. wait: write without the copy, and return when the
        snapshot is on the disk. frozen: dotted paths of tensors that never change: they are not copied, and are hashed
        once. A write that is still running is waited for.
        Raises UsageError for a state with other values, and where a snapshot of a later step exists; TrainingFailure
        where this write, or the one before, failed: earlier snapshots are kept.
        """
        self._wait()
        if later := [other for other in self._list_steps() if other > step and other not in self._damaged]:
            raise UsageError(
                f"{self.folder} holds a snapshot of step {max(later)}, and step {step} would come after it. "
                f"Resume from that one, or give another folder"
            )
        shards, values = split_state(state)
        if not wait:
            shards = {name: shard.copy() for name, shard in shards.items()}
            values = deepcopy(values)
        self._writing = self._thread.submit(self._write, step, shards, values)
        del shards  # so that the background thread alone holds the copies
        if wait:
            self._wait()

    def latest(self) -> int | None:
        """Return the step of the newest intact snapshot, None without one. A damaged one is skipped with a warning."""
        self._wait()
        return max(self._read_intact(), default=None)

    def load(self, state: Mapping[str, Any]) -> int:
        """Load the newest intact snapshot into the tensors, mappings and lists of a state, in place; returns its step.
        It may have been saved on another number of ranks.

        Where the content of a tensor is damaged, the snapshot before is loaded.
        Raises SourceError where none is intact, and for a snapshot of another model.
        """
        self._wait()
        shards, values = split_state(state)
        steps: list[int] = self._gather(sorted(self._read_intact(), reverse=True))[0]
        for step in steps:
            manifest = read_manifest(self.folder, step)
            self._check(manifest, shards, values)
            try:
                state_dict_loader.load(
                    shards,
                    storage_reader=PackReader(self.folder, manifest),
                    planner=ShardLoadPlanner(),
                    process_group=self._group,
                )
            except CheckpointException as error:
                cause = get_first_failure(error)
                if not isinstance(cause, SourceError):
                    raise cause from error
                self._mark_damaged(step, cause)
                continue
            restore_values(state, manifest.values)
            return step
        raise SourceError(f"{self.folder} holds no intact snapshot. Start the training from its beginning")

    def close(self) -> None:
        """Wait for the running write. Raises TrainingFailure where it failed."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
                self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, step: int, shards: dict[str, TensorShard], values: dict[str, Any]) -> None:
        known = self._read_intact()
        values = {name: value for part in reversed(self._gather(values)) for name, value in part.items()}
        writer = PackWriter(self.folder, step, values, known)
        try:
            state_dict_saver.save(shards, storage_writer=writer, planner=ShardSavePlanner(), process_group=self._group)
        except CheckpointException as error:
            with suppress(OSError):  # what fails to be written may also fail to be removed
                self._remove_unused(self._list_steps)
            raise TrainingFailure(
                f"the snapshot of step {step} could not be written to {self.folder}: {get_first_failure(error)}. "
                f"{f'That of step {max(known)} is kept' if known else 'There is none before it'}. "
                f"Make room there, or give another folder"
            ) from error

        self._damaged.discard(step)
        self._remove_unused(self._list_kept)

    def _list_kept(self) -> list[int]:
        return sorted(self._read_intact(), reverse=True)[: self.keep]

    def _remove_unused(self, list_kept: Callable[[], Collection[int]]) -> None:
        try:
            # On the first rank alone: another would take what is being removed for damaged.
            if self._group is None or dist.get_rank(self._group) == 0:
                remove_unused(self.folder, list_kept())
        finally:
            self._gather(None)  # no rank reads the folder before this is done

    def _read_intact(self) -> dict[int, SnapshotManifest]:
        """Read the manifests of the snapshots that are intact, as far as is known without reading their tensors."""
        manifests = {}
        for step in self._list_steps():
            if step not in self._damaged:
                try:
                    manifest = read_manifest(self.folder, step)
                    check_packs(self.folder, manifest)
                    manifests[step] = manifest
                except SourceError as error:
                    self._mark_damaged(step, error)
        return manifests

    def _mark_damaged(self, step: int, cause: BaseException) -> None:
        # Its packs are not used again: the next save writes all tensors.
        self._damaged.add(step)
        log.warning("the snapshot of step %d is damaged, the one before is taken: %s", step, cause)

    def _check(self, manifest: SnapshotManifest, shards: Mapping[str, TensorShard], values: Mapping[str, Any]) -> None:
        """Raise SourceError, on all ranks alike, unless the snapshot has the names, shapes and dtypes of the state."""
        shapes = {shard.name: (str(shard.tensor.dtype), tuple(shard.shape)) for shard in shards.values()}
        expected: dict[str, Any] = {}
        for others in self._gather(shapes | dict.fromkeys(values)):
            expected |= others
        saved: dict[str, Any] = {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
        saved |= dict.fromkeys(manifest.values)
        misfits = [
            f"{name} is {format_spec(saved[name])}, expected {format_spec(expected[name])}"
            for name in expected
            if name in saved and saved[name] != expected[name]
        ]
        faults = [
            f"{len(names)} {what} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
            for what, names in (
                ("missing", [name for name in expected if name not in saved]),
                ("unexpected", [name for name in saved if name not in expected]),
                ("of another shape or dtype", misfits),
            )
            if names
        ]
        if faults:
            raise SourceError(
                f"the snapshot of step {manifest.step} in {self.folder} is of another model or optimizer: "
                f"{'; '.join(faults)}. Resume with the recipe that it was made with, or give another folder"
            )

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _list_steps(self) -> list[int]:
        try:
            return list_steps(self.folder)
        except OSError as error:
            raise TrainingFailure(
                f"the folder of the snapshots, {self.folder}, cannot be read: {error}. Check that it still exists"
            ) from error


def get_first_failure(error: CheckpointException) -> BaseException:
    """Return the exception of the first rank that failed."""
    return error.failures[min(error.failures)][0]


def format_spec(spec: tuple[str, tuple[int, ...]] | None) -> str:
    """Format a dtype and a shape, as in `float32 [2, 3]`."""
    return "a plain value" if spec is None else f"{spec[0].removeprefix('torch.')} {list(spec[1])}"
