"""What was tried, and which of it nothing else beats in every respect."""

from collections.abc import Sequence

from laconic.timing.measurements import TrialRecord


def costs(trial: TrialRecord) -> tuple[float, ...]:
    """What should be small: infidelity, or the drop where there are labels; latency; size."""
    loss = trial.drop if trial.drop is not None else 1 - (trial.fidelity or 0.0)
    return loss, trial.latency, trial.size


def dominates(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether one is nowhere worse, and somewhere better."""
    pairs = list(zip(costs(one), costs(other), strict=True))
    return all(mine <= theirs for mine, theirs in pairs) and any(mine < theirs for mine, theirs in pairs)


def with_front(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The trials, the fastest first, those on the Pareto front marked. What was only foretold stands on no front."""
    measured = [trial for trial in trials if trial.measured]
    marked = [
        trial.model_copy(update={"front": trial.measured and not any(dominates(other, trial) for other in measured)})
        for trial in trials
    ]
    return tuple(sorted(marked, key=lambda trial: (not trial.measured, trial.latency, trial.name)))
