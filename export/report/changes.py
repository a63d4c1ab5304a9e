"""What the stages changed and what a search tried, written for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from export.report.charts import plot_fidelity, plot_pareto_front, plot_sizes
from laconic.artifacts.gain import duration, nines
from laconic.artifacts.ledger import Entry, brief, cells
from laconic.timing.measurements import TrialRecord


@dataclass(frozen=True)
class Changes:
    """What each stage gained and cost. rows: stage, its settings, its cells by name, its time. pictures: with captions;
    none where there is but one stage to show."""

    rows: Sequence[tuple[str, str, Mapping[str, str], str]]
    pictures: Sequence[tuple[str, Markup]]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "Changes":
        """From a ledger."""
        rows = [
            (
                entry.stage,
                brief(entry.config),
                cells(entry),
                "" if entry.seconds is None else duration(entry.seconds),
            )
            for entry in entries
        ]
        if len(entries) < 3:
            return cls(rows, ())
        sizes, faith = Markup(plot_sizes(entries)), Markup(plot_fidelity(entries))  # noqa: S704
        return cls(rows, (("What is left of the model as it came", sizes), ("Fidelity after each stage", faith)))


@dataclass(frozen=True)
class SearchTable:
    """What a search has tried. rows: each trial with its figure of harm. harm: what that figure is called."""

    rows: Sequence[tuple[TrialRecord, str]]
    harm: str
    picture: Markup


def summarize_search(trials: Sequence[TrialRecord], metric: str) -> SearchTable:
    """The table and the picture of a search, the front first. metric: what the task's figure is called."""
    built = [trial for trial in trials if trial.measured] or trials
    drops = all(trial.drop is not None for trial in built)
    rows = []
    for trial in sorted(trials, key=lambda trial: (not trial.front, not trial.measured, -trial.speedup)):
        value = trial.drop if drops else trial.fidelity
        rows.append((trial, "" if value is None else f"{100 * value:+.2f}" if drops else nines(value)))
    harm = f"drop of the {metric}, points" if drops else "fidelity"
    return SearchTable(rows, harm, Markup(plot_pareto_front(trials, drops=drops)))  # noqa: S704
