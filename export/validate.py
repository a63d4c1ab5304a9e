"""Validation: compares the artifact with the original, with confidence intervals, and gives a verdict."""

from collections.abc import Iterator

import numpy as np

from export.evidence import Evidence
from laconic.arrays import Array, Arrays
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.verdict import ENGINE, Comparison, Verdict
from laconic.metrics import bootstrap_interval
from laconic.recipes.goal import Goal
from laconic.runtimes.product import NOT_TOLD, Product
from laconic.tasks.task import Task, Tolerance
from laconic.timing.measurements import Measurements
from laconic.units import format_bytes, format_percent, format_seconds

CAPTURE_EXACTNESS = 1 - 1e-4
"""1 minus the largest allowed error of the captured graph, relative to the largest output. FP32 sums in another order
differ by 1e-6."""

ENGINE_TOLERANCE = Tolerance(mean=0.99, worst=0.9)
"""The fidelity that is enough for an engine to the graph run node by node, where a goal asks for more than this of the
artifact. Engines round in other places, and in BF16: 0.9991 for MiniLM's vectors, 0.986 for a random ELECTRA whose
classes are near a tie. A wrong kernel or a lost scale is far worse."""

BATCH_FIDELITY = 0.9999
BATCH_WORST = 0.999
"""The least fidelity, mean and worst, of batched outputs to unbatched ones. Static INT8 gives 1 and 1; with float
attention, where sums differ in the last bit and a value may round to the other side, 0.999995 and 0.9998; dynamic INT8
0.99 and 0.945: such an artifact is served one sample at a time."""


NAMED_PRODUCTS = 3
"""The most products of a kind outside INT8 that are named where the goal asks for more of it."""
UNASKED_FOR = "the recipe does not quantize it"

KIND_SAMPLES = 10
"""The fewest samples of a kind that are compared on their own."""


def validate(evidence: Evidence, task: Task, tolerance: Tolerance, goal: Goal, seed: int) -> Verdict:
    """Compare the collected outputs and return the verdict. tolerance: the required fidelity.

    By reference execution there is no engine to compare with the graph.
    """
    parity = [
        Comparison(
            subject="answer in a batch",
            against="answer alone",
            samples=count_samples(evidence.alone),
            figures=fidelity_of(task, evidence.alone, evidence.together),
        ),
    ]
    if not evidence.reference:
        engine = Comparison(
            subject=ENGINE,
            against="graph run node by node",
            samples=count_samples(evidence.plain),
            figures=fidelity_of(task, evidence.plain, evidence.alone),
            required=describe_tolerance(engine_tolerance(tolerance)),
        )
        parity.insert(0, engine)
    if evidence.capture_error is not None:
        captured = Comparison(
            subject="captured graph",
            against="checkpoint",
            samples=0,
            figures={"exactness": round(1 - evidence.capture_error, 9)},
            required={"exactness": CAPTURE_EXACTNESS},
        )
        parity.insert(0, captured)
    whole = compare_with_original(evidence, task, tolerance, goal, seed)
    return Verdict(parity=tuple(parity), drift=(whole, *compare_by_kind(evidence, task)))


def engine_tolerance(tolerance: Tolerance) -> Tolerance:
    """The required fidelity of the engine to the graph run node by node: what the goal requires of the artifact, but
    not more than ENGINE_TOLERANCE. The search looks at it, too, so that no artifact is chosen that fails it."""
    worst = None if tolerance.worst is None else min(tolerance.worst, ENGINE_TOLERANCE.worst or 0.0)
    return Tolerance(mean=min(tolerance.mean, ENGINE_TOLERANCE.mean), worst=worst)


def describe_tolerance(tolerance: Tolerance) -> dict[str, float]:
    """The figures that a tolerance requires, by name; 0 requires nothing."""
    required = {"fidelity": tolerance.mean, "fidelity_worst": tolerance.worst}
    return {name: value for name, value in required.items() if value}


def is_batch_independent(verdict: Verdict) -> bool:
    """Whether a sample's output does not depend on the other samples of its batch."""
    comparison = next(each for each in verdict.parity if each.subject == "answer in a batch")
    figures = comparison.figures
    return figures["fidelity"] >= BATCH_FIDELITY and figures["fidelity_worst"] >= BATCH_WORST


def compare_with_original(evidence: Evidence, task: Task, tolerance: Tolerance, goal: Goal, seed: int) -> Comparison:
    """Compare the artifact with the original on samples that no choice was made by."""
    fidelity = task.fidelity(evidence.original, evidence.artifact)
    samples = len(fidelity)
    figures = fidelity_of(task, evidence.original, evidence.artifact)
    figures |= {name: round_figure(value) for name, value in task.figures(evidence.original, evidence.artifact).items()}
    intervals = {"fidelity": bootstrap_interval(lambda index: float(fidelity[index].mean()), samples, seed=seed)}
    required = describe_tolerance(tolerance)
    if evidence.labels is not None:
        before, after = (task.scorer(each, evidence.labels) for each in (evidence.original, evidence.artifact))
        every = np.arange(samples)
        figures["metric_original"], figures["metric"] = round_figure(before(every)), round_figure(after(every))
        figures["metric_change"] = round_figure(after(every) - before(every))
        intervals["metric_change"] = bootstrap_interval(lambda index: after(index) - before(index), samples, seed=seed)
        if goal.max_drop is not None:
            required["metric_change"] = -goal.max_drop
    against = ("original", *(["on made-up samples"] if evidence.made_up else []))
    return Comparison(
        subject="artifact, by reference execution" if evidence.reference else "artifact",
        against=", ".join(against),
        samples=samples,
        figures=figures,
        intervals={name: (round_figure(low), round_figure(high)) for name, (low, high) in intervals.items()},
        required=required,
    )


def compare_by_kind(evidence: Evidence, task: Task) -> Iterator[Comparison]:
    """Compare the artifact with the original on each kind of test sample that has at least KIND_SAMPLES."""
    fidelity = task.fidelity(evidence.original, evidence.artifact)
    kinds = np.array(evidence.kinds)
    for kind in sorted(set(evidence.kinds)):
        own = fidelity[kinds == kind]
        if len(own) < KIND_SAMPLES:
            continue
        yield Comparison(
            subject=f"artifact on {kind!r}" if kind else "artifact on the other samples",
            against="original",
            samples=len(own),
            figures={
                "fidelity": round_figure(own.mean()),
                "fidelity_p5": round_figure(np.quantile(own, 0.05)),
                "fidelity_worst": round_figure(own.min()),
            },
        )


def find_missed(artifact: Artifact, goal: Goal) -> Iterator[str]:
    """Yield a sentence for each part of the goal that the artifact does not meet."""
    if artifact.manifest.verdict:
        yield from artifact.manifest.verdict.failures
    if goal.max_size is not None and artifact.size > goal.max_size:
        yield f"size is {format_bytes(artifact.size)}, the goal is {format_bytes(goal.max_size)}"
    if goal.int8_share is not None:
        yield from find_int8_missed(artifact.measured, goal.int8_share)
    if goal.max_latency is None:
        return
    lone = artifact.measured.lone_latency
    if lone is None:
        yield f"latency was not measured, the goal is {format_seconds(goal.max_latency)}: the engine is not here"
    elif lone > goal.max_latency:
        yield f"latency is {format_seconds(lone)}, the goal is {format_seconds(goal.max_latency)}"


def find_int8_missed(measured: Measurements, required: float) -> Iterator[str]:
    """Yield a sentence if less than the required share of the multiply-adds runs in INT8, naming the products that do
    not, by what they run in and why, those with the most multiply-adds first."""
    shares = measured.multiply_adds
    if not shares:
        goal, why = format_percent(required), measured.why_not_audited
        yield f"the share of the multiply-adds in INT8 is not known, the goal is {goal}: {why}"
        return
    found = shares.get("int8", 0.0)
    if found >= required:
        return
    total = sum(each.multiply_adds for each in measured.products)
    groups: dict[tuple[str, str], list[Product]] = {}
    for each in sorted(measured.products, key=lambda each: -each.multiply_adds):
        if each.runs != "int8":
            groups.setdefault((each.runs or NOT_TOLD, each.reason or UNASKED_FOR), []).append(each)
    named = []
    for (runs, reason), group in groups.items():
        nodes = ", ".join(each.node for each in group[:NAMED_PRODUCTS])
        more = f" and {len(group) - NAMED_PRODUCTS} more" if len(group) > NAMED_PRODUCTS else ""
        share = format_percent(sum(each.multiply_adds for each in group) / total)
        named.append(f"{nodes}{more} ({share}) in {runs}, as {reason}")
    goal = format_percent(required)
    yield f"{format_percent(found)} of the multiply-adds run in INT8, the goal is {goal}: {'; '.join(named)}"


def fidelity_of(task: Task, reference: Arrays, found: Arrays) -> dict[str, float]:
    """Mean and worst fidelity."""
    fidelity: Array = task.fidelity(reference, found)
    return {"fidelity": round_figure(fidelity.mean()), "fidelity_worst": round_figure(fidelity.min())}


def count_samples(arrays: Arrays) -> int:
    """The number of samples in outputs by name."""
    return len(next(iter(arrays.values())))


def round_figure(value: float) -> float:
    """Round to six decimals: later ones are noise, and differ between processors."""
    return round(float(value), 6)
