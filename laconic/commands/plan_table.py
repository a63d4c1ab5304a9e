"""What `laconic plan` prints: the table of combinations, the choice, and the recipe that turns it on."""

from typing import TYPE_CHECKING

from rich.table import Table

from laconic.commands.console import OUT, make_table
from laconic.offload.memory_accounting import CATEGORIES
from laconic.units import choose_unit, format_count

if TYPE_CHECKING:
    from laconic.planner.memory_plan import MemoryPlan, PlanRow

PHASES = ("forward", "backward", "optimizer")
COLUMNS = ("par", "grad", "opt", "act", "tmp")
LEGEND = (
    "* chosen, ! does not fit (the others do); = losses of plain FP32 training to 1e-5, + all weights are trained, a "
    "adapters are trained. device, host: the peak of each; less: the device's against plain training; all: device and "
    "host together against it. par, grad, opt, act, tmp: parameters, gradients, optimizer state, activations, "
    "temporaries at the device's peak. Times are relative to plain training, computed from the measured speed of: "
)
UNTIMED = (
    "The memory is a GPU's, and no GPU is here: the times are this processor's, for which copies to the host cost "
    "little. On a GPU, host-weights and activation-offload take longer than shown here. Plan there for its times."
)


def print_plan(plan: "MemoryPlan", *, everything: bool = False) -> None:
    """Print the table, the choice, and the settings for a recipe. everything: all rows."""
    from laconic.planner.plan_summary import explain_choice, format_recipe, select_rows

    training, (unit, _) = plan.plain.combination.training, choose_unit(plan.plain.prediction.peak)
    title = (
        f"{plan.model.name}: {format_count(plan.model.parameters, billion='B')} parameters, "
        f"batch {training.batch_size}, length {plan.length}; {unit}"
        f"{f' on each of {plan.devices} devices' if plan.devices > 1 else ''}"
    )
    rows = list(plan.rows) if everything else select_rows(plan)
    OUT.print(make_combination_table(plan, title, rows))
    OUT.print()
    for number, row in enumerate(rows, 1):
        OUT.print(f"{number:>2}  {row.combination.name}", soft_wrap=True)
    OUT.print(f"\n{LEGEND}{plan.rates.name}.", soft_wrap=True)
    if not plan.has_copy_times:
        OUT.print(f"\n{UNTIMED}", soft_wrap=True)
    OUT.print(f"\n{explain_choice(plan)}", soft_wrap=True)
    if caution := (plan.chosen or plan.plain).caution:
        OUT.print(f"\n{caution}.", soft_wrap=True)
    if plan.chosen:
        OUT.print()
        OUT.print(make_phase_table(plan, plan.chosen))
    if plan.chosen and plan.chosen.combination.training.techniques:
        OUT.print("\nIn a recipe:\n")
        OUT.print(format_recipe(plan.chosen), end="")


def make_combination_table(plan: "MemoryPlan", title: str, rows: list["PlanRow"]) -> Table:
    """The peak memory and the time of each row."""
    table = make_table(title, "", "device", "less", "host", "all", "time", *COLUMNS, right=range(1, 11))
    plain = plan.plain.prediction
    _, size = choose_unit(plain.peak)
    for number, row in enumerate(rows, 1):
        found = row.prediction
        chosen = plan.chosen is not None and row.combination.name == plan.chosen.combination.name
        mark = "*" if chosen else " " if row.fits(plan.memory) else "!"
        kind = "=" if row.combination.exact else "+" if row.combination.whole else "a"
        table.add_row(
            f"{number:>2} {mark}{kind}",
            f"{found.peak / size:.2f}",
            format_factor(plain.peak / found.peak),
            f"{found.host / size:.1f}",
            format_factor(plain.total / found.total),
            f"{found.seconds / plain.seconds:.2f}x",
            *(f"{found.at_peak[category] / size:.1f}" for category in CATEGORIES),
        )
    return table


def format_factor(factor: float) -> str:
    """How many times less, in at most five characters."""
    return f"{factor:.1f}x" if factor < 99.95 else f"{factor:.0f}x"


def make_phase_table(plan: "MemoryPlan", row: "PlanRow") -> Table:
    """The peak of each phase of a step, by category."""
    unit, size = choose_unit(plan.plain.prediction.peak)
    table = make_table(f"The chosen one, by phase; {unit}", "phase", *COLUMNS, "all", right=range(1, 7))
    for phase in (each for each in PHASES if each in row.prediction.phases):
        part = row.prediction.phases[phase]
        amounts = [*(part[category] for category in CATEGORIES), sum(part.values())]
        table.add_row(phase, *(f"{amount / size:.2f}" for amount in amounts))
    return table
