"""A memory plan as text and as JSON: the rows worth showing, the choice in a sentence, the settings for a recipe."""

from typing import Any

import yaml

from laconic.units import format_binary_bytes
from train.parallel.mesh import Mesh
from train.planner.memory_plan import MemoryPlan, PlanRow
from train.planner.memory_prediction import HEADROOM


def select_rows(plan: MemoryPlan) -> list[PlanRow]:
    """Select plain training, the Pareto front of memory and time, and the choice; the most memory first."""
    names = {row.combination.name for row in (plan.plain, *plan.find_pareto_front())}
    if plan.chosen:
        names.add(plan.chosen.combination.name)
    rows = [row for row in plan.rows if row.combination.name in names]
    return sorted(rows, key=lambda row: -row.prediction.peak)


def explain_choice(plan: MemoryPlan) -> str:
    """Explain the choice in a sentence, or that nothing fits."""
    budget = f"{format_binary_bytes(plan.memory)}, of which {100 * HEADROOM:.0f} % stay free"
    if plan.chosen is None:
        least = min(plan.rows, key=lambda row: row.need)
        return (
            f"Nothing fits into {budget}: the least is {format_binary_bytes(least.need)}, with "
            f"{least.combination.name}. Take a smaller batch or length, or more memory."
        )
    size = (
        "any batch fits, since its gradients are accumulated"
        if plan.largest is None
        else f"the largest batch that fits has {plan.largest} rows"
    )
    instead = f"{format_binary_bytes(plan.chosen.need)} instead of {format_binary_bytes(plan.plain.need)}"
    host = ", what is kept on the host included" if plan.chosen.shared and plan.chosen.prediction.host else ""
    fastest = "The fastest that fits" if plan.has_device_times else "The fastest on this processor that fits"
    return f"{fastest} into {budget}: {plan.chosen.combination.name}, {instead}{host}; {size}."


def format_recipe(row: PlanRow) -> str:
    """Format the YAML that turns a row's techniques on, in a recipe of training."""
    training = row.combination.training
    content: dict[str, Any] = {
        "optimizer": training.optimizer.to_yaml_value(),
        "max_grad_norm": training.max_grad_norm,
        "techniques": [named.to_yaml_value() for named in training.techniques],
    }
    if training.mesh != Mesh():
        content["mesh"] = training.mesh.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(content, sort_keys=False)


def summarize_plan(plan: MemoryPlan) -> dict[str, Any]:
    """Summarize the plan as JSON-ready values; bytes and seconds."""
    return {
        "model": plan.model.name,
        "task": plan.model.task.name,
        "parameters": plan.model.parameters,
        "batch": plan.plain.combination.training.batch_size,
        "length": plan.length,
        "memory": plan.memory,
        "devices": plan.devices,
        "device": plan.rates.name,
        "times_of_device": plan.has_device_times,
        "processor_share": plan.rates.share,
        "chosen": plan.chosen and plan.chosen.combination.name,
        "largest_batch": plan.largest,
        "rows": [summarize_row(row, plan) for row in plan.rows],
    }


def summarize_row(row: PlanRow, plan: MemoryPlan) -> dict[str, Any]:
    """Summarize a row of the plan as JSON-ready values."""
    training, prediction = row.combination.training, row.prediction
    return {
        "name": row.combination.name,
        "techniques": [named.to_yaml_value() for named in training.techniques],
        "optimizer": training.optimizer.to_yaml_value(),
        "max_grad_norm": training.max_grad_norm,
        "exact": row.combination.exact,
        "redraws_dropout": row.combination.redraws_dropout,
        "whole": row.combination.whole,
        "caution": row.caution,
        "fits": row.fits(plan.memory),
        "need": row.need,
        "peak": prediction.peak,
        "host": prediction.host,
        "reduction": plan.plain.prediction.peak / prediction.peak,
        "total_reduction": plan.plain.prediction.total / prediction.total,
        "at_peak": dict(prediction.at_peak),
        "phases": {phase: dict(part) for phase, part in prediction.phases.items()},
        "seconds": prediction.seconds,
        "flops": prediction.cost.flops,
    }
