"""What `laconic plan --link` prints: the table of meshes, the choice, and the recipe that turns it on."""

from typing import TYPE_CHECKING

from rich.table import Table

from laconic.commands.console import OUT, make_table
from laconic.commands.plan_table import COLUMNS, format_size
from laconic.units import choose_unit, format_binary_bytes, format_bytes, format_count
from train.offload.memory_accounting import CATEGORIES

if TYPE_CHECKING:
    from train.planner.mesh_plan import MeshPlan, MeshRow

MOST = 16
"""Meshes in the table, unless all are asked for."""
LEGEND = (
    "* chosen, ! does not fit (the others do). pipe, repl, shard, tens: ranks along each axis. mb: micro-batches of a "
    "step. memory: of the rank that needs the most. bubble: time in which equal stages wait for each other. work, "
    "send: seconds that the slowest rank computes and waits, and that the busiest one sends, in each step; no overlap "
    "of both is assumed. Work is computed from the measured speed of: "
)
UNTIMED = (
    "The memory is a GPU's, and no GPU is here: `work` is that of this processor, which is slower, so that sending "
    "seems to matter less. Plan on the GPU for its times."
)


def print_meshes(plan: "MeshPlan", *, everything: bool = False) -> None:
    """Print the table, the choice with its ranks and its traffic, and the line for a recipe. everything: all rows."""
    from train.planner.mesh_summary import format_mesh

    unit, _ = choose_unit(max(row.need for row in plan.rows))
    context = plan.rows[0].prediction.sizes.context
    title = (
        f"{plan.model.name}: {format_count(plan.model.parameters, billion='B')} parameters, batch "
        f"{plan.training.batch_size}, length {plan.length}, {plan.devices} ranks, "
        f"{f'context {context}, ' if context > 1 else ''}{plan.link.name}; {unit} and seconds"
    )
    rows = plan.rows if everything else select_rows(plan)
    OUT.print(make_mesh_table(plan, title, rows))
    if len(rows) < len(plan.rows):
        OUT.print(f"\n{len(rows)} of {len(plan.rows)} meshes: the fastest, and those that need less. --all shows all.")
    OUT.print(f"\n{LEGEND}{plan.rates.name}.", soft_wrap=True)
    if not plan.has_device_times:
        OUT.print(f"\n{UNTIMED}", soft_wrap=True)
    if note := describe_recomputation(plan):
        OUT.print(f"\n{note}", soft_wrap=True)
    OUT.print(f"\n{explain_mesh(plan)}", soft_wrap=True)
    if plan.chosen is not None:
        OUT.print()
        OUT.print(make_rank_table(plan.chosen))
        OUT.print(f"\n{describe_traffic(plan, plan.chosen)}", soft_wrap=True)
        OUT.print("\nIn a recipe:\n")
        OUT.print(format_mesh(plan.chosen), end="")


def select_rows(plan: "MeshPlan") -> list["MeshRow"]:
    """Select the fastest rows, and those that need less memory than all that are faster; the fastest first."""
    front = plan.find_pareto_front()[:MOST]
    chosen = [plan.chosen] if plan.chosen is not None else []
    fitting = [row for row in plan.rows if row.fits(plan.memory)]
    names: list[MeshRow] = []
    for row in (*chosen, *front, *fitting, *plan.rows):
        if row not in names and len(names) < MOST:
            names.append(row)
    return [row for row in plan.rows if row in names]


def make_mesh_table(plan: "MeshPlan", title: str, rows: "list[MeshRow] | tuple[MeshRow, ...]") -> Table:
    """Make the table of the memory and the time of each mesh."""
    columns = ("pipe", "repl", "shard", "tens", "schedule", "mb", "memory", "bubble", "work", "send", "step")
    table = make_table(title, "", *columns, right=(1, 2, 3, 4, 6, 7, 8, 9, 10, 11))
    table.padding, table.columns[0].no_wrap = (0, 1, 0, 0), True  # so that it fits 80 columns
    _, size = choose_unit(max(row.need for row in plan.rows))
    for row in rows:
        prediction, sizes = row.prediction, row.prediction.sizes
        mark = "*" if row is plan.chosen else " " if row.fits(plan.memory) else "!"
        table.add_row(
            mark,
            *map(str, (sizes.pipeline, sizes.replicate, sizes.shard, sizes.tensor)),
            prediction.schedule or "",
            str(prediction.micro_batches),
            format_size(row.need / size),
            f"{prediction.bubble:.1%}" if prediction.schedule else "",
            format_time(prediction.compute),
            format_time(row.seconds - prediction.compute),
            format_time(row.seconds),
        )
    return table


def make_rank_table(row: "MeshRow") -> Table:
    """Make the table of what each rank along the pipeline takes, by category."""
    from train.planner.mesh_plan import describe_mesh

    unit, size = choose_unit(row.need)
    title = f"{describe_mesh(row)}: each rank of the pipeline at its peak; {unit}"
    table = make_table(title, "rank", "layers", *COLUMNS, "all", right=range(0, 8))
    for number, part in enumerate(row.prediction.ranks):
        amounts = [*(part[category] for category in CATEGORIES), sum(part.values())]
        layers = str(row.prediction.layers[number]) if row.prediction.layers else "all"
        table.add_row(str(number), layers, *(f"{amount / size:.2f}" for amount in amounts))
    return table


def explain_mesh(plan: "MeshPlan") -> str:
    """Explain the choice in a sentence, or that nothing fits."""
    from train.planner.mesh_plan import describe_mesh

    budget = format_binary_bytes(plan.memory)
    if plan.chosen is None:
        least = min(plan.rows, key=lambda row: row.need)
        return (
            f"No mesh fits into {budget}: the least is {format_binary_bytes(least.need)}, with {describe_mesh(least)}. "
            f"Turn on gradient-checkpointing, take a smaller batch or length, more devices or more memory."
        )
    return (
        f"The fastest that fits into {budget}: {describe_mesh(plan.chosen)}, "
        f"{format_binary_bytes(plan.chosen.need)} a rank, {format_time(plan.chosen.seconds)} s a step."
    )


def describe_recomputation(plan: "MeshPlan") -> str:
    """Describe in a sentence what gradient checkpointing costs with a backward pass in two parts; "" without both."""
    from train.parallel.pipeline_schedules import RECOMPUTES

    if "gradient-checkpointing" not in plan.training.components().techniques:
        return ""
    flops = {(row.prediction.sizes, row.prediction.schedule): row.prediction.cost.flops for row in plan.rows}
    pairs = [(amount, flops.get((sizes, "1f1b"))) for (sizes, schedule), amount in flops.items() if schedule == "zbv"]
    times = [amount / other for amount, other in pairs if other]
    if not times:
        return ""
    return f"{RECOMPUTES}: {max(times):.1f} times the FLOPs of 1f1b, which `work` has."


def describe_traffic(plan: "MeshPlan", row: "MeshRow") -> str:
    """Describe in a sentence what the busiest rank sends along each axis in a step."""
    parts = [
        f"{format_bytes(amount)} along {axis} ({format_time(amount / plan.link.rate)} s)"
        for axis, amount in row.prediction.traffic.items()
    ]
    return f"The busiest rank sends in each step: {', '.join(parts) or 'nothing'}."


def format_time(seconds: float) -> str:
    """Format seconds in at most six characters."""
    return f"{seconds:.3f}" if seconds < 9.9995 else f"{seconds:.1f}" if seconds < 999.95 else f"{seconds:.0f}"
