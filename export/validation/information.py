"""Whether an artifact's answers say what the original's do: a mean similarity can be 0.99 for a constant answer."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from export.validation.evidence import Describe, describe_test_sample
from export.validation.figures import round_figure, round_interval
from export.validation.intervals import CONFIDENCE, find_share_interval
from laconic.arrays import Arrays
from laconic.artifacts.verdict import Comparison
from laconic.tasks.agreement import ALL, Agreement
from laconic.tasks.answer_comparison import AnswerComparison
from laconic.tasks.fidelity import FiniteOutputs, make_finite
from laconic.tasks.tolerance import LOWEST_AGREEMENT, Tolerance

SKILL_LEAST = 0.8
"""The least share that an artifact makes good of what the best answer without information lacks."""
ALIKE = 1e-9
"""Where a null answer lacks less fidelity, the original answers all samples alike."""
SHOWN = 5
"""The most agreements of one name that are kept of those that hold: the lowest."""


class Chance(NamedTuple):
    """The fidelity that answers without information have. name: of the best of them."""

    name: str
    fidelity: float


def measure_chance(task: AnswerComparison, reference: Arrays) -> Chance:
    """Measure the fidelity of the best null answer to these outputs of the original, [samples, ...] by name."""
    reference = make_finite(reference, reference).reference
    nulls = task.null_answers(reference).items()
    fidelities = (Chance(name, float(task.fidelity(reference, answers).mean())) for name, answers in nulls)
    return max(fidelities, key=itemgetter(1))


def compare_information(
    task: AnswerComparison,
    reference: Arrays,
    candidate: Arrays,
    labels: Sequence[Any] | None,
    tolerance: Tolerance,
    chance: Chance | None = None,
    describe: Describe = describe_test_sample,
) -> tuple[Comparison, ...]:
    """Compare what two models' answers to the same samples say. reference, candidate: [samples, ...] by name; the
    original's and the artifact's. labels: of the samples, where there are any. chance: of these samples, if it was
    measured before. describe: says where a sample comes from.

    A figure fails only where it is too low beyond doubt: few samples are of each class.
    """
    outputs = make_finite(reference, candidate)
    broken = tuple(compare_finite(outputs, describe))
    skill = compare_skill(task, outputs, tolerance, chance or measure_chance(task, reference))
    agreements = list(task.agreements(outputs.reference, outputs.candidate, labels))
    return (*broken, skill, *select_lowest(compare_agreements(agreements, len(outputs.is_broken), tolerance)))


def measure_information_loss(
    task: AnswerComparison,
    reference: Arrays,
    candidate: Arrays,
    labels: Sequence[Any] | None,
    chance: Chance,
    margin: float,
) -> float:
    """How many times as much information is lost as the default tolerance allows: the slack that a tolerance must have
    for these answers to pass; infinite where none would do. Arguments as of `compare_information`.

    margin: the share of the allowed loss that may be spent, of figures that no interval gives the benefit of the doubt.
    """
    default = Tolerance(mean=0.0)
    lost = [0.0]
    for comparison in compare_information(task, reference, candidate, labels, default, chance):
        for name, least in comparison.required.items():
            highest = comparison.intervals.get(name, (0.0, comparison.figures[name]))[1]
            allowed = (1 - least) * (1.0 if name in comparison.intervals else margin)
            hopeless = not highest >= min(LOWEST_AGREEMENT, least)
            lost.append(math.inf if hopeless else max(1 - highest, 0.0) / allowed if allowed else 0.0)
    return max(lost)


def compare_finite(outputs: FiniteOutputs, describe: Describe) -> Iterator[Comparison]:
    """Yield a failure for each output with numbers that are not finite, naming the first of the samples."""
    for name, broken in outputs.broken.items():
        if broken.any():
            yield Comparison(
                subject=f"output {name!r}, NaN or infinite for {describe(int(broken.argmax()))},",
                against="original",
                samples=len(broken),
                figures={"finite": round_figure(1 - broken.mean())},
                required={"finite": 1.0},
            )


def compare_skill(task: AnswerComparison, outputs: FiniteOutputs, tolerance: Tolerance, chance: Chance) -> Comparison:
    """Compare the artifact's fidelity with that of the best null answer (a skill score; Murphy, Monthly Weather Review
    116, 1988): 1 for the original's answers, 0 for answers without information, as explained variance and Cohen's kappa
    are."""
    lacking = 1 - chance.fidelity
    fidelity = np.where(outputs.is_broken, 0.0, task.fidelity(outputs.reference, outputs.candidate))
    # Where the original answers all samples alike, nothing tells an answer to one from an answer to another.
    alike = lacking <= ALIKE
    skill = 0.0 if alike else 1 - (1 - float(fidelity.mean())) / lacking
    return Comparison(
        subject="artifact of an original that answers all samples alike" if alike else "artifact",
        against=f"answers without information ({chance.name})",
        samples=len(fidelity),
        figures={"skill": round_figure(skill), "fidelity_of_null": round_figure(chance.fidelity)},
        intervals={"skill": (0.0, 1.0)} if alike else {},
        required={"skill": round_figure(tolerance.loosen(SKILL_LEAST))} if tolerance.slack else {},
    )


def compare_agreements(agreements: Sequence[Agreement], samples: int, tolerance: Tolerance) -> Iterator[Comparison]:
    """Yield a comparison for each agreement. Shares have exact intervals, as wide as befits the number of classes that
    are looked at, so that a sound artifact fails on none of them in 95 % of all cases. samples: their number."""
    together = Counter(each.name for each in agreements if each.subject != ALL)
    for each in agreements:
        least = tolerance.loosen(each.least)
        intervals = {}
        if each.decisions:
            confidence = 1 - (1 - CONFIDENCE) / max(together[each.name] if each.subject != ALL else 1, 1)
            interval = find_share_interval(round(each.value * each.decisions), each.decisions, confidence)
            intervals[each.name] = round_interval(interval)
        yield Comparison(
            subject=each.subject,
            against="original",
            samples=samples if each.decisions is None else each.decisions,
            figures={each.name: round_figure(each.value)},
            intervals=intervals,
            required={each.name: round_figure(least)} if least else {},
            in_doubt="passed",
        )


def select_lowest(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """Yield the comparisons that fail, and of the others the SHOWN lowest of each figure."""
    shown: Counter[str] = Counter()
    for each in sorted(comparisons, key=lambda each: (each.state != "failed", min(each.figures.values()))):
        (name,) = each.figures
        shown[name] += 1
        if each.state == "failed" or shown[name] <= SHOWN:
            yield each
