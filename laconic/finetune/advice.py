"""What to turn on so that a training fits: before it begins, and after it ran out of memory."""

import copy
import resource
from pathlib import Path

import torch
from torch import nn

from laconic.data.dataset import Dataset
from laconic.errors import GoalMissed
from laconic.hardware import this_machine
from laconic.models.checkpoint import Checkpoint
from laconic.planner.combinations import Combination, format_technique
from laconic.planner.device_rates import measure_rates
from laconic.planner.memory_plan import MemoryPlan, PlanRow, plan_memory
from laconic.planner.meta_model import MetaModel
from laconic.planner.prediction import predict
from laconic.progress import Steps
from laconic.training.settings import Training, TrainingRecipe
from laconic.units import format_binary_bytes

SAMPLES = 64
"""The longest samples as the task counts, of which the longest by its tensors says how long a batch becomes."""


def subject_of(checkpoint: Checkpoint, name: str) -> MetaModel:
    """The structure of a checkpoint that is loaded; its weights are not copied."""
    memo: dict[int, object] = {}
    for tensor in (*checkpoint.module.parameters(), *checkpoint.module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    module: nn.Module = copy.deepcopy(checkpoint.module, memo)
    return MetaModel(name, module, checkpoint.task, checkpoint.task.max_length)


def longest(checkpoint: Checkpoint, dataset: Dataset) -> int:
    """The longest free axis of a sample, as tokens of a text that the task has cut; 1 where samples are all alike."""
    task = checkpoint.task
    free = [
        (spec.name, axis)
        for spec in task.inputs
        for axis in range(1, len(spec.shape))
        if isinstance(spec.shape[axis], str)
    ]
    if not free:
        return 1
    ordered = sorted(range(len(dataset)), key=lambda index: -dataset.lengths[index])[:SAMPLES]
    encoded = [task.encode([dataset.samples[index]]) for index in ordered]
    return max(int(arrays[name].shape[axis]) for arrays in encoded for name, axis in free)


def fitted(
    recipe: TrainingRecipe, subject: MetaModel, length: int, device: torch.device, steps: Steps
) -> tuple[TrainingRecipe, str]:
    """The recipe with techniques that keep within its memory, and a line that says what was turned on.

    A recipe that names techniques keeps them. Raises GoalMissed where it, or everything, is predicted not to fit.
    """
    if recipe.memory is None:
        return recipe, ""
    found = plan_memory(subject, recipe, length=length, memory=recipe.memory, device=device, steps=steps)
    if recipe.techniques:
        asked = PlanRow(plain(recipe), predict(subject, recipe, length, found.rates), shared=found.plain.shared)
        if not asked.fits(recipe.memory):
            instead = f"Turn on: {compared(found.chosen, asked)}" if found.chosen else sentence(nothing(found))
            need, memory = format_binary_bytes(asked.need), format_binary_bytes(recipe.memory)
            raise GoalMissed(f"these techniques are predicted to take {need}, of {memory}. {instead}")
        return recipe, ""
    if found.chosen is None:
        raise GoalMissed(nothing(found))
    return adopted(recipe, found.chosen), described(found.chosen)


def advised(
    recipe: TrainingRecipe, subject: MetaModel, length: int, device: torch.device, steps: Steps, room: int
) -> tuple[TrainingRecipe | None, str]:
    """After a step ran out of memory: a recipe that takes less, and what it turns on; None, and why, without one.

    room: bytes that were available before the run.
    """
    rates = measure_rates(device)
    failed = PlanRow(plain(recipe), predict(subject, recipe, length, rates), shared=device.type == "cpu")
    # What was predicted to fit and did not has shown how much there is.
    memory = min(recipe.memory or room, round(0.95 * failed.need))
    found = plan_memory(subject, recipe, length=length, memory=memory, device=device, steps=steps, rates=rates)
    if found.chosen is None:
        return None, sentence(nothing(found))
    return adopted(recipe, found.chosen, memory), compared(found.chosen, failed)


def plain(recipe: TrainingRecipe) -> Combination:
    """The recipe as a candidate."""
    return Combination(training=recipe, whole=True, exact=True)


def adopted(recipe: TrainingRecipe, row: PlanRow, memory: int | None = None) -> TrainingRecipe:
    """The recipe with the techniques of a row, and the memory that has turned out to be there."""
    training: Training = row.combination.training
    return recipe.model_copy(
        update={
            "techniques": training.techniques,
            "optimizer": training.optimizer,
            "clip": training.clip,
            "memory": memory or recipe.memory,
        }
    )


def described(row: PlanRow) -> str:
    """What a row turns on, as a recipe says it."""
    names = ", ".join(format_technique(named) for named in row.combination.training.techniques) or "no techniques"
    return f"{names}; optimizer {row.combination.training.optimizer.name}: {format_binary_bytes(row.need)} predicted"


def compared(chosen: PlanRow, asked: PlanRow) -> str:
    """The same, and what it costs."""
    times = chosen.prediction.seconds / max(asked.prediction.seconds, 1e-12)
    return f"{described(chosen)}, {times:.1f} times the time of a step"


def sentence(words: str) -> str:
    """With a capital."""
    return words[:1].upper() + words[1:]


def nothing(found: MemoryPlan) -> str:
    """What is said where nothing fits."""
    least = min(found.rows, key=lambda row: row.need)
    return (
        f"no combination of techniques fits into {format_binary_bytes(found.memory)}; the least that any takes is "
        f"{format_binary_bytes(least.need)} ({least.combination.name}). Take a smaller batch or length, or more memory"
    )


def available(device: torch.device) -> int:
    """Bytes that a training may use: of the device, or of the machine as far as the process may have it.

    To be asked before a run: memory that was freed may stay mapped for the next.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    memory = this_machine().memory
    if soft == resource.RLIM_INFINITY:
        return memory
    return min(memory, max(soft - address_space(), 1))  # libraries have taken much of it


def address_space() -> int:
    """Bytes that the process has mapped; 0 where the system does not tell."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[0]) * resource.getpagesize() if pages.is_file() else 0
