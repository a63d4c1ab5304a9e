"""The signature of a model: tensor names, dtypes and shapes, with dynamic axes by name."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from laconic.arrays import Array, Arrays
from laconic.errors import InputError

BATCH = "batch"
ANY_SIZE = (1, 2**63 - 1)
"""The bounds of an axis that has none."""
MAX_AXES = 64
"""Of numpy's arrays."""
MAX_ELEMENTS = 2**31
"""The most elements of a tensor's fixed axes: of one sample, 8 GB in float32."""
INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64")
NUMPY = {name: np.dtype(name) for name in DTYPES}
"""The dtype of each name: to look one up takes numpy as long as all other checks of a tensor."""


class TensorSpec(BaseModel):
    """One tensor of a signature.

    `shape` holds an integer for a fixed axis and a name for a dynamic one; axes of the same name have the same size
    in every tensor of the signature. `bounds` gives, by name, the smallest and the largest size of a dynamic axis;
    an axis without bounds may have any size from 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    bounds: dict[str, tuple[int, int]] = Field(default_factory=dict)

    @field_validator("shape")
    @classmethod
    def _possible_sizes(cls, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
        fixed = [axis for axis in shape if isinstance(axis, int)]
        if len(shape) > MAX_AXES or any(axis < 1 for axis in fixed) or math.prod(fixed) > MAX_ELEMENTS:
            raise ValueError(f"expected at most {MAX_AXES} axes of sizes from 1, and {MAX_ELEMENTS:,} elements in all")
        return shape

    @field_validator("bounds")
    @classmethod
    def _ordered(cls, bounds: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        for axis, (low, high) in bounds.items():
            if not 0 <= low <= high <= ANY_SIZE[1]:
                raise ValueError(f"the bounds of axis {axis!r} are {low} and {high}; expected two sizes in order")
        return bounds

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str) -> str:
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
        return dtype

    @property
    def batched(self) -> bool:
        """Whether the first axis is the batch."""
        return bool(self.shape) and self.shape[0] == BATCH

    def check(self, array: Array, sizes: dict[str, int] | None = None) -> None:
        """Raise InputError unless `array` matches this spec.

        sizes: sizes of the dynamic axes seen so far in the same request; it is read and extended, so that tensors
        which share an axis are checked against each other.
        """
        sizes = {} if sizes is None else sizes
        if array.dtype != NUMPY[self.dtype]:
            raise InputError(f"input {self.name!r} is {array.dtype}, expected {self.dtype}")
        if array.ndim != len(self.shape):
            raise InputError(f"input {self.name!r} has shape {list(array.shape)}, expected {self.describe()}")
        for axis, (expected, size) in enumerate(zip(self.shape, array.shape, strict=True)):
            if isinstance(expected, int):
                if size != expected:
                    raise InputError(
                        f"input {self.name!r} has shape {list(array.shape)}, expected {self.describe()}: "
                        f"axis {axis} must be {expected}"
                    )
                continue
            low, high = self.bounds.get(expected, ANY_SIZE)
            if not low <= size <= high:
                raise InputError(f"input {self.name!r} has {size} along axis {expected!r}, expected {low} to {high}")
            if sizes.setdefault(expected, size) != size:
                raise InputError(
                    f"input {self.name!r} has {size} along axis {expected!r}, another input has {sizes[expected]}"
                )

    def sample(self, rng: np.random.Generator, sizes: Mapping[str, int]) -> Array:
        """Draw a random array that matches: standard normal for floats, 0 or 1 for integers and booleans.

        sizes: the size of each dynamic axis, by name; a missing one takes its lower bound.
        """
        shape = self._fill(sizes)
        if np.dtype(self.dtype).kind == "f":
            return rng.standard_normal(shape).astype(self.dtype)
        return rng.integers(0, 2, shape).astype(self.dtype)

    def fit(self, array: Array, sizes: Mapping[str, int]) -> Array:
        """Cut an array off, or repeat it, along the axes that do not have their size. sizes: as of `sample`."""
        for axis, size in enumerate(self._fill(sizes)):
            if array.shape[axis] != size:
                array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
        return array

    def _fill(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the shape with a size for each dynamic axis; a missing one takes its lower bound."""
        return [
            axis if isinstance(axis, int) else sizes.get(axis, self.bounds.get(axis, (1, 1))[0]) for axis in self.shape
        ]

    def describe(self) -> str:
        """Format the shape for people: `[batch, seq, 384]`."""
        return "[" + ", ".join(str(axis) for axis in self.shape) + "]"


def check_inputs(specs: tuple[TensorSpec, ...], arrays: Mapping[str, Array]) -> None:
    """Raise InputError unless `arrays` holds exactly the tensors of `specs`, each matching, with shared axes equal."""
    missing = [spec.name for spec in specs if spec.name not in arrays]
    if missing or len(arrays) != len(specs):
        names = [spec.name for spec in specs]
        extra = [name for name in arrays if name not in names]
        wrong = f"missing {missing}" if missing else f"unknown {extra}"
        raise InputError(f"inputs do not match the signature: {wrong}; expected {names}")
    sizes: dict[str, int] = {}
    for spec in specs:
        spec.check(arrays[spec.name], sizes)


FITS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""The kinds of numbers that an array of each kind takes, in numpy's letters."""
KINDS = {"b": "booleans", "i": "whole numbers", "u": "whole numbers", "f": "fractions, or numbers beyond 64 bits"}


def read_numbers(values: Any, dtype: np.dtype[Any], what: str) -> Array:
    """Read an array of numbers as JSON has them; a number may be rounded to the dtype, but is never cut or wrapped.

    values: a number, lists of numbers, or an array. what: their name in messages. Raises InputError.
    """
    if not isinstance(values, np.ndarray) and holds_text(values):
        raise InputError(f"{what} is not an array of {dtype}: it holds text")
    try:
        numbers = np.asarray(values)
    except (ValueError, OverflowError):
        raise InputError(f"{what} is not an array of {dtype}: it is ragged, or nested too deep") from None
    if numbers.dtype.kind not in FITS[dtype.kind] and numbers.size:
        held = KINDS.get(numbers.dtype.kind, "something other than numbers")
        raise InputError(f"{what} is not an array of {dtype}: it holds {held}")
    if dtype.kind in "iu" and numbers.size:
        low, high = int(numbers.min()), int(numbers.max())
        allowed = np.iinfo(dtype)
        if low < allowed.min or high > allowed.max:
            raise InputError(
                f"{what} runs from {low} to {high}, and {dtype} holds {allowed.min} to {allowed.max}: give another type"
            )
    try:
        with np.errstate(over="raise"):
            return numbers.astype(dtype, copy=False)
    except FloatingPointError:
        raise InputError(f"{what} holds a number too large for {dtype}") from None


LARGEST_DESCRIBED = 4096
"""Elements of an array whose sizes are in its schema; beyond that, whoever makes examples from a schema takes long."""


def describe_number(dtype: str) -> dict[str, Any]:
    """Return the JSON Schema of one element."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return {"type": "boolean"}
    if kind.kind == "f":
        largest = float(np.finfo(kind).max)
        return {"type": "number", "minimum": -largest, "maximum": largest}
    limits = np.iinfo(kind)
    return {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}


def describe_array(dtype: str, shape: tuple[int | str, ...], bounds: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the JSON Schema of nested lists of this shape."""
    schema = describe_number(dtype)
    fixed = [axis for axis in shape if isinstance(axis, int)]
    for axis in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": 1}
        if math.prod(fixed) > LARGEST_DESCRIBED:
            continue
        low, high = (axis, axis) if isinstance(axis, int) else bounds.get(axis, ANY_SIZE)
        schema["minItems"] = low
        if high < ANY_SIZE[1]:
            schema["maxItems"] = high
    return schema


def holds_text(values: Any, depth: int = 0) -> bool:
    """Return whether there is text in lists of lists. Lists that are nested deeper than arrays can be are not looked
    at.

    numpy gives every element the length of the longest text: a megabyte among 100,000 numbers would take 400 GB.
    """
    if isinstance(values, str):
        return True
    if not isinstance(values, (list, tuple)) or depth > MAX_AXES:
        return False
    kinds = set(map(type, values))
    return str in kinds or (
        not kinds.isdisjoint((list, tuple)) and any(holds_text(value, depth + 1) for value in values)
    )


def sample_inputs(specs: tuple[TensorSpec, ...], sizes: Mapping[str, int], seed: int = 0) -> Arrays:
    """Draw random inputs of the given sizes of free axes. Masks are all ones: attention over nothing is not defined."""
    rng = np.random.default_rng(seed)
    arrays = {spec.name: spec.sample(rng, sizes) for spec in specs}
    return {name: np.ones_like(array) if "mask" in name else array for name, array in arrays.items()}
