"""How closely an engine gives the golden outputs of an artifact again."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.artifacts.verdict import Verdict
from laconic.tasks.fidelity import make_finite

if TYPE_CHECKING:
    from laconic.tasks.answer_comparison import AnswerComparison

GOLDEN_FLOOR, GOLDEN_CEILING = 0.9, 0.98
"""The least agreement of each golden output, whatever the engine's arithmetic, and the most that is required. The same
engine on another processor (BF16 or not, another INT8 kernel) changed MiniLM's vectors by up to 0.08 of their spread; a
processor whose INT8 sums overflow changes them by more than 0.3, and one wrong scale of the eight in the first
convolution of a small network for digits, doubled, by 0.05 to 0.5."""
GOLDEN_AGREEMENT = "golden_agreement"
"""The figure of the engine's parity check that says how closely the graph run node by node gives the golden outputs."""


def find_golden_floor(verdict: Verdict | None) -> float:
    """The least agreement of each golden output of a placement: two engines may differ from each other by twice as much
    as the one that made them differed from the graph run node by node."""
    engine = verdict.find_check("engine") if verdict else None
    agreement = engine.figures.get(GOLDEN_AGREEMENT, 0.0) if engine else 0.0
    return min(max(1 - 2 * (1 - agreement), GOLDEN_FLOOR), GOLDEN_CEILING)


def measure_golden_agreement(
    task: "AnswerComparison", pairs: Sequence[tuple[Arrays, Arrays]], run: Callable[[Arrays], Arrays]
) -> dict[str, float]:
    """Measure for each output by name how closely an engine gives the golden outputs again: 1 minus the root mean
    square of the differences, relative to the spread of the numbers; of whole numbers the share that is the same.

    run: computes the outputs of a batch. Returns 0 for an output with numbers that are not finite or of another shape,
    and for all where one is missing.
    """
    outputs = [(golden, run(inputs)) for inputs, golden in pairs]
    if any(not golden.keys() <= found.keys() for golden, found in outputs):
        return dict.fromkeys(pairs[0][1], 0.0)
    aligned = [(golden, task.align(golden, found)) for golden, found in outputs]
    return {name: measure_agreement([(golden[name], found[name]) for golden, found in aligned]) for name in pairs[0][1]}


def measure_agreement(pairs: Sequence[tuple[Array, Array]]) -> float:
    """The agreement of one output over several batches, each with its golden array and the array to compare."""
    if any(golden.shape != found.shape for golden, found in pairs):
        return 0.0
    finite = [make_finite({"": golden}, {"": found}) for golden, found in pairs]
    if any(each.is_broken.any() for each in finite):
        return 0.0
    a = np.concatenate([each.reference[""].ravel() for each in finite])
    b = np.concatenate([each.candidate[""].ravel() for each in finite])
    if a.dtype.kind != "f":
        return float((a == b).mean())
    a, b = a.astype(np.float64), b.astype(np.float64)
    spread = np.square(a - a.mean()).sum() or np.square(a).sum()
    error = np.square(a - b).sum()
    return float(1 - np.sqrt(error / spread)) if spread else float(not error)
