"""What a TensorRT engine is built from: the model, the bounds of its axes, the flags, the GPU. Needs no TensorRT."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laconic.arrays import Array
from laconic.errors import RuntimeFailure, UsageError, did_you_mean
from laconic.hashing import digest_file, hash_of
from laconic.runtimes.onnx_file import (
    GraphInput,
    Weight,
    find_external_files,
    read_inputs,
    read_properties,
    read_weights,
)
from laconic.tensor import BATCH

Shape = tuple[int, ...]
INTEGER_VIEWS = {"bfloat16": np.uint16}
"""Types that numpy lacks, and those that their bytes are looked at as."""


class Bounds(NamedTuple):
    """The sizes of a dynamic axis: the smallest, the one that kernels are chosen for, the largest."""

    least: int
    usual: int
    most: int


class InputRange(NamedTuple):
    """The smallest, usual and largest shape of an input, as an optimization profile takes them."""

    least: Shape
    usual: Shape
    most: Shape


AXIS_PROPERTY = "laconic.axis."
"""The prefix of the metadata key of an axis' bounds."""
BATCH_BOUNDS, AXIS_BOUNDS = Bounds(1, 8, 64), Bounds(1, 128, 512)
"""The bounds of the axis `batch`, and of any other dynamic axis, where none are given, nor written in the model."""


@dataclass(frozen=True)
class EngineSpec:
    """All that an engine depends on: the same spec gives an engine that can be used again.

    model: name and SHA-256 of each file of the model. profile: by input with a dynamic axis. sparse: whether kernels
    for 2:4 sparse weights are considered. workspace: bytes of scratch memory a kernel may use. gpu, capability, driver,
    tensorrt: the GPU's name and compute capability, the versions of its driver and of TensorRT.
    """

    model: tuple[tuple[str, str], ...]
    profile: Mapping[str, InputRange]
    sparse: bool
    workspace: int
    gpu: str
    capability: str
    driver: str
    tensorrt: str

    @property
    def key(self) -> str:
        """Digest of all fields, the name of the engine in the cache."""
        return hash_of("tensorrt-engine", asdict(self))

    @property
    def device_key(self) -> str:
        """Digest of what timings of kernels depend on, the name of the timing cache."""
        return hash_of("tensorrt-timing", self.gpu, self.capability, self.driver, self.tensorrt)

    def describe(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        return asdict(self)


def describe_model(
    path: Path, shapes: Mapping[str, Bounds]
) -> tuple[tuple[tuple[str, str], ...], dict[str, InputRange], bool]:
    """Read what a model contributes to a spec: digests of its files, the profile, whether it has 2:4 sparse weights.

    shapes: bounds by the name of an axis. Raises RuntimeFailure for a file that is not ONNX or lacks its external data,
    UsageError for bounds that do not fit.
    """
    try:
        weights = read_weights(path)
        with path.open("rb") as file:
            files = find_external_files(file)
        for name in files:
            if not (path.parent / name).resolve().is_relative_to(path.parent.resolve()):
                raise ValueError(f"its external data {name} lies outside its folder")
        digests = tuple((name, digest_file(path.parent / name).sha256) for name in (path.name, *files))
        inputs = read_inputs(path)
        profile = make_profile(inputs, {**read_axis_bounds(read_properties(path), inputs), **shapes})
        return digests, profile, any(is_sparse(weight, path.parent) for weight in weights)
    except FileNotFoundError as error:
        raise RuntimeFailure(
            f"tensorrt refused {path}: {error.filename} is missing. Copy the model again, with its external data"
        ) from None
    except (OSError, ValueError) as error:
        raise RuntimeFailure(
            f"tensorrt refused {path}: {error}. Copy the model again, with its external data"
        ) from None


def read_axis_bounds(properties: Mapping[str, str], inputs: Sequence[GraphInput]) -> dict[str, Bounds]:
    """Read the bounds of dynamic axes that the export wrote into a model's metadata, as "1 256" under the axis' name.
    What is not two sizes in order is left out."""
    bounds = {}
    for axis in {axis for each in inputs for axis in each.shape if isinstance(axis, str)}:
        sizes = properties.get(f"{AXIS_PROPERTY}{axis}", "").split()
        if len(sizes) == 2 and all(size.isascii() and size.isdecimal() and len(size) < 10 for size in sizes):
            least, most = map(int, sizes)
            if 1 <= least <= most:
                bounds[axis] = Bounds(least, min(max(AXIS_BOUNDS.usual, least), most), most)
    return bounds


def make_profile(inputs: Sequence[GraphInput], shapes: Mapping[str, Bounds]) -> dict[str, InputRange]:
    """Compute the range of shapes of each input that has a dynamic axis.

    shapes: bounds by the name of an axis; others get `BATCH_BOUNDS` and `AXIS_BOUNDS`. A fixed axis keeps its size.
    Raises UsageError for bounds out of order, or of an axis that no input has.
    """
    names = {axis for each in inputs for axis in each.shape if isinstance(axis, str)}
    for name, bounds in shapes.items():
        if name not in names:
            raise UsageError(f"bounds are given for axis {name!r}, which no input has. {did_you_mean(name, names)}")
        least, usual, most = bounds
        if not 1 <= least <= usual <= most:
            raise UsageError(
                f"the bounds of axis {name!r} are {least}, {usual}, {most}; expected the smallest size, at least 1, "
                f"the usual and the largest, in this order"
            )
    defaults = {name: BATCH_BOUNDS if name == BATCH else AXIS_BOUNDS for name in names}
    sizes = defaults | {name: Bounds(*bounds) for name, bounds in shapes.items()}
    return {
        each.name: InputRange(
            *(tuple(sizes[axis][place] if isinstance(axis, str) else axis for axis in each.shape) for place in range(3))
        )
        for each in inputs
        if any(isinstance(axis, str) for axis in each.shape)
    }


def is_sparse(weight: Weight, folder: Path) -> bool:
    """Return whether of any four successive numbers along one of the first two axes two at most are not zero.

    folder: where the weight's file lies. False for a weight that is stored in another form than plain bytes.
    """
    if len(weight.shape) < 2 or not weight.dtype:
        return False
    dtype = np.dtype(INTEGER_VIEWS.get(weight.dtype, weight.dtype))
    count = math.prod(weight.shape)
    if weight.file:
        if (folder / weight.file).stat().st_size < weight.offset + count * dtype.itemsize:
            raise ValueError(f"its external data {weight.file} ends before {weight.name} does")
        values: Array = np.memmap(folder / weight.file, dtype, "r", weight.offset, (count,))
    elif len(weight.data) == count * dtype.itemsize:
        values = np.frombuffer(weight.data, dtype)
    else:
        return False
    if not count or 2 * np.count_nonzero(values) > count:
        return False
    occupied = (values != 0).reshape(weight.shape)
    return any(is_two_of_four(np.moveaxis(occupied, axis, -1)) for axis in (0, 1))


def is_two_of_four(occupied: Array) -> bool:
    """Return whether in each group of four along the last axis two at most are set."""
    if occupied.shape[-1] % 4:
        return False
    return bool((occupied.reshape(-1, 4).sum(axis=1) <= 2).all())
