"""The result of `laconic size` for people: a sentence, and the loads of one replica as a table."""

from rich.table import Table

from laconic.capacity.sizing import Sizing
from laconic.commands.console import OUT
from laconic.units import format_digits, format_percent


def print_sizing(sizing: Sizing) -> None:
    """Print the replicas in a sentence, and the loads of one replica as a table."""
    goal = f"{format_digits(sizing.rate)} requests a second with a p99 of {1e3 * sizing.p99:g} ms"
    if sizing.replicas is None:
        OUT.print(f"{goal}: no number of replicas is enough")
    else:
        low, high = sizing.replicas_range
        spread = "" if low == high else f"; {low} to {high or 'more'} by the spread of the measurements"
        total = sizing.replicas * sizing.cores
        OUT.print(f"{goal} take {sizing.replicas} replicas of {sizing.cores} cores, {total} cores in all{spread}")
    table = Table("requests per second and replica", "of its capacity", "p99, ms", "range, ms")
    for point in (*sizing.curve, *((sizing.forecast,) if sizing.replicas else ())):
        p99_range = " to ".join(format_limit(value) for value in point.p99_range)
        table.add_row(format_digits(point.rate), format_percent(point.utilization), format_limit(point.p99), p99_range)
    OUT.print(table)


def format_limit(seconds: float | None) -> str:
    """Format a time in milliseconds, or that there is none."""
    return "saturated" if seconds is None else f"{1e3 * seconds:.1f}"
