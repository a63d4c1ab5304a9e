"""A plan as people and programs read it: a table, a recipe to paste, JSON."""

from typing import Any

import yaml
from rich.table import Table

from laconic.console import OUT, make_table
from laconic.offload.memory_accounting import CATEGORIES
from laconic.planner.memory_plan import HEADROOM, Plan, Row, timed
from laconic.planner.prediction import total
from laconic.training.parallel.mesh import Mesh
from laconic.units import choose_unit

GIB = 2**30
PHASES = ("forward", "backward", "optimizer")
COLUMNS = ("par", "grad", "opt", "act", "tmp")


def show(plan: Plan, *, everything: bool = False) -> None:
    """Print the table, the choice, and how to say it in a recipe."""
    training, (unit, _) = plan.plain.candidate.training, choose_unit(plan.plain.prediction.peak)
    title = (
        f"{plan.subject.name}: {counted(plan.subject.parameters)} parameters, batch {training.batch}, "
        f"length {plan.length}; {unit}{f' on each of {plan.devices} devices' if plan.devices > 1 else ''}"
    )
    rows = list(plan.rows) if everything else shown(plan)
    OUT.print(table(plan, title, rows))
    OUT.print()
    for number, row in enumerate(rows, 1):
        OUT.print(f"{number:>2}  {row.candidate.name}", soft_wrap=True)
    OUT.print(
        f"\n* chosen, ! does not fit (the others do); = losses of plain FP32 training to 1e-5, + all weights learn, "
        f"a adapters learn. par, grad, opt, act, tmp: what the peak is made of. Times are relative to plain training, "
        f"worked out from what this was measured to do: {plan.rates.name}.",
        soft_wrap=True,
    )
    if not timed(plan.plain, plan.rates):
        OUT.print(
            "\nThe memory is a GPU's, and no GPU is here: the times are this processor's, for which copies to the host "
            "cost little. On a GPU, host-weights and offload cost more than is said here. Plan there for its times.",
            soft_wrap=True,
        )
    OUT.print(verdict(plan), soft_wrap=True)
    if said := caution(plan.chosen or plan.plain):
        OUT.print(f"\n{said}.", soft_wrap=True)
    if plan.chosen:
        OUT.print()
        OUT.print(phase_table(plan, plan.chosen))
    if plan.chosen and plan.chosen.candidate.training.techniques:
        OUT.print("\nIn a recipe:\n")
        OUT.print(recipe_lines(plan.chosen), end="")


def shown(plan: Plan) -> list[Row]:
    """Plain training, the front of memory against time, and the choice, the largest first."""
    names = {row.candidate.name for row in plan.front()} | {plan.plain.candidate.name}
    if plan.chosen:
        names.add(plan.chosen.candidate.name)
    rows = [row for row in plan.rows if row.candidate.name in names]
    return sorted(rows, key=lambda row: -row.prediction.peak)


def table(plan: Plan, title: str, rows: list[Row]) -> Table:
    """A line for each row."""
    made = make_table(title, "", "", "peak", "less", "time", *COLUMNS, "host", right=range(11))
    plain = plan.plain.prediction
    _, size = choose_unit(plain.peak)
    for number, row in enumerate(rows, 1):
        found = row.prediction
        chosen = plan.chosen is not None and row.candidate.name == plan.chosen.candidate.name
        mark = "*" if chosen else " " if row.fits(plan.memory) else "!"
        kind = "=" if row.candidate.exact else "+" if row.candidate.whole else "a"
        made.add_row(
            str(number),
            f"{mark}{kind}",
            f"{found.peak / size:.2f}",
            f"{plain.peak / found.peak:.1f}x",
            f"{found.seconds / plain.seconds:.2f}x",
            *(f"{found.at_peak[category] / size:.1f}" for category in CATEGORIES),
            f"{found.host / size:.1f}",
        )
    return made


def phase_table(plan: Plan, row: Row) -> Table:
    """The peak of each phase of a step, and what it is made of."""
    unit, size = choose_unit(plan.plain.prediction.peak)
    made = make_table(f"The chosen one, by phase; {unit}", "phase", *COLUMNS, "all", right=range(1, 7))
    for phase in (each for each in PHASES if each in row.prediction.phases):
        part = row.prediction.phases[phase]
        made.add_row(phase, *(f"{part[category] / size:.2f}" for category in CATEGORIES), f"{total(part) / size:.2f}")
    return made


def verdict(plan: Plan) -> str:
    """The choice in a sentence."""
    budget = f"{told(plan.memory)}, of which {100 * HEADROOM:.0f} % stay free"
    if plan.chosen is None:
        least = min(plan.rows, key=lambda row: row.need)
        return (
            f"\nNothing fits into {budget}: the least is {told(least.need)}, with "
            f"{least.candidate.name}. Take a smaller batch or length, or more memory."
        )
    size = (
        "any batch fits, since it is taken in parts"
        if plan.largest is None
        else f"the largest batch that fits has {plan.largest} rows"
    )
    instead = f"{told(plan.chosen.need)} instead of {told(plan.plain.need)}"
    host = ", what is kept on the host included" if plan.chosen.shared and plan.chosen.prediction.host else ""
    return f"\nThe fastest that fits into {budget}: {plan.chosen.candidate.name}, {instead}{host}; {size}."


def caution(row: Row) -> str | None:
    """What its optimizer was measured to lose."""
    return row.candidate.training.parts().optimizer.caution


def told(size: int) -> str:
    """Bytes, for people."""
    unit, scale = choose_unit(size)
    return f"{size / scale:.2f} {unit}"


def counted(parameters: int) -> str:
    """How many, for people: 1.11 B, 22.7 M, 340."""
    return next(
        (f"{parameters / each:.3g} {name}" for name, each in (("B", 1e9), ("M", 1e6)) if parameters >= 0.5 * each),
        str(parameters),
    )


def recipe_lines(row: Row) -> str:
    """What a recipe of training says to turn it on."""
    training = row.candidate.training
    content: dict[str, Any] = {
        "optimizer": training.optimizer.to_yaml_value(),
        "clip": training.clip,
        "techniques": [named.to_yaml_value() for named in training.techniques],
    }
    if training.mesh != Mesh():
        content["mesh"] = training.mesh.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(content, sort_keys=False)


def summary(plan: Plan) -> dict[str, Any]:
    """JSON-ready; bytes and seconds."""
    return {
        "model": plan.subject.name,
        "task": plan.subject.task.name,
        "parameters": plan.subject.parameters,
        "batch": plan.plain.candidate.training.batch,
        "length": plan.length,
        "memory": plan.memory,
        "devices": plan.devices,
        "device": plan.rates.name,
        "chosen": plan.chosen and plan.chosen.candidate.name,
        "largest_batch": plan.largest,
        "rows": [described(row, plan) for row in plan.rows],
    }


def described(row: Row, plan: Plan) -> dict[str, Any]:
    """A row of it."""
    training, found = row.candidate.training, row.prediction
    return {
        "name": row.candidate.name,
        "techniques": [named.to_yaml_value() for named in training.techniques],
        "optimizer": training.optimizer.to_yaml_value(),
        "clip": training.clip,
        "exact": row.candidate.exact,
        "whole": row.candidate.whole,
        "caution": caution(row),
        "fits": row.fits(plan.memory),
        "need": row.need,
        "peak": found.peak,
        "host": found.host,
        "at_peak": dict(found.at_peak),
        "phases": {phase: dict(part) for phase, part in found.phases.items()},
        "seconds": found.seconds,
        "flops": found.work.flops,
    }
