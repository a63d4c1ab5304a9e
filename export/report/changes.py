"""What the stages changed and what a search tried, written for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from export.report.charts import faithful, front, left
from laconic.artifacts.ledger import StageEntry, format_config, format_entry
from laconic.timing.measurements import Trial
from laconic.units import format_duration, format_fidelity


@dataclass(frozen=True)
class Changes:
    """What each stage gained and cost. rows: stage, its settings, its cells by name, its time. pictures: with captions;
    none where there is but one stage to show."""

    rows: Sequence[tuple[str, str, Mapping[str, str], str]]
    pictures: Sequence[tuple[str, Markup]]

    @classmethod
    def of(cls, entries: Sequence[StageEntry]) -> "Changes":
        """From a ledger."""
        rows = [
            (
                entry.stage,
                format_config(entry.config),
                format_entry(entry),
                "" if entry.seconds is None else format_duration(entry.seconds),
            )
            for entry in entries
        ]
        if len(entries) < 3:
            return cls(rows, ())
        sizes, faith = Markup(left(entries)), Markup(faithful(entries))  # noqa: S704
        return cls(rows, (("What is left of the model as it came", sizes), ("Fidelity after each stage", faith)))


@dataclass(frozen=True)
class Searched:
    """What a search has tried. rows: each trial with its figure of harm. harm: what that figure is called."""

    rows: Sequence[tuple[Trial, str]]
    harm: str
    picture: Markup


def searched(trials: Sequence[Trial], metric: str) -> Searched:
    """The table and the picture of a search, the front first. metric: what the task's figure is called."""
    built = [trial for trial in trials if trial.measured] or trials
    drops = all(trial.drop is not None for trial in built)
    rows = []
    for trial in sorted(trials, key=lambda trial: (not trial.front, not trial.measured, -trial.speedup)):
        value = trial.drop if drops else trial.fidelity
        rows.append((trial, "" if value is None else f"{100 * value:+.2f}" if drops else format_fidelity(value)))
    harm = f"drop of the {metric}, points" if drops else "fidelity"
    return Searched(rows, harm, Markup(front(trials, drops=drops)))  # noqa: S704
