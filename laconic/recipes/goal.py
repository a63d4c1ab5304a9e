"""The goal of a recipe, and the tolerance that it requires."""

from pydantic import Field

from laconic.config import Strict
from laconic.tasks.task import Task
from laconic.tasks.tolerance import Tolerance
from laconic.units import Bytes, Seconds, Share

MARGIN = 0.6
"""The share of the allowed infidelity (1 - fidelity) that may be spent on the validation samples, since other samples
differ more: the mean infidelity of MiniLM on docstrings varied by up to 6 % between two sets of 250, that of the worst
text by more, and for texts of another kind, descriptions of datasets, it was 1.2 to 1.9 times that for docstrings."""

WORST = 10
"""How many times the mean infidelity the worst sample may have, if a goal gives the mean alone: the worst of 400 texts
had four to eight times the mean."""


MAX_DROP = 0.01
"""The largest decrease of the task's metric where there are labels, and a goal says nothing: one point."""


SMALLEST = 1e-6
"""The smallest infidelity that a default tolerance is taken to allow."""


class Goal(Strict):
    """What the result must reach. Keys that are not given require nothing, except that the task's default tolerance
    applies if no fidelity is given, and MAX_DROP where there are labels.

    fidelity, worst: the mean and the lowest fidelity over the samples (1 = identical outputs). max_drop: the largest
    decrease of the task's metric against labels, relative to the original's; the 95 % interval must keep to it as a
    whole. max_latency: seconds for one sample. max_size: bytes. int8_share: the least share of the multiply-adds of one
    sample that run in INT8. Of models that write, max_divergence: the largest mean Kullback-Leibler divergence of the
    next token's distributions from the original's, in nats; max_first_token: seconds to the first token of a lone
    answer; min_tokens_per_second: of the tokens behind it.
    """

    fidelity: Share | None = None
    worst: Share | None = None
    max_drop: Share | None = None
    max_latency: Seconds | None = None
    max_size: Bytes | None = None
    max_divergence: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_first_token: Seconds | None = None
    min_tokens_per_second: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    int8_share: Share | None = None


def find_max_drop(goal: Goal) -> float:
    """Return the largest decrease of the metric that a goal allows where there are labels."""
    return MAX_DROP if goal.max_drop is None else goal.max_drop


def required_tolerance(task: Task, goal: Goal) -> Tolerance:
    """Return the fidelity that the artifact must reach: the goal's, or else the task's default tolerance.

    A goal that allows more infidelity than the default allows its agreements as many times more; one that allows less
    leaves them as they are.
    """
    default = task.tolerance
    if task.measures_perplexity:
        default = default.model_copy(update={"max_divergence": goal.max_divergence})
    if goal.fidelity is None:
        return default if goal.worst is None else default.model_copy(update={"worst": goal.worst})
    derived = None if default.worst is None else max(1 - WORST * (1 - goal.fidelity), 0.0)
    slack = max((1 - goal.fidelity) / max(1 - default.mean, SMALLEST), 1.0)
    worst = derived if goal.worst is None else goal.worst
    return default.model_copy(update={"mean": goal.fidelity, "worst": worst, "slack": slack})


def tighten(goal: Tolerance, margin: float = MARGIN) -> Tolerance:
    """Return a stricter tolerance for choices made on validation samples, so that unseen samples meet the real one. A
    worst of 0 requires nothing and is kept."""
    worst = 1 - margin * (1 - goal.worst) if goal.worst else goal.worst
    limit = goal.max_divergence and margin * goal.max_divergence
    return goal.model_copy(update={"mean": 1 - margin * (1 - goal.mean), "worst": worst, "max_divergence": limit})
