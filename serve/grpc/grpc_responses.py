"""Responses of the KServe V2 protocol over gRPC, serialized: what repeats from answer to answer is written once."""

from functools import lru_cache
from typing import Any

import numpy as np

from laconic.arrays import Arrays
from serve.grpc.inference_pb2 import InferParameter, ModelInferResponse
from serve.protocol.infer_request import DATATYPES, InferRequest, write_bytes

FINAL = ("triton_enable_empty_final_response", "triton_final_response")
"""A parameter of a request in a stream, and that of its response which says that no further one follows."""
KNOWN = 256
"""Heads of answers that are kept: a model's answers of one shape have the same."""
RAW_OUTPUT = 6
"""The field of a ModelInferResponse with the bytes of a tensor."""
INFER_RESPONSE = 2
"""The field of a ModelStreamInferResponse with the answer."""
LAST = ModelInferResponse(parameters={FINAL[1]: InferParameter(bool_param=True)}).SerializeToString()
"""The parameters of the last answer."""
OutputLayout = tuple[str, np.dtype[Any], tuple[int, ...]]
"""Name, dtype and shape of an output."""


def write_response(
    request: InferRequest, outputs: Arrays, *, model: str, version: str, parameters: bytes = b""
) -> bytes:
    """Write the answer to a request, with raw tensors, as Triton gives it. parameters: serialized, of the answer."""
    arrays = {name: outputs[name] for name in request.outputs}
    layouts = tuple((name, array.dtype, array.shape) for name, array in arrays.items())
    parts = [serialize_model(model, version)]
    if request.id:
        parts.append(ModelInferResponse(id=request.id).SerializeToString())
    parts += [parameters, serialize_outputs(layouts)]
    for array in arrays.values():
        parts += make_field(RAW_OUTPUT, write_bytes(array))
    return b"".join(parts)


def write_streamed(
    request: InferRequest, outputs: Arrays, *, model: str, version: str, parameters: bytes = b""
) -> bytes:
    """Write the answer to a request in a stream."""
    answer = write_response(request, outputs, model=model, version=version, parameters=parameters)
    return b"".join(make_field(INFER_RESPONSE, answer))


def write_final(request: InferRequest, outputs: Arrays, *, model: str, version: str) -> bytes:
    """Write the answer to a request in a stream that asks which response is the last."""
    return write_streamed(request, outputs, model=model, version=version, parameters=LAST)


@lru_cache(KNOWN)
def serialize_model(model: str, version: str) -> bytes:
    """Serialize the part of an answer that names the model."""
    body: bytes = ModelInferResponse(model_name=model, model_version=version).SerializeToString()
    return body


@lru_cache(KNOWN)
def serialize_outputs(layouts: tuple[OutputLayout, ...]) -> bytes:
    """Serialize the part of an answer that describes its tensors."""
    outputs = [
        ModelInferResponse.InferOutputTensor(name=name, datatype=DATATYPES[dtype], shape=shape)
        for name, dtype, shape in layouts
    ]
    body: bytes = ModelInferResponse(outputs=outputs).SerializeToString()
    return body


def make_field(number: int, content: bytes) -> tuple[bytes, bytes]:
    """Make a length-delimited field: its tag and length, and its content."""
    head = bytearray([number << 3 | 2])
    length = len(content)
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head), content
