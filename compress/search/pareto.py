"""The Pareto front of the trials."""

from collections.abc import Sequence

from laconic.timing.measurements import TrialRecord


def objectives(trial: TrialRecord) -> tuple[float, ...]:
    """The minimized objectives: the drop (the infidelity without labels), latency and size."""
    loss = trial.drop if trial.drop is not None else 1 - (trial.fidelity or 0.0)
    return loss, trial.latency, trial.size


def dominates(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether one trial is worse in no objective and better in at least one."""
    pairs = list(zip(objectives(one), objectives(other), strict=True))
    return all(mine <= theirs for mine, theirs in pairs) and any(mine < theirs for mine, theirs in pairs)


def mark_front(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The trials with those on the Pareto front marked, measured ones first, then by latency.

    Trials that were only predicted are never on the front.
    """
    measured = [trial for trial in trials if trial.measured]
    marked = [
        trial.model_copy(update={"front": trial.measured and not any(dominates(other, trial) for other in measured)})
        for trial in trials
    ]
    return tuple(sorted(marked, key=lambda trial: (not trial.measured, trial.latency, trial.name)))
