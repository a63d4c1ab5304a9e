"""The schedules of a pipeline: in which order its stages take micro-batches, how many, and how long they wait."""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from laconic.errors import RecipeError
from train.parallel.mesh import Mesh, ScheduleName

Action = tuple[str, int, int]
"""What a rank does with a micro-batch in a stage: F (forward), B (backward), or I and W (backward for inputs, and for
weights); the stage; the micro-batch."""


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of torch. stages: on each rank. folds: whether the last stage is on the first rank."""

    make: Callable[..., Any]
    stages: int = 1
    folds: bool = False

    def place_stages(self, ranks: int) -> list[int]:
        """Return the rank of each stage."""
        forth = list(range(ranks))
        back = forth[::-1] if self.folds else forth
        return forth + back * (self.stages - 1)

    def make_schedule(self, stages: Sequence[Any], micro_batches: int) -> Any:
        """Make torch's schedule of the stages of one rank, whose losses are summed over the micro-batches."""
        return self.make(stages if self.stages > 1 else stages[0], micro_batches, loss_fn=take_loss, scale_grads=False)

    def takes(self, micro_batches: int, ranks: int) -> bool:
        """Return whether a schedule can have so many micro-batches."""
        if self.make is Schedule1F1B:
            return micro_batches >= ranks
        return self.make is not ScheduleInterleaved1F1B or micro_batches % max(1, micro_batches // ranks) == 0


SCHEDULES: Mapping[ScheduleName, ScheduleKind] = {
    "gpipe": ScheduleKind(ScheduleGPipe),
    "1f1b": ScheduleKind(Schedule1F1B),
    "interleaved": ScheduleKind(ScheduleInterleaved1F1B, stages=2),
    "zbv": ScheduleKind(ScheduleZBVZeroBubble, stages=2, folds=True),
}
RECOMPUTES = "zbv computes checkpoints again for each group of weights"
"""What the second part of its backward passes does with gradient checkpointing."""
PER_RANK = 4
"""Micro-batches for each rank of a pipeline, where nothing says how many and the rows suffice: 1F1B then waits for
(p - 1) / (5 p - 1) of its time, less than a fifth."""


def take_loss(loss: Tensor, number: Tensor) -> Tensor:
    """Return the output of the last stage, which is the loss."""
    return loss


def choose_rows(rows: int, ranks: int, schedule: ScheduleName) -> int:
    """Choose the rows of a micro-batch, for `rows` rows of a step: few enough to keep all ranks of a pipeline busy.

    Raises RecipeError where there are too few for the schedule.
    """
    kind = SCHEDULES[schedule]
    for chosen in range(max(1, rows // (PER_RANK * ranks)), rows + 1):
        if kind.takes(ceil(rows / chosen), ranks):
            return chosen
    raise RecipeError(
        f"mesh: pipeline: {rows} rows cannot be split into as many micro-batches as the {ranks} ranks of schedule "
        f"{schedule} need. Set batch_size to {ranks} or more on each replica, or schedule: gpipe"
    )


def check_rows(rows: int, micro_batch: int, ranks: int, schedule: ScheduleName) -> None:
    """Raise RecipeError where a schedule cannot have the micro-batches that gradient accumulation makes."""
    number = ceil(rows / micro_batch)
    if not SCHEDULES[schedule].takes(number, ranks):
        need = f"at least {ranks}" if schedule == "1f1b" else f"a multiple of {max(1, number // ranks)}"
        raise RecipeError(
            f"mesh: pipeline: gradient-accumulation makes {number} micro-batches of {rows} rows, and schedule "
            f"{schedule} on {ranks} ranks needs {need}. Change its rows, or leave it out"
        )


def check_tied(tied: Collection[str], schedule: ScheduleName) -> None:
    """Raise RecipeError where a schedule has both uses of tied weights on one rank, and these are in shards. tied: the
    names of weights that the first and the last stage have in common."""
    if tied and SCHEDULES[schedule].folds:
        raise RecipeError(
            f"mesh: schedule: {schedule} has the first and the last stage on one rank, where FSDP2 gathers and reduces "
            f"each stage by itself, and cannot share {min(tied)} between them. Choose interleaved, or leave out shards "
            f"and replicas"
        )


def explain_recomputation(mesh: Mesh, techniques: Collection[str]) -> str:
    """Say what checkpoints cost where a backward pass is in two parts, as `zbv` has it; "" for other schedules and
    without checkpoints. techniques: their names."""
    if mesh.pipeline == 1 or mesh.schedule != "zbv" or "gradient-checkpointing" not in techniques:
        return ""
    return f"{RECOMPUTES}: `laconic plan --link` predicts how many times the FLOPs of 1f1b that is"


def list_actions(schedule: Any, ranks: int, micro_batches: int) -> list[list[Action]]:
    """List what each rank does in a step, in order."""
    if isinstance(schedule, PipelineScheduleMulti):
        return [
            [
                (str(action.computation_type.value), int(action.stage_index), int(action.microbatch_index or 0))
                for action in schedule.pipeline_order[rank]
                if action is not None
            ]
            for rank in range(ranks)
        ]
    # The list that torch 2.13 keeps for 1F1B names micro-batches that the last stage does not have.
    actions: list[list[Action]] = []
    for rank in range(ranks):
        ahead = micro_batches if isinstance(schedule, ScheduleGPipe) else min(micro_batches, ranks - rank)
        order: list[Action] = [("F", rank, number) for number in range(ahead)]
        for number in range(micro_batches):
            order.append(("B", rank, number))
            if number + ahead < micro_batches:
                order.append(("F", rank, number + ahead))
        actions.append(order)
    return actions


def measure_bubble(actions: Sequence[Sequence[Action]], costs: Sequence[float]) -> float:
    """Return the share of the ranks' time in which they wait for another stage, if each action begins as early as it
    can: 0 to 1, without the time of communication.

    actions: of each rank, in order. costs: of the forward pass of each stage; a backward pass takes twice as long, and
    in two parts, for inputs and for weights, each half of that.
    """
    span, busy = time_actions(actions, lambda kind, stage: costs[stage] * (2 if kind == "B" else 1), len(costs))
    return 1 - sum(busy) / (len(busy) * span) if span else 0.0


def time_actions(
    actions: Sequence[Sequence[Action]], count_seconds: Callable[[str, int], float], stages: int
) -> tuple[float, list[float]]:
    """Return when the last action ends, if each begins as early as it can, and how long each rank is busy.

    actions: as of `measure_bubble`. count_seconds: takes the kind of an action and its stage.
    """
    queues = [deque(order) for order in actions]
    free, busy = [0.0] * len(queues), [0.0] * len(queues)
    ends: dict[Action, float] = {}
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and (ready := find_start(queue[0], ends, stages)) is not None:
                kind, stage, number = queue.popleft()
                cost = count_seconds(kind, stage)
                busy[rank] += cost
                free[rank] = max(free[rank], ready) + cost
                ends["B" if kind == "I" else kind, stage, number] = free[rank]
    return max(free), busy


def find_start(action: Action, ends: Mapping[Action, float], stages: int) -> float | None:
    """Return when the inputs of an action are there; None while they are not."""
    kind, stage, number = action
    if kind == "F":
        return ends.get(("F", stage - 1, number)) if stage else 0.0
    if kind == "W":
        return ends.get(("B", stage, number))
    return ends.get(("B", stage + 1, number)) if stage < stages - 1 else ends.get(("F", stage, number))
