"""Requests of the KServe V2 protocol over gRPC, read as arrays. No gRPC and no model in here."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.tensor import TensorSpec, read_numbers
from serve.grpc.inference_pb2 import InferParameter, ModelInferRequest
from serve.protocol.infer_request import (
    InferRequest,
    read_bytes,
    read_dtype,
    read_outputs,
    read_shape,
    read_timeout,
    refuse_extensions,
    refuse_sequences,
    shape_numbers,
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
KNOWN, LONGEST = 256, 4096
"""Requests without their raw tensors that are kept, and their bytes: a client repeats them. Longer ones carry data."""


M = TypeVar("M", bound=Message)


class TensorLayout(NamedTuple):
    """What an input is like. message: with its typed contents, if it has any."""

    name: str
    dtype: np.dtype[Any]
    shape: list[int]
    message: Any


class RequestHead:
    """What a ModelInferRequest says beside its raw tensors. Properties raise InputError for what is no request."""

    def __init__(self, body: bytes) -> None:
        """body: the message without its raw tensors."""
        self.message = parse_message(ModelInferRequest, body)

    @cached_property
    def tensors(self) -> list[TensorLayout]:
        """The inputs."""
        layouts: dict[str, TensorLayout] = {}
        for tensor in self.message.inputs:
            name = tensor.name
            if name in layouts:
                raise InputError(f"input {name!r} is given twice")
            refuse_extensions(tensor.parameters, name)
            dtype = read_dtype(tensor.datatype, name)
            layouts[name] = TensorLayout(name, dtype, read_shape(list(tensor.shape), name), tensor)
        return list(layouts.values())

    @cached_property
    def outputs(self) -> list[dict[str, Any]]:
        """The outputs that are asked for, as over HTTP."""
        return [{"name": output.name, "parameters": dict(output.parameters)} for output in self.message.outputs]

    @cached_property
    def timeout(self) -> float | None:
        """Seconds until the request is dropped."""
        parameters = {name: read_parameter(value) for name, value in self.message.parameters.items()}
        refuse_sequences(parameters)
        return read_timeout(parameters)


keep_head = lru_cache(KNOWN)(RequestHead)


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


def parse_request(body: bytes) -> tuple[RequestHead, list[memoryview]]:
    """Parse a request; return it without its raw tensors, and those as views of the body: protobuf would copy 64 MiB in
    90 ms, in which no other thread runs. Raises InputError."""
    view = memoryview(body)
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    end = 0
    try:
        for _ in range(MAX_FIELDS):
            if end == len(body):
                head = b"".join(rest)
                return (keep_head if raw and len(head) <= LONGEST else RequestHead)(head), raw
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


def read_request(head: RequestHead, raw: Sequence[memoryview], outputs: Sequence[TensorSpec]) -> InferRequest:
    """Read the request in a message. raw: its raw tensors. Raises InputError for whatever is not a request."""
    return InferRequest(
        id=head.message.id,
        inputs=read_inputs(head, raw),
        outputs=read_outputs(head.outputs, {}, outputs),
        timeout=head.timeout,
    )


def read_parameter(parameter: InferParameter) -> Any:
    """Read a parameter as a Python value."""
    choice = parameter.WhichOneof("parameter_choice")
    return choice and getattr(parameter, choice)


def read_inputs(head: RequestHead, raw: Sequence[memoryview]) -> Arrays:
    """Read arrays by name, from raw or from typed contents."""
    tensors = head.tensors
    if not raw:
        return {name: read_contents(message, dtype, shape) for name, dtype, shape, message in tensors}
    if len(raw) != len(tensors):
        raise InputError(f"raw_input_contents has {len(raw)} tensors for {len(tensors)} inputs")
    for name, *_, message in tensors:
        if message.HasField("contents"):
            raise InputError(f"input {name!r} has both contents and raw_input_contents: give one")
    return {
        name: read_bytes(data, dtype, shape, name) for data, (name, dtype, shape, _) in zip(raw, tensors, strict=True)
    }


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
