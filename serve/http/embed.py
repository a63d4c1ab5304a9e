"""OpenAI's embeddings API: `POST /v1/embeddings`."""

import base64
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from laconic.arrays import Array
from laconic.errors import InputError
from serve.asgi.wire import Answer, to_json
from serve.http.openai_endpoint import SampleEndpoint
from serve.model_repository.model import Model, Prediction
from serve.requests.offload import offload
from serve.requests.public_errors import InvalidParameter

PARAMETERS = ("input", "model", "encoding_format", "dimensions", "user")
PRINTED = 64
"""Vectors that are printed in one go, without letting other threads run: 2 ms where they have 384 numbers."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request. samples: texts, or lists of the ids of tokens."""

    model: str
    samples: list[Any]
    in_base64: bool
    dimensions: int | None


class Embed(SampleEndpoint[EmbeddingRequest]):
    """Vectors for texts or tokens."""

    pattern = re.compile(r"/v1/embeddings")

    def read_request(self, match: re.Match[str], content: Any) -> EmbeddingRequest:
        if not isinstance(content, dict):
            raise InputError(f"the request must be an object, not {type(content).__name__}")
        if unknown := sorted(set(content) - set(PARAMETERS)):
            raise InvalidParameter(
                unknown[0], f"unknown parameter {unknown[0][:40]!r}; this server knows {', '.join(PARAMETERS)}"
            )
        model = content.get("model")
        if not isinstance(model, str):
            raise InvalidParameter("model", f"'model' must be a model's name, not {str(model)[:40]!r}")
        encoding = content.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise InvalidParameter(
                "encoding_format", f"'encoding_format' is {str(encoding)[:40]!r}, not float or base64"
            )
        dimensions = content.get("dimensions")
        if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
            raise InvalidParameter(
                "dimensions", f"'dimensions' is {str(dimensions)[:40]!r}, not a whole number from 1 on"
            )
        samples = read_samples(content.get("input"))
        return EmbeddingRequest(model, samples, in_base64=encoding == "base64", dimensions=dimensions)

    def choose_values(self, request: EmbeddingRequest, model: Model) -> list[Any]:
        if not model.task.embeds:
            raise InvalidParameter("model", f"model {model.name!r} does {model.task.name}, and no embeddings")
        width = model.outputs[0].shape[-1]
        if request.dimensions not in (None, width):
            raise InvalidParameter(
                "dimensions",
                f"model {model.name!r} gives {width} dimensions, and was not trained to give {request.dimensions}",
            )
        try:
            return [each if isinstance(each, str) else model.task.from_tokens(each) for each in request.samples]
        except InputError as error:
            raise InvalidParameter("input", str(error)) from None

    async def write_answer(self, request: EmbeddingRequest, prediction: Prediction) -> Answer:
        vectors = [answer["embedding"] for answer in prediction.answers]
        pieces = []
        for start in range(0, len(vectors), PRINTED):
            piece = vectors[start : start + PRINTED]
            if len(vectors) <= PRINTED:
                pieces.append(print_vectors(piece, start, request.in_base64))
            else:
                pieces.append(await offload(print_vectors, piece, start, request.in_base64, long=True))
        tail = to_json(
            {"model": request.model, "usage": {"prompt_tokens": prediction.tokens, "total_tokens": prediction.tokens}}
        )
        return Answer(b"".join([b'{"object":"list","data":[', b",".join(pieces), b"],", tail[1:]]))


def read_samples(value: Any) -> list[Any]:
    """Read the samples in `input`: a text, a list of texts, the ids of tokens, or a list of such. Raises InputError."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if is_tokens(value):
            return [value]
        if all(isinstance(each, str) for each in value) or all(is_tokens(each) for each in value):
            return value
    raise InvalidParameter(
        "input", "'input' must be a text, a list of texts, a list of the ids of tokens, or a list of such lists"
    )


def is_tokens(value: Any) -> bool:
    """Return whether this is a list of whole numbers."""
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def print_vectors(vectors: list[Array], start: int, in_base64: bool) -> bytes:
    """Print entries of the list of vectors, without its brackets. start: the index of the first."""
    return to_json(
        [
            {"object": "embedding", "index": index, "embedding": encode(vector) if in_base64 else vector}
            for index, vector in enumerate(vectors, start)
        ]
    )[1:-1]


def encode(vector: Array) -> str:
    """Encode a vector as little-endian float32 in base64."""
    return base64.b64encode(vector.astype(np.dtype("<f4"), copy=False).tobytes()).decode()
