"""Fidelity of outputs in which numbers may be NaN or infinite: no task has to think of these."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.tasks.null_answers import NULL

if TYPE_CHECKING:
    from laconic.tasks.answer_comparison import AnswerComparison


class FiniteOutputs(NamedTuple):
    """Outputs of the original and of a candidate, all of them finite.

    broken: for each output by name the samples that are not finite, where the original is, or not in the same way,
    bool [samples]; their outputs are zeros here.
    """

    reference: Arrays
    candidate: Arrays
    broken: Arrays

    @property
    def is_broken(self) -> Array:
        """Whether any output of a sample is broken, bool [samples]."""
        return np.asarray(np.any(list(self.broken.values()), axis=0))


def make_finite(reference: Arrays, candidate: Arrays) -> FiniteOutputs:
    """Replace numbers that are not finite. What is infinite or NaN in both alike, as the logits of classes that a model
    rules out, becomes the lowest or the highest finite number of the output in both; NaN becomes 0.

    reference, candidate: [samples, ...] by name; the original's answers to null samples are left out unless both have
    them.
    """
    own = {name: array for name, array in reference.items() if not name.startswith(NULL) or name in candidate}
    pairs = {name: replace_infinite(array, candidate[name]) for name, array in own.items()}
    ours, theirs, broken = (dict(zip(pairs, column, strict=True)) for column in zip(*pairs.values(), strict=True))
    return FiniteOutputs(ours, theirs, broken)


def replace_infinite(reference: Array, candidate: Array) -> tuple[Array, Array, Array]:
    """Make two arrays finite; returns them, and which samples of the candidate are broken."""
    if reference.dtype.kind != "f" or (np.isfinite(reference).all() and np.isfinite(candidate).all()):
        return reference, candidate, np.zeros(len(reference), np.bool_)
    finite, same = np.isfinite(reference), np.isfinite(candidate)
    if reference.shape == candidate.shape:
        same = np.where(finite, same, (reference == candidate) | (np.isnan(reference) & np.isnan(candidate)))
    broken = np.asarray(~same.reshape(len(reference), -1).all(axis=1))
    limits = reference[finite] if finite.any() else np.zeros(1, reference.dtype)
    low, high = limits.min(), limits.max()
    ours = np.nan_to_num(reference, nan=0.0, neginf=low, posinf=high)
    theirs = np.nan_to_num(candidate, nan=0.0, neginf=low, posinf=high)
    theirs[broken] = 0
    return ours, theirs, broken


def find_broken_answer(outputs: Arrays) -> tuple[str, int] | None:
    """Find an answer with NaN or infinity, by its output and its sample; None where there is none.

    What is infinite for all samples alike, as the logits of classes that a model rules out, is no fault.
    """
    for name, array in outputs.items():
        if array.dtype.kind == "f":
            ruled_out = np.isinf(array).all(axis=0)
            rows = ~(np.isfinite(array) | ruled_out).reshape(len(array), -1).all(axis=1)
            if rows.any():
                return name, int(rows.argmax())
    return None


def measure_fidelity(task: "AnswerComparison", reference: Arrays, candidate: Arrays) -> Array:
    """The fidelity of each answer to its reference, [samples] float64; 0 for one that is not finite."""
    outputs = make_finite(reference, candidate)
    fidelity = task.fidelity(outputs.reference, outputs.candidate)
    return np.where(outputs.is_broken, 0.0, fidelity)


def measure_divergence(task: "AnswerComparison", reference: Arrays, candidate: Arrays) -> Array:
    """Measure how far each answer is from its reference, [samples] float64; at least 1 for one that is not finite."""
    outputs = make_finite(reference, candidate)
    divergence = task.divergence(outputs.reference, outputs.candidate)
    return np.where(outputs.is_broken, np.maximum(divergence, 1.0), divergence)
