"""Which techniques make a training run fit into memory: chosen before it begins, or after it ran out of memory."""

import copy
import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.config import NamedSettings
from laconic.data.dataset import Dataset
from laconic.errors import GoalMissed
from laconic.hardware import this_machine
from laconic.models.checkpoint import Checkpoint
from laconic.progress import Steps
from laconic.units import format_binary_bytes
from train.objectives.next_token import TokenizedText
from train.objectives.preference import TokenizedPreference
from train.planner.combinations import Combination, format_technique
from train.planner.device_rates import DeviceRates, measure_rates
from train.planner.memory_plan import MemoryPlan, PlanRow, plan_memory
from train.planner.meta_model import MetaModel
from train.planner.prediction import predict
from train.settings import Training, TrainingRecipe

SAMPLES = 64
"""How many of the longest samples, by the dataset's estimate, are encoded to find the longest in tokens."""


def copy_structure(checkpoint: Checkpoint, name: str, preference: NamedSettings | None = None) -> MetaModel:
    """Copy the structure of a checkpoint's model to the meta device, without its weights. preference: as of a
    `MetaModel`."""
    memo: dict[int, object] = {}
    for tensor in (*checkpoint.module.parameters(), *checkpoint.module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    module: nn.Module = copy.deepcopy(checkpoint.module, memo)
    return MetaModel(name, module, checkpoint.task, checkpoint.task.max_length, preference)


def measure_longest(checkpoint: Checkpoint, dataset: Dataset) -> int:
    """Measure the largest size of a free axis of any sample, as tokens of a truncated text; 1 where no axis is free.

    dataset: its rows as the objective prepares them.
    """
    task = checkpoint.task
    if isinstance(dataset.samples[0], TokenizedText | TokenizedPreference):
        text_task: Any = task
        return int(text_task.round_up(max(dataset.lengths) - 1))
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


def fit_to_memory(
    recipe: TrainingRecipe, subject: MetaModel, length: int, device: torch.device, steps: Steps
) -> tuple[TrainingRecipe, str]:
    """Return the recipe with techniques that fit into its memory limit, and a line that says which were added.

    A recipe that names techniques keeps them. Raises GoalMissed where these, or all combinations, would not fit.
    """
    if recipe.memory is None:
        return recipe, ""
    plan = plan_memory(subject, recipe, length=length, memory=recipe.memory, device=device, steps=steps)
    if recipe.techniques:
        asked = predict_row(recipe, subject, length, plan.rates, shared=plan.plain.shared)
        if not asked.fits(recipe.memory):
            instead = (
                f"Turn on: {describe_cost(plan.chosen, asked)}" if plan.chosen else capitalize(explain_misfit(plan))
            )
            raise GoalMissed(
                f"these techniques are predicted to take {format_binary_bytes(asked.need)}, of "
                f"{format_binary_bytes(recipe.memory)}. {instead}"
            )
        return recipe, ""
    if plan.chosen is None:
        raise GoalMissed(explain_misfit(plan))
    return adopt_techniques(recipe, plan.chosen), describe(plan.chosen)


def advise(
    recipe: TrainingRecipe, subject: MetaModel, length: int, device: torch.device, steps: Steps, room: int
) -> tuple[TrainingRecipe | None, str]:
    """Find a recipe that needs less memory than one that ran out of it, and what it turns on; None and the reason.

    room: bytes that were available before the run.
    """
    rates = measure_rates(device)
    failed = predict_row(recipe, subject, length, rates, shared=device.type == "cpu")
    # A prediction that fitted and a run that did not show how much memory there is.
    memory = min(recipe.memory or room, round(0.95 * failed.need))
    plan = plan_memory(subject, recipe, length=length, memory=memory, device=device, steps=steps, rates=rates)
    if plan.chosen is None:
        return None, capitalize(explain_misfit(plan))
    return adopt_techniques(recipe, plan.chosen, memory), describe_cost(plan.chosen, failed)


def predict_row(
    recipe: TrainingRecipe, subject: MetaModel, length: int, rates: DeviceRates, *, shared: bool
) -> PlanRow:
    """Predict a recipe as a row of a plan."""
    return PlanRow(Combination(recipe, whole=True, exact=True), predict(subject, recipe, length, rates), shared)


def adopt_techniques(recipe: TrainingRecipe, row: PlanRow, memory: int | None = None) -> TrainingRecipe:
    """Return the recipe with the techniques of a row of the plan, and with a memory limit where one is given."""
    training: Training = row.combination.training
    low = training.components().multiplies_in_bf16
    return recipe.model_copy(
        update={
            "techniques": training.techniques,
            "precision": "bf16" if low else "fp32",
            "optimizer": training.optimizer,
            "max_grad_norm": training.max_grad_norm,
            "memory": memory or recipe.memory,
        }
    )


def describe(row: PlanRow) -> str:
    """Describe the techniques of a row of the plan, and its predicted memory."""
    names = ", ".join(format_technique(named) for named in row.combination.training.techniques) or "no techniques"
    return f"{names}; optimizer {row.combination.training.optimizer.name}: {format_binary_bytes(row.need)} predicted"


def describe_cost(chosen: PlanRow, asked: PlanRow) -> str:
    """Describe the techniques of a row of the plan, with its time of a step relative to another row's."""
    times = chosen.prediction.seconds / max(asked.prediction.seconds, 1e-12)
    return f"{describe(chosen)}, {times:.1f} times the time of a step"


def capitalize(words: str) -> str:
    """Return the text with a capital first letter."""
    return words[:1].upper() + words[1:]


def explain_misfit(plan: MemoryPlan) -> str:
    """Explain that no combination of techniques fits."""
    least = min(plan.rows, key=lambda row: row.need)
    return (
        f"no combination of techniques fits into {format_binary_bytes(plan.memory)}; the least that any takes is "
        f"{format_binary_bytes(least.need)} ({least.combination.name}). Take a smaller batch or length, or more memory"
    )


def measure_available(device: torch.device) -> int:
    """Measure the bytes that a run may use: of the device, or of the machine within the limits of the process.

    Called before a run, since memory that a run has freed may stay mapped.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    memory = this_machine().memory
    if soft == resource.RLIM_INFINITY:
        return memory
    return min(memory, max(soft - address_space(), 1))  # libraries have taken much of it


def address_space() -> int:
    """Return the bytes of address space that the process has mapped; 0 where the system does not report them."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[0]) * resource.getpagesize() if pages.is_file() else 0
