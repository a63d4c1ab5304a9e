"""What a snapshot of a training run holds, and resuming the run from it."""

import json
from collections.abc import Sequence
from typing import Any

from laconic.errors import SourceError
from laconic.training.snapshots.snapshot import Snapshots
from laconic.training.step.objective import Batch
from laconic.training.step.train_state import TrainState
from laconic.training.step.train_step import train_step


def snapshot_content(state: TrainState, losses: Sequence[float]) -> dict[str, Any]:
    """Everything that a snapshot keeps: model, optimizer, and the loop's own state. Tensors are not copied.

    losses: of each step so far.
    """
    loop = {"losses": list(losses), "schedule": state.scheduler.state_dict(), "scaler": state.scaler.state_dict()}
    return {"model": state.weights(), "optimizer": state.optimizer.state_dict(), "loop": {"json": json.dumps(loop)}}


def resume(state: TrainState, snapshots: Snapshots, batch: Batch) -> list[float]:
    """Load the newest snapshot into the training state; gives the losses so far.

    A new optimizer has no state, and neither may the snapshot's have, as that of plain SGD. Where it has, one step is
    taken on `batch` and overwritten, which allocates the state of any optimizer.
    """
    content = snapshot_content(state, [])
    try:
        snapshots.load(content)
    except SourceError:
        with state.disable_loss_scaling():  # the scaler would skip a step that overflows
            train_step(state, batch)
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
