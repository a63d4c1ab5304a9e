"""The parts of a goal that an artifact does not meet, each in a sentence."""

import math
from collections.abc import Iterable, Iterator

from laconic.artifacts.artifact import Artifact
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.recipes.goal import Goal
from laconic.runtimes.product import NOT_TOLD, Product
from laconic.timing.measurements import ORIGINAL, Measurements
from laconic.units import format_bytes, format_percent, format_seconds

NAMED_PRODUCTS = 3
"""The most products of a kind outside INT8 that are named where the goal asks for more of it."""
KEPT = "exp_minus_kl"
"""The figure of a verdict that is the exponential of minus the mean divergence."""
WRITES_NOTHING = "the model writes nothing that was compared"
UNASKED_FOR = "the recipe does not quantize it"


def find_missed(artifact: Artifact, goal: Goal) -> Iterator[str]:
    """Yield a sentence for each part of the goal that the artifact does not meet, or may not meet."""
    yield from find_failures(artifact, goal)
    yield from find_doubts(artifact, goal)


def find_unlike(verdict: Verdict, goal: Goal) -> Iterator[str]:
    """Yield a sentence for each part of the goal that is about answers, and that a verdict says is not, or may not be,
    met."""
    yield from verdict.failures
    yield from find_divergence_missed(verdict.information, goal)
    for comparison in verdict.drift:
        yield from describe_doubts(comparison, goal)


def find_failures(artifact: Artifact, goal: Goal) -> Iterator[str]:
    """Yield a sentence for each part of the goal that the artifact does not meet."""
    if artifact.manifest.verdict:
        yield from artifact.manifest.verdict.failures
    if goal.max_size is not None and artifact.size > goal.max_size:
        yield f"size is {format_bytes(artifact.size)}, the goal is {format_bytes(goal.max_size)}"
    if goal.int8_share is not None:
        yield from find_int8_missed(artifact.measured, goal.int8_share)
    yield from find_writing_missed(artifact, goal)
    if goal.max_latency is None:
        return
    lone = artifact.measured.lone_latency
    if lone is None:
        yield f"latency was not measured, the goal is {format_seconds(goal.max_latency)}: the engine is not here"
    elif lone > goal.max_latency:
        yield f"latency is {format_seconds(lone)}, the goal is {format_seconds(goal.max_latency)}"


def find_writing_missed(artifact: Artifact, goal: Goal) -> Iterator[str]:
    """Yield a sentence for each part of the goal that is for models that write, and is not met."""
    verdict = artifact.manifest.verdict
    yield from find_divergence_missed(verdict.information if verdict else (), goal)
    speed = next((each for each in artifact.measured.writing if each.engine != ORIGINAL), None)
    if speed is None:
        if goal.max_first_token is not None or goal.min_tokens_per_second is not None:
            yield f"the goal limits how fast answers are written: {WRITES_NOTHING}, or its engine is not here"
        return
    if goal.max_first_token is not None and speed.first_token > goal.max_first_token:
        seconds, limit = format_seconds(speed.first_token), format_seconds(goal.max_first_token)
        yield f"time to the first token is {seconds}, the goal is {limit}"
    if goal.min_tokens_per_second is not None and speed.tokens_per_second < goal.min_tokens_per_second:
        rate, least = speed.tokens_per_second, goal.min_tokens_per_second
        yield f"the tokens behind the first come at {rate:.1f}/s, the goal is {least:g}/s"


def find_divergence_missed(information: Iterable[Comparison], goal: Goal) -> Iterator[str]:
    """Yield a sentence if the divergence among the figures of a verdict is larger than the goal's, or is not there."""
    if goal.max_divergence is None:
        return
    kept = next((each.figures[KEPT] for each in information if KEPT in each.figures), None)
    divergence = None if kept is None else -math.log(kept) if kept > 0 else math.inf
    if divergence is None:
        yield f"the goal is a divergence of {goal.max_divergence:g}: {WRITES_NOTHING}"
    elif divergence > goal.max_divergence:
        yield f"divergence of the next token is {divergence:.3g} nats, the goal is {goal.max_divergence:g}"


def find_doubts(artifact: Artifact, goal: Goal) -> Iterator[str]:
    """Yield a sentence for each part of the goal that the test samples leave in doubt."""
    for comparison in artifact.manifest.verdict.drift if artifact.manifest.verdict else ():
        yield from describe_doubts(comparison, goal)


def describe_doubts(comparison: Comparison, goal: Goal) -> Iterator[str]:
    """Yield a sentence for each figure in doubt that the goal asks for: what nobody asked for may stay in doubt."""
    asked = {"metric_change": goal.max_drop, "fidelity": goal.fidelity}
    for name in comparison.required:
        if asked.get(name) is not None and comparison.judge(name) == "inconclusive":
            yield f"{comparison.subject} against {comparison.against}: {comparison.describe(name)}"


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
