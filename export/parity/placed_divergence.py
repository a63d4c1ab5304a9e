"""The first layer of a placed graph whose error its quantization does not explain."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from export.parity.float_reference import FloatReference, ReferencedTensor
from laconic.arrays import Array, Arrays
from laconic.artifacts.parity_ledger import Divergence
from laconic.errors import RuntimeFailure
from laconic.hardware import cores
from laconic.quantization.graph import Graph
from laconic.runtimes.onnxruntime import OnnxRuntime

FACTOR = 4
"""How many times the error of fresh rounding a layer may have. Measured on 40 samples: at most 1.6 for MiniLM in INT8
and 0.8 in INT4, 1.8 for a small convolutional network."""

FLOOR = 0.01
"""The relative error that is always allowed. A node that is not quantized gives the same to the bit."""


class ErrorSum:
    """The relative error of a tensor over several samples: the norm of the differences, by that of the values."""

    def __init__(self) -> None:
        self._differences = self._values = 0.0

    def add(self, actual: Array, expected: Array) -> None:
        """Add a sample's values. Equal infinities are no difference; NaN in only one of the two is an infinite one."""
        a, b = actual.astype(np.float64), expected.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        # What the exporter writes for minus infinity in a mask has a square beyond float32, and not beyond float64.
        difference = np.where(same, 0.0, a - np.where(same, 0.0, b))
        self._differences += float("inf") if np.isnan(difference).any() else float(np.square(difference).sum())
        self._values += float(np.square(b[np.isfinite(b)]).sum())

    @property
    def relative(self) -> float:
        """The relative error: 0 for equal values, infinite where zeros were expected and others found."""
        if self._differences == 0:
            return 0.0
        return float(np.sqrt(self._differences / self._values)) if self._values else float("inf")


def find_placed_divergence(
    graph: Graph, placed: Path, precision: Mapping[str, str], samples: Sequence[Arrays]
) -> Divergence:
    """Find the first layer of a placed graph whose error is not explained by its quantization.

    Each layer is compared with the captured one on the same input, the activation that the placed graph computes, so
    that it does not inherit the error of earlier layers. Its relative error (the norm of the differences by that of the
    values, over all samples) may be FACTOR times the error that rounding its weight and its input to the same bits
    gives, with the range of the sample, and FLOOR in any case.
    precision: of the placed graph's layers, by node. samples: the inputs of each sample, in a batch of one.
    """
    model = onnx.load(placed)
    writer = FloatReference(graph, model, precision)
    missing = writer.find_missing()
    if missing is not None:
        return Divergence(
            says=f"not bisected: the placed graph has no node {missing!r}, so it was made from another captured graph"
        )
    tensors = writer.extend()
    try:
        errors = measure_errors(model, tensors, samples)
    except RuntimeFailure as failure:
        return Divergence(says=f"not bisected: the captured layers do not take the placed graph's tensors. {failure}")
    allowed = {
        each.name: max(FLOOR, FACTOR * errors[each.from_rounded].relative if each.rounded else 0.0) for each in tensors
    }
    wrong = [each for each in tensors if not errors[each.name].relative <= allowed[each.name]]
    if not wrong:
        return describe_largest(tensors, errors)
    first, error = wrong[0], errors[wrong[0].name].relative
    others = f"; {len(wrong) - 1} more after it" if len(wrong) > 1 else ""
    return Divergence(
        says=(
            f"{first.layer} ({first.kind}, {first.precision}) is the first layer that its quantization does not "
            f"explain: relative error {error:.3g} on its own input, allowed {allowed[first.name]:.3g}{others}"
        ),
        layer=first.layer,
        tensor=first.name,
        error=error,
        allowed=allowed[first.name],
    )


def measure_errors(
    model: onnx.ModelProto, tensors: Sequence[ReferencedTensor], samples: Sequence[Arrays]
) -> dict[str, ErrorSum]:
    """Measure the error of each tensor against its reference, and of the rounded reference against the float one, by
    the name of the tensor that is compared. Raises RuntimeFailure for nodes that do not fit one another."""
    errors = {name: ErrorSum() for each in tensors for name in (each.name, each.from_rounded)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "referenced.onnx"
        # With the captured weights added, the file may exceed the 2 GiB of protobuf.
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
        with OnnxRuntime().open(path, threads=cores(), optimize=False) as session:
            for inputs in samples:
                values = session.run(inputs)
                for each in tensors:
                    errors[each.name].add(values[each.name], values[each.reference])
                    if each.rounded:
                        errors[each.from_rounded].add(values[each.from_rounded], values[each.reference])
    return errors


def describe_largest(tensors: Sequence[ReferencedTensor], errors: Mapping[str, ErrorSum]) -> Divergence:
    """Say that each layer is explained by its quantization, and which has the largest error."""
    worst = max(tensors, key=lambda each: errors[each.name].relative)
    return Divergence(
        says=(
            f"its quantization explains the error of each layer; the errors add up. The largest is "
            f"{errors[worst.name].relative:.3g} in {worst.layer} ({worst.kind}, {worst.precision})"
        )
    )
