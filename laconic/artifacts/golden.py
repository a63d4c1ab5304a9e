"""Golden outputs: a few inputs with the outputs that they must give, in one file of tensors."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from laconic.arrays import Array, Arrays
from laconic.artifacts.artifact_files import AGAIN, read_plain
from laconic.artifacts.verdict import Verdict
from laconic.errors import CorruptArtifact, InputError
from laconic.tasks.fidelity import make_finite
from laconic.tensor import NUMPY, TensorSpec, check_inputs

if TYPE_CHECKING:
    from laconic.tasks.answer_comparison import AnswerComparison


GoldenPair = tuple[Arrays, Arrays]
"""Inputs by name, and the outputs that they must give."""


def flatten_golden(pairs: Sequence[GoldenPair]) -> Arrays:
    """Name the arrays of all golden pairs for one file: `0.input.input_ids`, `0.output.embedding`."""
    return {  # safetensors writes the bytes of an array as they lie in memory, whatever its strides say
        f"{number}.{side}.{name}": np.asarray(array, order="C")
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


GOLDEN_FLOOR, GOLDEN_CEILING = 0.9, 0.98
"""The least agreement of each golden output, whatever the engine's arithmetic, and the most that is required. The same
engine on another processor (BF16 or not, another INT8 kernel) changed MiniLM's vectors by up to 0.08 of their spread; a
processor whose INT8 sums overflow changes them by more than 0.3, and one wrong scale of the eight in the first
convolution of a small network for digits, doubled, by 0.05 to 0.5."""
GOLDEN_AGREEMENT = "golden_agreement"
"""The figure of the engine's parity check that says how closely the graph run node by node gives the golden outputs."""


def find_golden_floor(verdict: Verdict | None) -> float:
    """Find the least agreement of each golden output of a placement: two engines may differ from each other by twice as
    much as the one that made them differed from the graph run node by node."""
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
    if any(not golden.keys() <= candidate.keys() for golden, candidate in outputs):
        return dict.fromkeys(pairs[0][1], 0.0)
    aligned = [(golden, task.align(golden, candidate)) for golden, candidate in outputs]
    return {
        name: measure_agreement([(golden[name], candidate[name]) for golden, candidate in aligned])
        for name in pairs[0][1]
    }


def measure_agreement(pairs: Sequence[tuple[Array, Array]]) -> float:
    """Measure the agreement of one output over several batches, each with its golden array and the array to compare."""
    if any(golden.shape != candidate.shape for golden, candidate in pairs):
        return 0.0
    finite = [make_finite({"": golden}, {"": candidate}) for golden, candidate in pairs]
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
