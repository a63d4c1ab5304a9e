"""Validation: compares the artifact with the original, and each step that must not change outputs, for a verdict."""

from export.validation.drift import compare_by_kind, compare_outputs
from export.validation.evidence import Evidence
from export.validation.figures import describe_tolerance, round_figure
from export.validation.information import compare_information
from laconic.arrays import Arrays
from laconic.artifacts.golden import GOLDEN_AGREEMENT
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.recipes.goal import Goal, find_max_drop
from laconic.tasks.answer_comparison import AnswerComparison
from laconic.tasks.fidelity import measure_fidelity
from laconic.tasks.tolerance import Tolerance

ENGINE_TOLERANCE = Tolerance(mean=0.99, worst=0.9)
"""The fidelity that is enough for an engine to the graph run node by node, where a goal asks for more than this of the
artifact. Engines round in other places, and in BF16: 0.9991 for MiniLM's vectors, 0.986 for a random ELECTRA whose
classes are near a tie. A wrong kernel or a lost scale is far worse."""

BATCH_FIDELITY = 0.9999
BATCH_WORST = 0.999
"""The least fidelity, mean and worst, of batched outputs to unbatched ones. Static INT8 gives 1 and 1; with float
attention, where sums differ in the last bit and a value may round to the other side, 0.999995 and 0.9998; dynamic INT8
0.99 and 0.945: such an artifact is served one sample at a time."""


def validate(evidence: Evidence, task: AnswerComparison, tolerance: Tolerance, goal: Goal, seed: int) -> Verdict:
    """Compare the collected outputs and return the verdict. tolerance: the required fidelity.

    By reference execution there is no engine to compare with the graph.
    """
    parity = [
        Comparison(
            check="batch",
            subject="answer in a batch",
            against="answer alone",
            samples=count_samples(evidence.alone),
            figures=fidelity_of(task, evidence.alone, evidence.together),
        ),
    ]
    if not evidence.reference:
        engine = Comparison(
            check="engine",
            subject="engine",
            against="graph run node by node",
            samples=count_samples(evidence.plain),
            figures=fidelity_of(task, evidence.plain, evidence.alone)
            | {GOLDEN_AGREEMENT: round_figure(evidence.golden_agreement)},
            required=describe_tolerance(engine_tolerance(tolerance)),
        )
        parity.insert(0, engine)
    if evidence.deviation is not None:
        error, node, exactness = evidence.deviation
        captured = Comparison(
            check="capture",
            subject=f"float graph, from node {node!r} on," if node else "float graph",
            against="source",
            samples=0,
            figures={"exactness": round(1 - error, 9)},
            required={"exactness": exactness},
        )
        parity.insert(0, captured)
    whole, *information = compare_with_original(evidence, task, tolerance, goal, seed)
    fidelity = measure_fidelity(task, evidence.original, evidence.artifact)
    kinds = compare_by_kind(fidelity, evidence.kinds, evidence.original_name)
    return Verdict(parity=tuple(parity), drift=(whole, *kinds), information=tuple(information))


def compare_with_original(
    evidence: Evidence, task: AnswerComparison, tolerance: Tolerance, goal: Goal, seed: int
) -> tuple[Comparison, ...]:
    """Compare the artifact's answers to the test samples with the original's, and with labels where there are any: as a
    whole first, and then by what they say."""
    whole = compare_outputs(
        task,
        evidence.original,
        evidence.artifact,
        evidence.labels,
        tolerance=tolerance,
        max_drop=find_max_drop(goal),
        per_row=evidence.per_row,
        seed=seed,
    )
    names = {
        "subject": "artifact, by reference execution" if evidence.reference else "artifact",
        "against": f"{evidence.original_name}, on {evidence.basis}" if evidence.basis else evidence.original_name,
    }
    information = compare_information(
        task, evidence.original, evidence.artifact, evidence.labels, tolerance, describe=evidence.describe
    )
    return (whole.model_copy(update=names), *information)


def engine_tolerance(tolerance: Tolerance) -> Tolerance:
    """The required fidelity of the engine to the graph run node by node: what the goal requires of the artifact, but
    not more than ENGINE_TOLERANCE. The search looks at it, too, so that no artifact is chosen that fails it."""
    worst = None if tolerance.worst is None else min(tolerance.worst, ENGINE_TOLERANCE.worst or 0.0)
    return Tolerance(mean=min(tolerance.mean, ENGINE_TOLERANCE.mean), worst=worst)


def is_batch_independent(verdict: Verdict) -> bool:
    """Whether a sample's output does not depend on the other samples of its batch."""
    check = verdict.find_check("batch")
    assert check is not None
    figures = check.figures
    return figures["fidelity"] >= BATCH_FIDELITY and figures["fidelity_worst"] >= BATCH_WORST


def fidelity_of(task: AnswerComparison, reference: Arrays, found: Arrays) -> dict[str, float]:
    """Mean and worst fidelity."""
    fidelity = measure_fidelity(task, reference, found)
    return {"fidelity": round_figure(fidelity.mean()), "fidelity_worst": round_figure(fidelity.min())}


def count_samples(arrays: Arrays) -> int:
    """The number of samples in outputs by name."""
    return len(next(iter(arrays.values())))
