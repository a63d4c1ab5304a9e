"""Answers for each token of a text: what tasks share whose model has an output at every position.

A model puts zeros at the positions of padding, so that outputs of a batch equal those of its samples alone.
"""

import numpy as np

from laconic.arrays import Array, softmax

IGNORED = -100
"""The label of a token that is none of the text's, as a special token: no loss and no metric counts it."""


def find_filled(logits: Array) -> Array:
    """Find the positions that are no padding, bool [samples, positions]. logits: [samples, positions, outputs]."""
    return np.asarray((logits != 0).any(axis=-1))


def softmax_positions(logits: Array, filled: Array) -> Array:
    """Return probabilities over the filled positions, [samples, positions] float64. logits, filled: [samples,
    positions]."""
    return np.asarray(softmax(np.where(filled, logits, -1e30)) * filled)


def overlap_positions(reference: Array, candidate: Array, background: int | None = None) -> Array:
    """Return the probability mass that two models share over the positions of each sample (Dice's coefficient),
    [samples].

    reference, candidate: logits [samples, positions, classes], zeros at padding. background: a class that most
    positions are of, whose mass does not count: an answer of nothing else would share nearly all of it. One position
    more, on which both agree, keeps samples without anything else from being compared by their noise.
    """
    filled = find_filled(reference)[..., None]
    expected, actual = (softmax(each) * filled for each in (reference, fit_positions(candidate, reference.shape[1])))
    if background is None:
        return np.asarray(np.minimum(expected, actual).sum(axis=(1, 2)) / filled.sum(axis=(1, 2)).clip(min=1))
    expected, actual = (np.delete(each, background, axis=-1) for each in (expected, actual))
    shared, total = np.minimum(expected, actual).sum(axis=(1, 2)), expected.sum(axis=(1, 2)) + actual.sum(axis=(1, 2))
    return np.asarray((2 * shared + 2) / (total + 2))


def fit_positions(logits: Array, positions: int) -> Array:
    """Return the logits at so many positions: those beyond are padding, and missing ones are zeros."""
    fitted = np.zeros((len(logits), positions, *logits.shape[2:]), logits.dtype)
    width = min(positions, logits.shape[1])
    fitted[:, :width] = logits[:, :width]
    return fitted
