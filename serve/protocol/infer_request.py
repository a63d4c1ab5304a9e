"""An inference request of the KServe V2 protocol: its tensors, the outputs it asks for, and how both are checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.tensor import MAX_AXES, TensorSpec

DTYPES = {
    "BOOL": "bool",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
DATATYPES = {np.dtype(dtype): datatype for datatype, dtype in DTYPES.items()}
"""By dtype: asking a dtype for its name takes 6 us."""
KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
REFUSED = ("shared_memory_region", "classification")
"""Extensions that would change the answer's meaning if they were ignored."""
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
"""Parameters of requests that share a state."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One inference request. outputs: those asked for, and whether each in binary. timeout: in seconds."""

    id: str | None
    inputs: Arrays
    outputs: dict[str, bool]
    timeout: float | None


def read_timeout(parameters: Mapping[str, Any]) -> float | None:
    """Read the seconds in the parameter `timeout` in microseconds; 0 means none, as in Triton."""
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise InputError(f"parameter 'timeout' is {timeout!r}, expected a whole number of microseconds")
    return timeout / 1e6 or None


def refuse_sequences(parameters: Mapping[str, Any]) -> None:
    """Raise InputError for a request that relies on a state of the server: answered by itself, it would be wrong."""
    if any(parameters.get(name) for name in SEQUENCE):
        raise InputError(
            "the request is part of a sequence (sequence_id), and this server keeps no state between requests: give "
            "the state as an input, and send what the model returns for it with the next request"
        )


def read_dtype(datatype: Any, name: str) -> np.dtype[Any]:
    """Read the dtype of a V2 datatype."""
    if not isinstance(datatype, str) or datatype not in DTYPES:
        raise InputError(f"input {name!r} has datatype {datatype!r}, expected one of {', '.join(DTYPES)}")
    return np.dtype(DTYPES[datatype])


def read_shape(shape: Any, name: str) -> list[int]:
    """Read the shape. No signature has an empty axis, so every size is 1 or more."""
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_AXES
        or not all(type(size) is int and size >= 1 for size in shape)
    ):
        raise InputError(
            f"input {name!r} has shape {str(shape)[:80]}, expected at most {MAX_AXES} whole numbers from 1 on"
        )
    return shape


def read_bytes(data: memoryview, dtype: np.dtype[Any], shape: list[int], name: str) -> Array:
    """Make a view of raw little-endian bytes."""
    size = math.prod(shape) * dtype.itemsize
    if len(data) != size:
        raise InputError(f"input {name!r} has {len(data)} bytes, but shape {shape} of {dtype} takes {size}")
    if dtype.kind == "b" and len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise InputError(f"input {name!r} is BOOL and has bytes other than 0 and 1")
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)


def shape_numbers(numbers: Array, shape: list[int], name: str) -> Array:
    """Put numbers into this shape, in row-major order."""
    if numbers.size != math.prod(shape):
        raise InputError(f"input {name!r} has {numbers.size} numbers, but shape {shape} takes {math.prod(shape)}")
    return numbers.reshape(shape)


def read_outputs(asked: Any, parameters: Mapping[str, Any], outputs: Sequence[TensorSpec]) -> dict[str, bool]:
    """Read the outputs asked for, all if none is named, and whether each in binary."""
    default = parameters.get("binary_data_output", False) is True
    if not asked:
        return {spec.name: default for spec in outputs}
    known = [spec.name for spec in outputs]
    chosen: dict[str, bool] = {}
    for output in expect(asked, list, "'outputs'"):
        name = expect(expect(output, dict, "an output").get("name"), str, "an output's 'name'")
        if name not in known:
            raise InputError(f"the model has no output {name!r}, only {known}")
        if name in chosen:
            raise InputError(f"output {name!r} is asked for twice")
        options = expect(output.get("parameters", {}), dict, f"'parameters' of output {name!r}")
        refuse_extensions(options, name)
        chosen[name] = options.get("binary_data", default) is True
    return chosen


def refuse_extensions(parameters: Mapping[str, Any], name: str) -> None:
    """Raise InputError for an extension that must not be ignored."""
    for extension in REFUSED:
        if extension in parameters:
            raise InputError(f"{name!r} asks for {extension!r}, which this server does not have")


def expect(value: Any, kind: type[T], what: str) -> T:
    """Return the value, if it is of that kind. Raises InputError."""
    if not isinstance(value, kind):
        raise InputError(f"{what} must be {KINDS[kind]}, not {str(value)[:40]!r}")
    return value


def write_bytes(array: Array) -> bytes:
    """Write the array as raw little-endian bytes, in row-major order."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def describe_tensor(spec: TensorSpec) -> dict[str, Any]:
    """Describe a tensor of the signature, as model metadata has it: -1 stands for a free axis."""
    shape = [axis if isinstance(axis, int) else -1 for axis in spec.shape]
    return {"name": spec.name, "datatype": DATATYPES[np.dtype(spec.dtype)], "shape": shape}
