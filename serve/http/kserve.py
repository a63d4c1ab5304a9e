"""The KServe V2 inference protocol: requests to arrays, arrays to answers. No HTTP and no model in here.

A request is JSON, or JSON of `Inference-Header-Content-Length` bytes followed by raw little-endian tensors in the order
of the inputs that have a `binary_data_size`. An answer is the same the other way round.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.tensor import TensorSpec, read_numbers
from serve.asgi.body import from_json
from serve.asgi.wire import BINARY, JSON, Answer, to_json
from serve.protocol.infer_request import (
    DATATYPES,
    InferRequest,
    expect,
    read_bytes,
    read_dtype,
    read_outputs,
    read_shape,
    read_timeout,
    refuse_extensions,
    refuse_sequences,
    shape_numbers,
    write_bytes,
)
from serve.settings.server_settings import Settings

MAX_DIGITS = 15
"""Of the header's length: more digits than any body has bytes."""
PRINTED = 1 << 15
"""Numbers that are printed in one go: 1 ms."""


def read_request(body: bytes, split: int, outputs: Sequence[TensorSpec], settings: Settings) -> InferRequest:
    """Read a request's body. split: the bytes of JSON at its front.

    The arrays are views of the body where they can be. Raises InputError for whatever is not a request; whether the
    inputs fit the model is checked elsewhere.
    """
    content = expect(from_json(body if split == len(body) else body[:split], settings), dict, "the request")
    identifier = content.get("id")
    if identifier is not None:
        expect(identifier, str, "'id'")
    parameters = expect(content.get("parameters", {}), dict, "'parameters'")
    refuse_sequences(parameters)
    inputs = read_inputs(expect(content.get("inputs"), list, "'inputs'"), memoryview(body)[split:])
    return InferRequest(
        id=identifier,
        inputs=inputs,
        outputs=read_outputs(content.get("outputs"), parameters, outputs),
        timeout=read_timeout(parameters),
    )


def read_length(header: bytes, available: int) -> int:
    """Read the bytes of JSON from the HTTP header `Inference-Header-Content-Length`. Raises InputError."""
    if not (header.isdigit() and len(header) <= MAX_DIGITS and 0 < int(header) <= available):
        raise InputError(
            f"Inference-Header-Content-Length is {header.decode('latin-1')[:40]!r}, expected 1 to {available}, "
            f"the bytes of the body"
        )
    return int(header)


def read_inputs(tensors: list[Any], binary: memoryview) -> Arrays:
    """Read arrays by name, from their descriptions and the bytes behind the JSON."""
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


def read_data(data: Any, dtype: np.dtype[Any], shape: list[int], name: str) -> Array:
    """Read an array from JSON, flat or nested, in row-major order."""
    what = f"'data' of input {name!r} ({DATATYPES[dtype]})"
    return shape_numbers(read_numbers(expect(data, list, what), dtype, what), shape, name)


def write_answer(request: InferRequest, outputs: Arrays, *, model: str, version: str) -> Answer:
    """Write the HTTP answer to a request. Raises InputError for a NaN or an infinity where JSON was asked for."""
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


def print_numbers(array: Array) -> Any:
    """Print numbers as JSON takes them: many are printed in pieces, between which other threads may run."""
    if array.size <= PRINTED:
        return array
    pieces = (to_json(array[start : start + PRINTED])[1:-1] for start in range(0, array.size, PRINTED))
    return orjson.Fragment(b"".join([b"[", b",".join(pieces), b"]"]))
