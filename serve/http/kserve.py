"""The KServe V2 inference protocol: requests to arrays, arrays to answers. No HTTP and no model in here.

A request is JSON, or JSON of `Inference-Header-Content-Length` bytes followed by raw little-endian tensors in the order
of the inputs that have a `binary_data_size`. An answer is the same the other way round.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.tensor import MAX_AXES, TensorSpec, read_numbers
from serve.asgi.body import from_json
from serve.asgi.wire import BINARY, JSON, Answer, to_json
from serve.settings.server_settings import Settings

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
MAX_DIGITS = 15
"""Of the header's length: more digits than any body has bytes."""
PRINTED = 1 << 15
"""Numbers that are printed in one go: 1 ms."""
KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
REFUSED = ("shared_memory_region", "classification")
"""Extensions that would change the answer's meaning if they were ignored."""


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request. outputs: those asked for, and whether each in binary. timeout: in seconds."""

    id: str | None
    inputs: Arrays
    outputs: dict[str, bool]
    timeout: float | None


def read_request(body: bytes, split: int, outputs: Sequence[TensorSpec], settings: Settings) -> Request:
    """A request's body. split: the bytes of JSON at its front.

    The arrays are views of the body where they can be. Raises InputError for whatever is not a request; whether the
    inputs fit the model is checked elsewhere.
    """
    content = expect(from_json(body if split == len(body) else body[:split], settings), dict, "the request")
    identifier = content.get("id")
    if identifier is not None:
        expect(identifier, str, "'id'")
    parameters = expect(content.get("parameters", {}), dict, "'parameters'")
    inputs = read_inputs(expect(content.get("inputs"), list, "'inputs'"), memoryview(body)[split:])
    return Request(
        id=identifier,
        inputs=inputs,
        outputs=read_outputs(content.get("outputs"), parameters, outputs),
        timeout=read_timeout(parameters),
    )


def read_length(header: bytes, available: int) -> int:
    """The bytes of JSON, from the HTTP header `Inference-Header-Content-Length`. Raises InputError."""
    if not (header.isdigit() and len(header) <= MAX_DIGITS and 0 < int(header) <= available):
        raise InputError(
            f"Inference-Header-Content-Length is {header.decode('latin-1')[:40]!r}, expected 1 to {available}, "
            f"the bytes of the body"
        )
    return int(header)


def read_timeout(parameters: Mapping[str, Any]) -> float | None:
    """Seconds, from the parameter `timeout` in microseconds; 0 means none, as in Triton."""
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise InputError(f"parameter 'timeout' is {timeout!r}, expected a whole number of microseconds")
    return timeout / 1e6 or None


def read_inputs(tensors: list[Any], binary: memoryview) -> Arrays:
    """Arrays by name, from their descriptions and the bytes behind the JSON."""
    inputs: Arrays = {}
    offset = 0
    for tensor in tensors:
        name = expect(expect(tensor, dict, "an input").get("name"), str, "an input's 'name'")
        if name in inputs:
            raise InputError(f"input {name!r} is given twice")
        parameters = expect(tensor.get("parameters", {}), dict, f"'parameters' of input {name!r}")
        refuse_extensions(parameters, name)
        dtype = read_dtype(tensor.get("datatype"), name)
        shape = read_shape(tensor.get("shape"), name)
        size = parameters.get("binary_data_size")
        if size is None:
            inputs[name] = read_data(tensor.get("data"), dtype, shape, name)
            continue
        if "data" in tensor:
            raise InputError(f"input {name!r} has both 'data' and 'binary_data_size': give one")
        expected = math.prod(shape) * dtype.itemsize
        if type(size) is not int or size != expected:
            raise InputError(
                f"input {name!r} has binary_data_size {size!r}, but shape {shape} of {dtype} takes {expected} bytes"
            )
        inputs[name] = read_bytes(binary[offset : offset + size], dtype, shape, name)
        offset += size
    if offset != len(binary):
        raise InputError(f"{len(binary)} bytes follow the JSON, but the inputs' binary_data_size add up to {offset}")
    return inputs


def read_dtype(datatype: Any, name: str) -> np.dtype[Any]:
    """The dtype of a V2 datatype."""
    if not isinstance(datatype, str) or datatype not in DTYPES:
        raise InputError(f"input {name!r} has datatype {datatype!r}, expected one of {', '.join(DTYPES)}")
    return np.dtype(DTYPES[datatype])


def read_shape(shape: Any, name: str) -> list[int]:
    """The shape. No signature has an empty axis, so every size is 1 or more."""
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
    """A view of raw little-endian bytes."""
    size = math.prod(shape) * dtype.itemsize
    if len(data) != size:
        raise InputError(f"input {name!r} has {len(data)} bytes, but shape {shape} of {dtype} takes {size}")
    if dtype.kind == "b" and len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise InputError(f"input {name!r} is BOOL and has bytes other than 0 and 1")
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)


def read_data(data: Any, dtype: np.dtype[Any], shape: list[int], name: str) -> Array:
    """An array from JSON, flat or nested, in row-major order."""
    what = f"'data' of input {name!r} ({DATATYPES[dtype]})"
    return shape_numbers(read_numbers(expect(data, list, what), dtype, what), shape, name)


def shape_numbers(numbers: Array, shape: list[int], name: str) -> Array:
    """The numbers in this shape, in row-major order."""
    if numbers.size != math.prod(shape):
        raise InputError(f"input {name!r} has {numbers.size} numbers, but shape {shape} takes {math.prod(shape)}")
    return numbers.reshape(shape)


def read_outputs(wanted: Any, parameters: Mapping[str, Any], outputs: Sequence[TensorSpec]) -> dict[str, bool]:
    """The outputs asked for, all if none is named, and whether each in binary."""
    default = parameters.get("binary_data_output", False) is True
    if not wanted:
        return {spec.name: default for spec in outputs}
    known = [spec.name for spec in outputs]
    chosen: dict[str, bool] = {}
    for output in expect(wanted, list, "'outputs'"):
        name = expect(expect(output, dict, "an output").get("name"), str, "an output's 'name'")
        if name not in known:
            raise InputError(f"the model has no output {name!r}, only {known}")
        if name in chosen:
            raise InputError(f"output {name!r} is asked for twice")
        own = expect(output.get("parameters", {}), dict, f"'parameters' of output {name!r}")
        refuse_extensions(own, name)
        chosen[name] = own.get("binary_data", default) is True
    return chosen


def refuse_extensions(parameters: Mapping[str, Any], name: str) -> None:
    """Raise InputError for an extension that must not be ignored."""
    for extension in REFUSED:
        if extension in parameters:
            raise InputError(f"{name!r} asks for {extension!r}, which this server does not have")


T = TypeVar("T")


def expect(value: Any, kind: type[T], what: str) -> T:
    """The value, if it is of that kind."""
    if not isinstance(value, kind):
        raise InputError(f"{what} must be {KINDS[kind]}, not {str(value)[:40]!r}")
    return value


def write_answer(request: Request, outputs: Arrays, *, model: str, version: str) -> Answer:
    """The HTTP answer to a request. Raises InputError for a NaN or an infinity where JSON was asked for."""
    described, binary = [], []
    for name, in_binary in request.outputs.items():
        array = outputs[name]
        output: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype], "shape": array.shape}
        if in_binary:
            data = write_bytes(array)
            output["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise InputError(
                    f"output {name!r} holds NaN or infinity, which JSON cannot hold. "
                    f"Ask for it in binary (outputs[].parameters.binary_data)"
                )
            output["data"] = print_numbers(array.ravel())
        described.append(output)
    content: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": described}
    if request.id is not None:
        content["id"] = request.id
    header = to_json(content)
    if not binary:
        return Answer(header, content_type=JSON)
    length = (b"inference-header-content-length", b"%d" % len(header))
    return Answer(b"".join([header, *binary]), content_type=BINARY, headers=[length])


def write_bytes(array: Array) -> bytes:
    """The array as raw little-endian bytes, in row-major order."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def print_numbers(array: Array) -> Any:
    """The numbers as JSON takes them: many are printed in pieces, between which other threads may run."""
    if array.size <= PRINTED:
        return array
    pieces = (to_json(array[start : start + PRINTED])[1:-1] for start in range(0, array.size, PRINTED))
    return orjson.Fragment(b"".join([b"[", b",".join(pieces), b"]"]))


def describe_tensor(spec: TensorSpec) -> dict[str, Any]:
    """A tensor of the signature, as model metadata has it: -1 stands for a free axis."""
    shape = [axis if isinstance(axis, int) else -1 for axis in spec.shape]
    return {"name": spec.name, "datatype": DATATYPES[np.dtype(spec.dtype)], "shape": shape}


def describe_configuration(
    name: str,
    runtime: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    cap: int,
    batched: bool,
    executors: int,
    parameters: Mapping[str, str],
) -> dict[str, Any]:
    """A model's configuration in Triton's terms. Without batching every axis is in `dims`.

    cap: rows of a batch. executors: batches that run at a time. parameters: what Triton has no field for.
    """

    def tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        described = [describe_tensor(spec) for spec in specs]
        return [
            {
                "name": tensor["name"],
                "data_type": f"TYPE_{tensor['datatype']}",
                "dims": tensor["shape"][1:] if batched else tensor["shape"],
            }
            for tensor in described
        ]

    return {
        "name": name,
        "platform": f"onnx_{runtime}",
        "backend": runtime,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": cap if batched else 0,
        "input": tensors(inputs),
        "output": tensors(outputs),
        "instance_group": [{"name": name, "count": executors}],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        **({"dynamic_batching": {"max_queue_delay_microseconds": 0}} if batched else {}),
    }
