"""The tensors of a decoder that writes token by token, beside those of its source; and groups of tokens."""

from collections.abc import Mapping

import numpy as np

from laconic.arrays import Array, softmax

DECODER_INPUT_IDS = "decoder_input_ids"
"""A target behind the start token, [batch, target] int64."""
DECODER_ATTENTION_MASK = "decoder_attention_mask"
"""Ones at tokens which those of the target follow, zeros at padding and before forced tokens, [batch, target] int64."""
PAST = "past"
"""The keys and values of earlier tokens in the decoder's self-attention, [batch, 2 layers, heads, past, width] float32,
key and value of each layer in turn; and their free axis."""
TARGET_INPUTS = (DECODER_INPUT_IDS, DECODER_ATTENTION_MASK, PAST)
POSITION_IDS = "position_ids"
"""The place of each token in its text, counted from 0, [batch, seq] int64."""
NEW_TOKENS = "new_tokens"
"""How many tokens are written where writing is timed, in place of a target: a number, int64 []."""

PROBABILITIES = "probabilities"
"""The distribution of the token after each of the target's, in groups; zeros at padding."""
TOKENS = "tokens"
"""The likeliest token after each of the target's, [batch, target] int64."""
IMAGE_FEATURES = "image_features"
"""What a tower makes of some patches of the first frame of an image, or of some frames where these have places: [batch,
patches, width] float32."""
PIXELS = "pixel_values"
"""The frames of images, [batch, frames, channels, height, width] float32; and their free axis. A frame is an image, a
tile of one, or a block of patches that becomes one token."""
FRAMES = "frames"
PLACES = "image_places"
"""Of each frame that takes the place of one token: the token's index in the text, and its position in time, height and
width, [batch, frames, 4] int64; -1 where a row has no frame."""
IMAGE_INPUTS = (PIXELS, PLACES)
"""What a tower reads; most read no places."""
OUTPUTS = (PROBABILITIES, TOKENS)
"""What a model answers along a target."""
LOG_LIKELIHOODS = "log_likelihoods"
"""The log-likelihood of the token that follows each one of a text, 0 at the last: [batch, seq] float32."""
SEQUENCES = "sequences"
"""What is written, [batch, max_new_tokens] int64, padded behind the end token."""

TEXT_INPUTS = ("input_ids", "attention_mask", POSITION_IDS, PAST)
"""The inputs of a language model with a cache."""
TARGET = "target"
"""The free axis of a target."""
CacheShape = tuple[int, int, int]
"""Twice the decoder's layers, the heads of its self-attention, and the width of a head."""


GROUPS = 1024
"""The groups of the vocabulary over which the distribution of a token is summed: a token is in the group of its id
modulo GROUPS. The overlap of two distributions over groups is at least that over tokens, and equal where no two likely
tokens share a group. The logits of 400 answers of 60 tokens from a vocabulary of 250,000 would take 24 GB, in groups
they take 100 MB."""


def measure_log_likelihoods(logits: Array, ids: Array) -> Array:
    """Measure the log-likelihood of the token that follows each one, 0 at the last: [rows, tokens] float32.

    logits: [rows, tokens, vocabulary]. ids: [rows, tokens].
    """
    measured = np.zeros(ids.shape, np.float32)
    for row, row_logits in enumerate(logits):  # one row at a time, as in `group_probabilities`
        best = row_logits.max(axis=-1)
        total = best + np.log(np.exp(row_logits - best[:, None]).sum(axis=-1))
        measured[row, :-1] = row_logits[np.arange(ids.shape[1] - 1), ids[row, 1:]] - total[:-1]
    return measured


def group_probabilities(logits: Array) -> Array:
    """Return the probabilities of groups, [rows, tokens, groups] float32; of tokens where the vocabulary is no larger.

    logits: [rows, tokens, vocabulary].
    """
    vocabulary = logits.shape[2]
    if vocabulary <= GROUPS:
        return np.asarray(softmax(logits), np.float32)
    grouped = np.empty((*logits.shape[:2], GROUPS), np.float32)
    for row, row_logits in enumerate(logits):  # one row at a time: a copy of all logits may take gigabytes
        padded = np.pad(softmax(row_logits), ((0, 0), (0, -vocabulary % GROUPS)))
        grouped[row] = padded.reshape(len(row_logits), -1, GROUPS).sum(axis=1)
    return grouped


COMPARED_PATCHES = 16
"""The most patches whose features are compared."""


def find_compared_patches(patches: int) -> slice:
    """Find those patches of the first frame whose features are compared, spread evenly. patches: of a frame."""
    return slice(0, patches, -(-patches // COMPARED_PATCHES))


def select_compared(features: Array, inputs: Mapping[str, Array]) -> Array:
    """Select the features that are compared, [batch, patches, width]. inputs: what the tower has read."""
    if PLACES not in inputs:
        return features[:, find_compared_patches(features.shape[1] // inputs[PIXELS].shape[1])]
    counts = (inputs[PLACES][..., :1] >= 0).sum(axis=1)
    return np.take_along_axis(features, (np.arange(COMPARED_PATCHES) * counts // COMPARED_PATCHES)[..., None], axis=1)
