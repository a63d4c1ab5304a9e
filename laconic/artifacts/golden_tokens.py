"""The golden outputs of an artifact as tokens that its engine must write, for models that write."""

from collections.abc import Iterator, Sequence

import numpy as np

from laconic.arrays import Array
from laconic.artifacts.golden import GoldenPair
from laconic.runtimes.generator import EncoderInputs, GoldenToken
from laconic.tasks.decoder_tensors import (
    DECODER_ATTENTION_MASK,
    DECODER_INPUT_IDS,
    IMAGE_INPUTS,
    PIXELS,
    TARGET_INPUTS,
    TOKENS,
)

MOST, LEAST = 32, 4
"""Tokens that are proven: all at most; as few as the second number where each reads long."""
READ_TOKENS = 4096
"""Tokens that are read for them in all, at most, but for the first `LEAST`."""


def choose_golden_tokens(pairs: Sequence[GoldenPair]) -> list[GoldenToken]:
    """Choose some of the golden outputs of a model that writes."""
    candidates = [each for inputs, outputs in pairs for each in list_tokens(inputs, outputs[TOKENS])]
    places = np.linspace(0, len(candidates) - 1, min(MOST, len(candidates))).astype(int)
    chosen: list[GoldenToken] = []
    read = 0
    for place in np.random.default_rng(0).permutation(places):
        golden = candidates[place]
        read += len(golden.prompt) + (golden.source.tokens if golden.source is not None else 0)
        if len(chosen) >= LEAST and read > READ_TOKENS:
            break
        chosen.append(golden)
    return chosen


def list_tokens(inputs: dict[str, Array], tokens: Array) -> Iterator[GoldenToken]:
    """Yield the golden tokens of a batch, [rows, tokens]."""
    is_source = DECODER_INPUT_IDS in inputs
    ids = inputs[DECODER_INPUT_IDS if is_source else "input_ids"]
    for row, place in np.argwhere(inputs[DECODER_ATTENTION_MASK if is_source else "attention_mask"]).tolist():
        source = None
        if is_source:
            arrays = cut_padding({name: array[[row]] for name, array in inputs.items() if name not in TARGET_INPUTS})
            source = EncoderInputs(arrays, max(array.shape[-1] for array in arrays.values()))
        elif PIXELS in inputs:
            source = EncoderInputs({name: inputs[name][[row]] for name in IMAGE_INPUTS if name in inputs}, 0)
        prompt = ids[row, int(is_source) : place + 1]  # the engine begins with the start token by itself
        yield GoldenToken(tuple(prompt.tolist()), int(tokens[row, place]), source)


def cut_padding(source: dict[str, Array]) -> dict[str, Array]:
    """Return a source of one row without the padding behind it."""
    mask = source.get("attention_mask")
    return source if mask is None else {name: array[:, : int(mask.sum())] for name, array in source.items()}
