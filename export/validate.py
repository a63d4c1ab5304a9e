"""The verdict: what the artifact is compared with, in which figures, and how sure they are."""

import numpy as np

from export.evidence import Evidence
from laconic.artifacts.verdict import ENGINE, Comparison, Verdict
from laconic.metrics import bootstrap_interval
from laconic.recipes.goal import WORST
from laconic.recipes.recipe import Goal
from laconic.tasks.task import Task, Tolerance
from laconic.tensor import Array, Arrays

CAPTURE_EXACTNESS = 1 - 1e-4
"""1 minus the largest error of the captured graph, relative to the largest output. FP32 sums in another order differ
by 1e-6."""

ENGINE_FIDELITY = 0.99
ENGINE_SHARE = 0.2
"""The least fidelity, mean, of an engine to the graph run node by node; and the share of the infidelity that is allowed
which may be the engine's, where that is more. It rounds at other places, and in BF16: 0.9991 for MiniLM's vectors,
0.988 for a classifier whose classes are near a tie, where 0.85 was asked for. A wrong kernel or a lost scale does far
worse."""

BATCH_FIDELITY = 0.9999
BATCH_WORST = 0.999
"""The least fidelity, mean and worst, of an answer given in company to the same given alone. Static INT8 gives 1 and 1;
beside float attention, where sums change in their last bit and a rounding turns over, 0.999995 and 0.9998; dynamic INT8
0.99 and 0.945: such an artifact is served one sample at a time."""


def validate(evidence: Evidence, task: Task, tolerance: Tolerance, goal: Goal, seed: int) -> Verdict:
    """Compare, and say what came out. tolerance: the fidelity asked for."""
    parity = [
        Comparison(
            subject=ENGINE,
            against="graph run node by node",
            samples=rows(evidence.plain),
            figures=fidelity_of(task, evidence.plain, evidence.alone),
            required=engine_fidelity(tolerance),
        ),
        Comparison(
            subject="answer in a batch",
            against="answer alone",
            samples=rows(evidence.alone),
            figures=fidelity_of(task, evidence.alone, evidence.together),
        ),
    ]
    if evidence.capture_error is not None:
        captured = Comparison(
            subject="captured graph",
            against="checkpoint",
            samples=0,
            figures={"exactness": round(1 - evidence.capture_error, 9)},
            required={"exactness": CAPTURE_EXACTNESS},
        )
        parity.insert(0, captured)
    return Verdict(parity=tuple(parity), drift=(drift(evidence, task, tolerance, goal, seed),))


def engine_fidelity(tolerance: Tolerance) -> dict[str, float]:
    """What is required of the engine, mean and worst, where so much infidelity is allowed."""
    mean = min(ENGINE_FIDELITY, 1 - ENGINE_SHARE * (1 - tolerance.mean))
    return {"fidelity": rounded(mean), "fidelity_worst": rounded(max(1 - WORST * (1 - mean), 0.0))}


def is_batch_independent(verdict: Verdict) -> bool:
    """Whether an answer does not depend on who shares its batch."""
    comparison = next(each for each in verdict.parity if each.subject == "answer in a batch")
    figures = comparison.figures
    return figures["fidelity"] >= BATCH_FIDELITY and figures["fidelity_worst"] >= BATCH_WORST


def drift(evidence: Evidence, task: Task, tolerance: Tolerance, goal: Goal, seed: int) -> Comparison:
    """The artifact against the original, on samples that no choice has seen."""
    fidelity = task.fidelity(evidence.original, evidence.artifact)
    samples = len(fidelity)
    figures = fidelity_of(task, evidence.original, evidence.artifact)
    figures |= {name: rounded(value) for name, value in task.figures(evidence.original, evidence.artifact).items()}
    intervals = {"fidelity": bootstrap_interval(lambda index: float(fidelity[index].mean()), samples, seed=seed)}
    required = {"fidelity": tolerance.mean}
    if tolerance.worst is not None:
        required["fidelity_worst"] = tolerance.worst
    if evidence.labels is not None:
        before, after = (task.scorer(each, evidence.labels) for each in (evidence.original, evidence.artifact))
        every = np.arange(samples)
        figures["metric_original"], figures["metric"] = rounded(before(every)), rounded(after(every))
        figures["metric_change"] = rounded(after(every) - before(every))
        intervals["metric_change"] = bootstrap_interval(lambda index: after(index) - before(index), samples, seed=seed)
        if goal.max_drop is not None:
            required["metric_change"] = -goal.max_drop
    return Comparison(
        subject="artifact",
        against="original, on made-up samples" if evidence.made_up else "original",
        samples=samples,
        figures=figures,
        intervals={name: (rounded(low), rounded(high)) for name, (low, high) in intervals.items()},
        required=required,
    )


def fidelity_of(task: Task, reference: Arrays, found: Arrays) -> dict[str, float]:
    """Mean and worst."""
    fidelity: Array = task.fidelity(reference, found)
    return {"fidelity": rounded(fidelity.mean()), "fidelity_worst": rounded(fidelity.min())}


def rows(arrays: Arrays) -> int:
    """How many samples were answered."""
    return len(next(iter(arrays.values())))


def rounded(value: float) -> float:
    """Six digits behind the point: what lies beyond means nothing, and differs between processors."""
    return round(float(value), 6)
