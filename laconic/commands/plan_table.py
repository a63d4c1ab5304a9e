"""What `laconic plan` prints: the table of combinations, the choice, and the recipe that turns it on."""

from typing import TYPE_CHECKING

from rich.table import Table

from laconic.commands.console import OUT, make_table
from laconic.units import choose_unit, format_count
from train.offload.memory_accounting import CATEGORIES

if TYPE_CHECKING:
    from train.planner.memory_plan import MemoryPlan, PlanRow

PHASES = ("forward", "backward", "optimizer")
COLUMNS = ("par", "grad", "opt", "act", "tmp")
LEGEND = (
    "* chosen, ! does not fit (the others do); = losses of plain FP32 training to 1e-5, ~ so without dropout, which "
    "draws other masks, + all weights are trained, a adapters are trained. device, host: the peak of each; less: the "
    "device's against plain training; all: device and host together against it. par, grad, opt, act, tmp: parameters, "
    "gradients, optimizer state, activations, temporaries at the device's peak. Times are relative to plain training, "
    "computed from the measured speed of: "
)
UNTIMED = (
    "The memory is a GPU's, and no GPU is here: `CPU time` is that of this processor, by whose arithmetic the fastest "
    "was chosen. A GPU may rank BF16, FP16 and quantized moments otherwise, and the copies of host-weights and "
    "activation-offload take longer there. Plan on the GPU for its times."
)


def print_plan(plan: "MemoryPlan", *, everything: bool = False) -> None:
    """Print the table, the choice, and the settings for a recipe. everything: all rows."""
    from train.planner.plan_summary import explain_choice, format_recipe, select_rows

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
    if not plan.has_device_times:
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
    """Make the table of the peak memory and the time of each row."""
    # The times of another device than the one whose memory is planned are named so in the table itself.
    time = "time" if plan.has_device_times else "CPU time"
    table = make_table(title, "", "device", "less", "host", "all", time, *COLUMNS, right=range(1, 11))
    table.padding, table.columns[0].no_wrap = (0, 1, 0, 0), True  # so that it fits 80 columns
    plain = plan.plain.prediction
    _, size = choose_unit(plain.peak)
    for number, row in enumerate(rows, 1):
        prediction = row.prediction
        chosen = plan.chosen is not None and row.combination.name == plan.chosen.combination.name
        mark = "*" if chosen else " " if row.fits(plan.memory) else "!"
        exact = "~" if row.combination.redraws_dropout else "="
        kind = exact if row.combination.exact else "+" if row.combination.whole else "a"
        table.add_row(
            f"{number:>2} {mark}{kind}",
            f"{prediction.peak / size:.2f}",
            format_factor(plain.peak / prediction.peak),
            format_size(prediction.host / size),
            format_factor(plain.total / prediction.total),
            f"{prediction.seconds / plain.seconds:.2f}x",
            *(format_size(prediction.at_peak[category] / size) for category in CATEGORIES),
        )
    return table


def format_size(size: float) -> str:
    """Format a size in at most five characters."""
    return f"{size:.1f}" if size < 99.95 else f"{size:.0f}"


def format_factor(factor: float) -> str:
    """Format how many times less it is, in at most five characters."""
    return f"{factor:.1f}x" if factor < 99.95 else f"{factor:.0f}x"


def make_phase_table(plan: "MemoryPlan", row: "PlanRow") -> Table:
    """Make the table of the peak of each phase of a step, by category."""
    unit, size = choose_unit(plan.plain.prediction.peak)
    table = make_table(f"The chosen one, by phase; {unit}", "phase", *COLUMNS, "all", right=range(1, 7))
    for phase in (each for each in PHASES if each in row.prediction.phases):
        part = row.prediction.phases[phase]
        amounts = [*(part[category] for category in CATEGORIES), sum(part.values())]
        table.add_row(phase, *(f"{amount / size:.2f}" for amount in amounts))
    return table
