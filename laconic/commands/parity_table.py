"""Console table of the parity ledger."""

from collections.abc import Iterator

from laconic.artifacts.parity_ledger import ParityLedger, ParityRow
from laconic.artifacts.verdict import Comparison
from laconic.commands.console import OUT, make_table
from laconic.units import format_fidelity

NO_BOUND = (
    "The samples are made up, and the artifact was made with others: how much fidelity compression and quantization "
    "lose on them is shown, and not required. Give --data."
)


def print_ledger(ledger: ParityLedger) -> None:
    """Print each step with its comparisons, and below the table what ran and where it diverges."""
    table = make_table(
        f"{ledger.artifact}: {ledger.samples} samples, one at a time ({ledger.data})",
        *("", "step", "against", "mean", "worst", "required"),
        right=(3, 4),
    )
    for row in ledger.rows:
        if not row.comparisons:
            table.add_row("FAILED" if row.refused else "", row.step)
        for number, comparison in enumerate(row.comparisons):
            table.add_row(format_state(comparison), "" if number else row.step, *format_comparison(comparison))
    OUT.print(table)
    OUT.print()
    for row in ledger.rows:
        for sentence in list_sentences(row):
            OUT.print(f"{row.step}: {sentence}", soft_wrap=True)
    if not ledger.bounded:
        OUT.print(f"\n{NO_BOUND}", soft_wrap=True)


def format_state(comparison: Comparison) -> str:
    """Format whether a comparison passed; empty where nothing is required."""
    if not comparison.passed:
        return "FAILED"
    return "ok" if comparison.required else ""


def format_comparison(comparison: Comparison) -> tuple[str, str, str, str]:
    """Format the step that is compared with, mean and worst fidelity, and what is required."""
    figures = comparison.figures
    return (
        comparison.against,
        format_fidelity(figures["fidelity"]),
        format_fidelity(figures["fidelity_worst"]),
        ", ".join(format_requirement(comparison, name) for name in comparison.required),
    )


def format_requirement(comparison: Comparison, name: str) -> str:
    """Format the least value of a figure, with the value that was found where that has no column."""
    least = f"{comparison.required[name]:.6g}"
    short = {"fidelity": "mean", "fidelity_worst": "worst"}.get(name)
    return f"{short} {least}" if short else f"{name} {least}, is {comparison.figures[name]:.6g}"


def list_sentences(row: ParityRow) -> Iterator[str]:
    """Say what ran, or why nothing did; and where the step diverges from the one before it."""
    if row.skipped:
        yield f"left out, {row.skipped}"
    else:
        yield row.ran
    if row.refused:
        yield row.refused
    if row.divergence is not None:
        yield row.divergence.says
