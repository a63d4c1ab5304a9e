"""The estimated duration of a training run, reported once, after its first steps."""

from collections.abc import Callable

from train.callbacks.callback import RunLog, StepReport

TIMED, ENOUGH, LIMIT = 3, 1.0, 5.0
"""The fewest steps to time, and the fewest seconds that they must take; after LIMIT seconds, fewer steps are enough."""

ReportPace = Callable[[float, int], None]
"""A function that takes the seconds of a step and the number of steps left."""


class RunEstimate(RunLog):
    """Times the first steps of a run, except for the very first, which warms up, and reports their mean."""

    def __init__(self, total: int, report: ReportPace, *, start: int = 0) -> None:
        """total: steps of the whole run. start: steps done before it was resumed."""
        self._total, self._report, self._start = total, report, start
        self._seconds: list[float] = []
        self._is_reported = False

    def step(self, report: StepReport) -> None:
        """Count a step, and report the pace when enough were timed and some are left."""
        if self._is_reported or report.step <= self._start + 1:
            return
        self._seconds.append(report.seconds)
        spent, count = sum(self._seconds), len(self._seconds)
        if (count >= TIMED and spent >= ENOUGH) or spent >= LIMIT:
            self._is_reported = True
            if report.step < self._total:
                self._report(spent / count, self._total - report.step)


def format_estimate(seconds: float, left: int, evaluating: float = 0.0) -> str:
    """Format the remaining time of a run: "about 12 min: 690 steps of 1.04 s, and 9 s of evaluations".

    seconds: of a step. left: number of steps. evaluating: seconds of the evaluations to come.
    """
    whole = seconds * left + evaluating
    about = f"{whole:.0f} s" if whole < 90 else f"{whole / 60:.0f} min" if whole < 5400 else f"{whole / 3600:.1f} h"
    evaluations = f", and {evaluating:.0f} s of evaluations" if evaluating >= 0.5 else ""
    return f"about {about}: {left} steps of {seconds:.2f} s{evaluations}"
