"""Messages of the KServe V2 protocol over gRPC: requests to arrays, arrays to answers. No gRPC and no model in here."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.tensor import TensorSpec, read_numbers
from serve.grpc.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from serve.protocol.infer_request import (
    DATATYPES,
    InferRequest,
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
from serve.requests.memory_budget import BodyTooLarge

CONTENTS = {
    "bool": ("bool_contents", np.bool_),
    "int8": ("int_contents", np.int32),
    "int16": ("int_contents", np.int32),
    "int32": ("int_contents", np.int32),
    "int64": ("int64_contents", np.int64),
    "uint8": ("uint_contents", np.uint32),
    "uint16": ("uint_contents", np.uint32),
    "uint32": ("uint_contents", np.uint32),
    "uint64": ("uint64_contents", np.uint64),
    "float32": ("fp32_contents", np.float32),
    "float64": ("fp64_contents", np.float64),
}
"""The field of typed contents and the type of its numbers, by dtype. FP16 has none."""
RAW = 7 << 3 | 2
"""The tag of a tensor in `raw_input_contents`."""
MAX_FIELDS = 10_000
"""Of a request. A million empty inputs in 2 MB took 0.3 s to parse, in which no other thread ran."""
MAX_PARSED = 1 << 20
"""Bytes of a request without its raw tensors: at most 40 ms to parse, in which no other thread runs."""
CONVERTED = 1 << 15
"""Numbers of typed contents that are converted in one go: 2 ms, and then other threads may run."""
WIDTH = {1: 8, 5: 4}
"""Bytes of a field of fixed size, by its wire type."""
VARINT, LENGTH_DELIMITED = 0, 2
MAX_VARINT = 10


M = TypeVar("M", bound=Message)


def parse_message(kind: type[M], body: bytes) -> M:
    """Parse the message in a body. Raises InputError."""
    if len(body) > MAX_PARSED:
        raise BodyTooLarge(
            f"the {kind.__name__} has {len(body)} bytes beside raw tensors, more than the {MAX_PARSED} that this "
            f"server takes. Send tensors in raw_input_contents"
        )
    message: M = kind()
    try:
        message.MergeFromString(body)
    except DecodeError:
        raise InputError(f"the message is no {kind.__name__}") from None
    return message


def serialize(message: Message) -> bytes:
    """Serialize a message."""
    body: bytes = message.SerializeToString()
    return body


def parse_request(body: bytes) -> tuple[ModelInferRequest, list[memoryview]]:
    """Parse a request; return it without its raw tensors, and those as views of the body: protobuf would copy 64 MiB in
    90 ms, in which no other thread runs. Raises InputError."""
    view = memoryview(body)
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    end = 0
    try:
        for _ in range(MAX_FIELDS):
            if end == len(body):
                return parse_message(ModelInferRequest, b"".join(rest)), raw
            start = end
            tag, end = read_varint(body, start)
            size = 0
            if tag & 7 == VARINT:
                _, end = read_varint(body, end)
            elif tag & 7 == LENGTH_DELIMITED:
                size, end = read_varint(body, end)
            else:
                size = WIDTH[tag & 7]
            end += size
            if end > len(body):
                break
            if tag == RAW:
                raw.append(view[end - size : end])
            else:
                rest.append(view[start:end])
    except (IndexError, KeyError):
        raise InputError("the message is no ModelInferRequest") from None
    raise InputError(f"the ModelInferRequest is cut off, or has more than {MAX_FIELDS} fields")


def read_varint(body: bytes, position: int) -> tuple[int, int]:
    """Read the number at a position, and the position behind it. Raises IndexError where it does not end."""
    value = 0
    for index in range(MAX_VARINT):
        byte = body[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise IndexError


def read_request(message: ModelInferRequest, raw: Sequence[memoryview], outputs: Sequence[TensorSpec]) -> InferRequest:
    """Read the request in a message. raw: its raw tensors. Raises InputError for whatever is not a request."""
    outputs_asked = [{"name": output.name, "parameters": dict(output.parameters)} for output in message.outputs]
    parameters = {name: read_parameter(value) for name, value in message.parameters.items()}
    refuse_sequences(parameters)
    return InferRequest(
        id=message.id,
        inputs=read_inputs(message, raw),
        outputs=read_outputs(outputs_asked, {}, outputs),
        timeout=read_timeout(parameters),
    )


def read_parameter(parameter: InferParameter) -> Any:
    """Read a parameter as a Python value."""
    choice = parameter.WhichOneof("parameter_choice")
    return choice and getattr(parameter, choice)


def read_inputs(message: ModelInferRequest, raw: Sequence[memoryview]) -> Arrays:
    """Read arrays by name, from raw or from typed contents."""
    if raw and len(raw) != len(message.inputs):
        raise InputError(f"raw_input_contents has {len(raw)} tensors for {len(message.inputs)} inputs")
    inputs: Arrays = {}
    for index, tensor in enumerate(message.inputs):
        name = tensor.name
        if name in inputs:
            raise InputError(f"input {name!r} is given twice")
        refuse_extensions(tensor.parameters, name)
        dtype = read_dtype(tensor.datatype, name)
        shape = read_shape(list(tensor.shape), name)
        if not raw:
            inputs[name] = read_contents(tensor, dtype, shape)
        elif tensor.HasField("contents"):
            raise InputError(f"input {name!r} has both contents and raw_input_contents: give one")
        else:
            inputs[name] = read_bytes(raw[index], dtype, shape, name)
    return inputs


def read_contents(tensor: ModelInferRequest.InferInputTensor, dtype: np.dtype[Any], shape: list[int]) -> Array:
    """Read an array from typed contents."""
    if dtype.name not in CONTENTS:
        raise InputError(f"input {tensor.name!r} is {tensor.datatype}, which has no typed contents: send it raw")
    field, kind = CONTENTS[dtype.name]
    numbers = getattr(tensor.contents, field)
    array: Array = np.empty(len(numbers), kind)
    for start in range(0, len(numbers), CONVERTED):
        array[start : start + CONVERTED] = numbers[start : start + CONVERTED]
    return shape_numbers(read_numbers(array, dtype, f"{field} of input {tensor.name!r}"), shape, tensor.name)


def describe_response(request: InferRequest, outputs: Arrays, *, model: str, version: str) -> ModelInferResponse:
    """Make the answer to a request, with raw tensors, as Triton gives it."""
    arrays = {name: outputs[name] for name in request.outputs}
    return ModelInferResponse(
        model_name=model,
        model_version=version,
        id=request.id or "",
        outputs=[
            ModelInferResponse.InferOutputTensor(name=name, datatype=DATATYPES[array.dtype], shape=list(array.shape))
            for name, array in arrays.items()
        ],
        raw_output_contents=[write_bytes(array) for array in arrays.values()],
    )
