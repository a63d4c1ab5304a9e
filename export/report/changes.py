"""The report's sections about the stages and about the trials of a search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from export.report.charts import plot_fidelity, plot_pareto_front, plot_sizes
from laconic.artifacts.ledger import DIVERGENCE, StageEntry, format_config, format_entry
from laconic.timing.measurements import TrialRecord
from laconic.units import format_duration, format_fidelity


@dataclass(frozen=True)
class Changes:
    """Sizes and fidelity after each stage. rows: stage, settings, table cells by name, duration. pictures: captions and
    SVG; none for a single stage. has_divergence: whether the model writes, and its divergence was measured."""

    rows: Sequence[tuple[str, str, Mapping[str, str], str]]
    pictures: Sequence[tuple[str, Markup]]
    has_divergence: bool = False

    @classmethod
    def of(cls, entries: Sequence[StageEntry]) -> "Changes":
        """Make the section from the entries of a ledger."""
        rows = [
            (
                entry.stage,
                format_config(entry.config),
                format_entry(entry),
                "" if entry.seconds is None else format_duration(entry.seconds),
            )
            for entry in entries
        ]
        diverges = any(DIVERGENCE in entry.figures for entry in entries)
        if len(entries) < 3:
            return cls(rows, (), diverges)
        sizes, faith = Markup(plot_sizes(entries)), Markup(plot_fidelity(entries))  # noqa: S704
        pictures = ("Size after each stage, relative to the source", sizes), ("Fidelity after each stage", faith)
        return cls(rows, pictures, diverges)


@dataclass(frozen=True)
class SearchTable:
    """The trials of a search. rows: each trial with its quality figure. quality: the name of that figure."""

    rows: Sequence[tuple[TrialRecord, str]]
    quality: str
    picture: Markup


def summarize_search(trials: Sequence[TrialRecord], metric: str) -> SearchTable:
    """Make the table and the plot of a search, the Pareto front first. metric: the name of the task's metric."""
    built = [trial for trial in trials if trial.measured] or trials
    drops = all(trial.drop is not None for trial in built)
    rows = []
    for trial in sorted(trials, key=lambda trial: (not trial.front, not trial.measured, -trial.speedup)):
        value = trial.drop if drops else trial.fidelity
        rows.append((trial, "" if value is None else f"{100 * value:+.2f}" if drops else format_fidelity(value)))
    quality = f"drop of the {metric}, points" if drops else "fidelity"
    return SearchTable(rows, quality, Markup(plot_pareto_front(trials, drops=drops)))  # noqa: S704
