"""The distribution of a token over groups of the vocabulary: bounded, whatever the size of the vocabulary.

A token is in the group of its id modulo GROUPS. The overlap of two distributions over groups is at least that of the
distributions over tokens, and equal where no two likely tokens share a group. The logits of 400 answers of 60 tokens
from a vocabulary of 250,000 would take 24 GB, in groups they take 100 MB.
"""

import numpy as np

from laconic.arrays import Array, softmax

GROUPS = 1024


def group_probabilities(logits: Array) -> Array:
    """The probabilities of groups, [rows, tokens, groups] float32; of tokens where the vocabulary is no larger.

    logits: [rows, tokens, vocabulary].
    """
    vocabulary = logits.shape[2]
    if vocabulary <= GROUPS:
        return np.asarray(softmax(logits), np.float32)
    grouped = np.empty((*logits.shape[:2], GROUPS), np.float32)
    for row, found in enumerate(logits):  # one row at a time: a copy of all logits may take gigabytes
        padded = np.pad(softmax(found), ((0, 0), (0, -vocabulary % GROUPS)))
        grouped[row] = padded.reshape(len(found), -1, GROUPS).sum(axis=1)
    return grouped
