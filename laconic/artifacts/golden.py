"""Golden outputs: a few inputs with the outputs that they must give, in one file of tensors."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load

from laconic.arrays import Arrays
from laconic.artifacts.artifact_files import AGAIN, read_plain
from laconic.errors import CorruptArtifact, InputError
from laconic.tensor import NUMPY, TensorSpec, check_inputs

GoldenPair = tuple[Arrays, Arrays]
"""Inputs by name, and the outputs that they must give."""


def flatten_golden(pairs: Sequence[GoldenPair]) -> Arrays:
    """Name the arrays of all golden pairs for one file: `0.input.input_ids`, `0.output.embedding`."""
    return {
        f"{number}.{side}.{name}": array
        for number, pair in enumerate(pairs)
        for side, arrays in zip(("input", "output"), pair, strict=True)
        for name, array in sorted(arrays.items())
    }


def read_golden(
    path: Path, size: int, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> list[GoldenPair]:
    """Read the golden pairs in a file of `size` bytes. Raises CorruptArtifact for a file without any, and for tensors
    that do not match the signature."""
    pairs: dict[str, GoldenPair] = {}
    try:
        for key, array in sorted(load(read_plain(path, size)).items()):
            number, _, rest = key.partition(".")
            side, _, name = rest.partition(".")
            pairs.setdefault(number, ({}, {}))[side == "output"][name] = array
        for arguments, answers in pairs.values():
            check_inputs(inputs, arguments)
            check_outputs(outputs, answers)
    except (SafetensorError, InputError, KeyError, TypeError, ValueError) as error:  # KeyError: a dtype numpy lacks
        raise CorruptArtifact(f"{path} does not hold golden outputs: {error}. {AGAIN}") from None
    if not pairs:
        raise CorruptArtifact(f"{path} holds no golden outputs. {AGAIN}")
    return [(arguments, {spec.name: answers[spec.name] for spec in outputs}) for arguments, answers in pairs.values()]


def check_outputs(specs: Sequence[TensorSpec], arrays: Arrays) -> None:
    """Raise InputError unless `arrays` holds exactly the tensors of `specs`, of the same kinds and fixed sizes. An
    engine may compute in float64 what the signature has in float32."""
    names = [spec.name for spec in specs]
    if arrays.keys() != set(names):
        raise InputError(f"the outputs are {sorted(arrays)}, expected {names}")
    for spec in specs:
        array = arrays[spec.name]
        fits = array.ndim == len(spec.shape) and all(
            size == axis for size, axis in zip(array.shape, spec.shape, strict=True) if isinstance(axis, int)
        )
        if array.dtype.kind != NUMPY[spec.dtype].kind or not fits:
            raise InputError(
                f"output {spec.name!r} is {array.dtype} {list(array.shape)}, expected {spec.dtype} {spec.describe()}"
            )
