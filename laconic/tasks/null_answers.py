"""Answers that say nothing about their samples: what fidelity they have is what chance gives."""

import numpy as np

from laconic.arrays import Array, Arrays, softmax

NULL = "null."
"""How the names of outputs begin that the original gives for samples without what an answer depends on."""
SURE = 20.0
"""The difference of logits between a class that is certain and all others."""


def repeat_mean(outputs: Arrays) -> Arrays:
    """The mean over the samples as the answer to each; of whole numbers the most frequent one."""
    return {
        name: np.broadcast_to(find_centre(array).astype(array.dtype), array.shape) for name, array in outputs.items()
    }


def find_centre(array: Array) -> Array:
    """The mean over samples of floats, the most frequent value of anything else. array: [samples, ...]."""
    if array.dtype.kind == "f":
        return np.asarray(array.astype(np.float64).mean(axis=0))
    values, counts = np.unique(array, return_counts=True)
    return np.full(array.shape[1:], values[counts.argmax()])


def shuffle_rows(outputs: Arrays) -> Arrays:
    """The answer to another sample, drawn at random, in the place of each."""
    order = np.random.default_rng(0).permutation(len(next(iter(outputs.values()))))
    others = np.empty_like(order)
    others[order] = np.roll(order, 1)
    return {name: array[others] for name, array in outputs.items()}


def make_null_logits(logits: Array) -> Arrays:
    """The logits of null answers to each sample: the mean distribution, and the most frequent class.

    logits: [samples, classes], or [samples, positions, classes]; zeros at padding stay.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    filled = (rows != 0).any(axis=1)
    rows = rows[filled] if filled.any() else rows
    majority = np.bincount(rows.argmax(axis=1), minlength=rows.shape[1]).argmax()
    answers = {
        "constant": np.log(softmax(rows).mean(axis=0).clip(min=1e-30)),
        "majority class": SURE * (np.arange(rows.shape[1]) == majority),
    }
    shape = filled.reshape(logits.shape[:-1])[..., None]
    return {name: np.where(shape, row, 0).astype(logits.dtype) for name, row in answers.items()}
