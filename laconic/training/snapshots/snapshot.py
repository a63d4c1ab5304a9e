"""Snapshots of a training run, to go on from: asynchronous, incremental, atomic; on any number of ranks."""

import logging
import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from laconic.errors import SourceError, TrainingFailure, UsageError
from laconic.training.snapshots.card import PACKS, Card, check_packs, read_card, steps, sweep
from laconic.training.snapshots.pack import Reader, Writer
from laconic.training.snapshots.state_shard import Loading, Saving, Shard, cut, put

SHOWN = 3
log = logging.getLogger("laconic.training")


class Snapshots:
    """The snapshots of one run, in a folder of their own that all ranks see.

    keep: how many whole ones stay. With torch.distributed initialized, every rank makes one, and every rank calls each
    method; the writing has a process group of its own (gloo), so that it does not meet the collectives of training.
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
        self._keys: dict[MetadataIndex, str] = {}
        self._group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None
        # Said by torch at each save of a single process; here and not where it is said, since filters are no thread's.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

    def save(self, step: int, state: Mapping[str, Any], *, wait: bool = False, frozen: Collection[str] = ()) -> None:
        """Copy the state to host memory, and write it in the background; what is on the disk already is not written.

        state: nested mappings and lists of tensors, DTensors and plain JSON values. Plain values, and tensors that are
        not sharded, are taken to be alike on all ranks. wait: write from the tensors themselves, without the copy, and
        return when it is on the disk. frozen: dotted paths of what does not change any more: it is not copied, and is
        looked at once. A write still under way is waited for.
        Raises UsageError for a state that holds other things, and where there is a snapshot of a later step already;
        TrainingFailure where this write, or the one before, failed: the snapshots before it are kept.
        """
        self._settle()
        if later := [other for other in self._steps() if other > step and other not in self._damaged]:
            raise UsageError(
                f"{self.folder} holds a snapshot of step {max(later)}, and step {step} would come after it. "
                f"Go on from that one, or give another folder"
            )
        shards, values = cut(state)
        if not wait:
            shards = {name: shard if is_below(name, frozen) else shard.copy() for name, shard in shards.items()}
            values = deepcopy(values)
        self._keys = {index: key for index, key in self._keys.items() if is_below(index.fqn, frozen)}
        self._writing = self._thread.submit(self._write, step, shards, values)
        del shards  # the background is to hold the copies alone
        if wait:
            self._settle()

    def latest(self) -> int | None:
        """The step of the newest snapshot that is whole, None without one. A damaged one is skipped, and told of."""
        self._settle()
        return max(self._whole(), default=None)

    def load(self, state: Mapping[str, Any]) -> int:
        """Read the newest whole snapshot into the tensors of a state, and its plain values into the mappings and lists
        of it; returns its step. It may have been saved on another number of ranks.

        A tensor whose content is damaged makes the whole snapshot so, and the one before is taken.
        Raises SourceError where none is whole, and for one of another model.
        """
        self._settle()
        self._keys = {}
        shards, values = cut(state)
        whole: list[int] = self._gather(sorted(self._whole(), reverse=True))[0]
        for step in whole:
            card = read_card(self.folder, step)
            self._check(card, shards, values)
            try:
                state_dict_loader.load(
                    shards, storage_reader=Reader(self.folder, card), planner=Loading(), process_group=self._group
                )
            except CheckpointException as error:
                cause = first(error)
                if not isinstance(cause, SourceError):
                    raise cause from error
                self._skip(step, cause)
                continue
            put(state, card.values)
            return step
        raise SourceError(f"{self.folder} holds no snapshot that is whole. Start the training from its beginning")

    def close(self) -> None:
        """Wait for the write under way. Raises TrainingFailure where it failed."""
        try:
            self._settle()
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

    def _write(self, step: int, shards: dict[str, Shard], values: dict[str, Any]) -> None:
        known = self._whole()
        writer = Writer(self.folder, step, values, known, self._keys)
        try:
            state_dict_saver.save(shards, storage_writer=writer, planner=Saving(), process_group=self._group)
        except CheckpointException as error:
            self._sweep(self._steps())
            raise TrainingFailure(
                f"the snapshot of step {step} could not be written to {self.folder}: {first(error)}. "
                f"{f'That of step {max(known)} is kept' if known else 'There is none before it'}. "
                f"Make room there, or give another folder"
            ) from error
        self._keys = writer.keys
        self._damaged.discard(step)
        self._sweep(sorted(self._whole(), reverse=True)[: self.keep])

    def _sweep(self, kept: Collection[int]) -> None:
        try:
            if self._group is None or dist.get_rank(self._group) == 0:
                sweep(self.folder, kept)
        finally:
            self._gather(None)  # nobody looks into the folder before it is swept

    def _whole(self) -> dict[int, Card]:
        """The cards of the snapshots that are not damaged, as far as that is known without reading all of them."""
        cards = {}
        for step in self._steps():
            if step not in self._damaged:
                try:
                    card = read_card(self.folder, step)
                    check_packs(self.folder, card)
                    cards[step] = card
                except SourceError as error:
                    self._skip(step, error)
        return cards

    def _skip(self, step: int, cause: BaseException) -> None:
        # What it names is not relied on again: the next save writes all of it.
        self._damaged.add(step)
        log.warning("the snapshot of step %d is damaged, the one before is taken: %s", step, cause)

    def _check(self, card: Card, shards: Mapping[str, Shard], values: Mapping[str, Any]) -> None:
        """Raise SourceError, on all ranks alike, unless the snapshot is of this very state."""
        own = {name: (str(shard.tensor.dtype), tuple(shard.whole)) for name, shard in shards.items()}
        wanted: dict[str, Any] = dict.fromkeys(values)
        for each in self._gather(own):
            wanted |= each
        found: dict[str, Any] = {name: (each.dtype, each.shape) for name, each in card.tensors.items()}
        found |= dict.fromkeys(card.values)
        misfits = [
            f"{name} is {text(found[name])}, expected {text(wanted[name])}"
            for name in wanted
            if name in found and found[name] != wanted[name]
        ]
        faults = [
            f"{len(names)} {what} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
            for what, names in (
                ("missing", [name for name in wanted if name not in found]),
                ("unexpected", [name for name in found if name not in wanted]),
                ("of another shape or dtype", misfits),
            )
            if names
        ]
        if faults:
            raise SourceError(
                f"the snapshot of step {card.step} in {self.folder} is of another model or optimizer: "
                f"{'; '.join(faults)}. Resume with the recipe that it was made with, or give another folder"
            )

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _steps(self) -> list[int]:
        try:
            return steps(self.folder)
        except OSError as error:
            raise TrainingFailure(
                f"the folder of the snapshots, {self.folder}, does not read: {error}. Look whether it is still there"
            ) from error


def first(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank where something did."""
    return error.failures[min(error.failures)][0]


def is_below(path: str, paths: Collection[str]) -> bool:
    """Whether a dotted path is one of these, or goes on from one."""
    names = path.split(".")
    return any(".".join(names[: stop + 1]) in paths for stop in range(len(names)))


def text(found: tuple[str, tuple[int, ...]] | None) -> str:
    """A dtype and a shape, as people write them."""
    return "a plain value" if found is None else f"{found[0].removeprefix('torch.')} {list(found[1])}"
