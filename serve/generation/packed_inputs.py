"""What encoders read, and golden tokens, in a line of text between the server and a generation worker."""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from laconic.runtimes.generator import EncoderInputs, GoldenToken


def pack_inputs(inputs: EncoderInputs | None) -> dict[str, Any] | None:
    """Return what an encoder reads, JSON-ready: the numbers of an array in base64, behind its type and its shape."""
    if inputs is None:
        return None
    arrays = {
        name: (array.dtype.str, array.shape, b64encode(array.tobytes()).decode())
        for name, array in inputs.arrays.items()
    }
    return {"tokens": inputs.tokens, "arrays": arrays}


def unpack_inputs(packed: Mapping[str, Any] | None) -> EncoderInputs | None:
    """Return what was packed."""
    if packed is None:
        return None
    arrays = {
        name: np.frombuffer(b64decode(data), np.dtype(kind)).reshape(shape)
        for name, (kind, shape, data) in packed["arrays"].items()
    }
    return EncoderInputs(arrays, packed["tokens"])


def pack_golden(golden: Sequence[GoldenToken]) -> list[Any]:
    """Return golden tokens, JSON-ready."""
    return [[each.prompt, each.token, pack_inputs(each.source)] for each in golden]


def unpack_golden(packed: Sequence[Any]) -> list[GoldenToken]:
    """Return what was packed."""
    return [GoldenToken(tuple(prompt), token, unpack_inputs(source)) for prompt, token, source in packed]
