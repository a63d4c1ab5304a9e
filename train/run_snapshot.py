"""What a snapshot of a training run holds, and resuming the run from it."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from laconic.errors import SourceError, TrainingFailure
from train.snapshots.snapshot import Snapshots
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step.train_step import update_weights

log = logging.getLogger("laconic.train")


@contextmanager
def open_snapshots(folder: Path) -> Iterator[Snapshots]:
    """Open the snapshots of a run for the body. A write that fails at the end is a warning: the run has its result."""
    snapshots = Snapshots(folder)
    try:
        yield snapshots
    finally:
        try:
            snapshots.close()
        except TrainingFailure as error:
            log.warning("%s", error)


def save_snapshot(snapshots: Snapshots, state: TrainState, losses: Sequence[float], *, wait: bool) -> None:
    """Write a snapshot of the training state. A write that fails, as on a full disk, is a warning, and the training
    goes on: the next snapshot tries again.

    losses: of each step so far. wait: until it is on the disk, at the end of an interrupted run. Raises TrainingFailure
    where that fails twice.
    """
    for last in (False, True):  # the failure may be that of the snapshot before
        try:
            snapshots.save(len(losses), snapshot_content(state, losses), wait=wait)
            return
        except TrainingFailure as error:
            if wait and last:
                raise
            log.warning("%s. The training goes on, and tries again", error)


def snapshot_content(state: TrainState, losses: Sequence[float]) -> dict[str, Any]:
    """Return everything that a snapshot keeps: model, optimizer, and the loop's own state. Tensors are not copied.

    losses: of each step so far.
    """
    loop = {
        "losses": list(losses),
        "schedule": state.scheduler.state_dict(),
        "scaler": state.scaler.state_dict(),
        "mesh": state.strategy.name_mesh(),
    }
    optimizer = state.strategy.number_globally(state.optimizer.state_dict(), state.module)
    return {"model": state.weights(), "optimizer": optimizer, "loop": {"json": json.dumps(loop)}}


def resume(state: TrainState, snapshots: Snapshots, batch: Batch) -> list[float]:
    """Load the newest snapshot into the training state, and return the losses so far; none without a snapshot.

    A new optimizer has no state, and neither may the snapshot's have, as that of plain SGD. Where it has, one step is
    taken on `batch`, whether or not it has a loss term, and overwritten: it allocates the state of any optimizer.
    """
    if snapshots.latest() is None:
        return []
    content = snapshot_content(state, [])
    try:
        snapshots.load(content)
    except SourceError:
        with state.disable_loss_scaling():  # the scaler would skip a step that overflows
            update_weights(state, state.split(batch), total=1.0)
        content = snapshot_content(state, [])
        snapshots.load(content)
    for group, saved in zip(state.optimizer.param_groups, content["optimizer"]["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    state.modules.refresh_copies()
    loop = json.loads(content["loop"]["json"])
    state.scheduler.load_state_dict(loop["schedule"])
    if loop["scaler"]:
        state.scaler.load_state_dict(loop["scaler"])
    return [float(loss) for loss in loop["losses"]]
