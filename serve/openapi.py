"""The OpenAPI description, with what FastAPI cannot see written by hand."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR}}}
    for status, text in {
        400: "The request does not fit; the text says how.",
        404: "There is no such model or route.",
        413: "The body is too large.",
        429: "The queue is full. Try again after `Retry-After` seconds.",
        500: "The engine failed on this request.",
        503: "The server is stopping.",
        504: "The request's timeout passed while it waited.",
    }.items()
}

SAMPLES = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": 1,
    "properties": {
        "text": {"description": "A text, or a list of texts (a pair of texts is a list of two within that list)."},
        "image": {"description": "An image file in base64, or a list of them."},
        "inputs": {"description": "The arrays of one sample by input, without the batch axis, or a list of such."},
    },
    "example": {"text": ["A first sentence.", "A second one."]},
}
PREDICT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": SAMPLES},
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {"image": {"type": "string", "format": "binary"}}}
            },
            "image/*": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
PREDICT_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One answer per sample, in order.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"model": {"type": "string"}, "answers": {"type": "array", "items": {}}},
                    "required": ["model", "answers"],
                }
            }
        },
    }
}

PARAMETERS = {"type": "object", "additionalProperties": True}
TENSOR = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string", "example": "FP32"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "data": {"type": "array", "items": {}},
        "parameters": PARAMETERS,
    },
    "required": ["name", "datatype", "shape"],
}
OUTPUT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": PARAMETERS},
    "required": ["name"],
}
INFER_REQUEST = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "parameters": PARAMETERS,
        "inputs": {"type": "array", "items": TENSOR},
        "outputs": {"type": "array", "items": OUTPUT},
    },
    "required": ["inputs"],
}
INFER_ANSWER = {
    "type": "object",
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "outputs": {"type": "array", "items": TENSOR},
    },
    "required": ["model_name", "model_version", "outputs"],
}
RAW = {"schema": {"type": "string", "format": "binary"}}


def describe_infer(*, versioned: bool) -> dict[str, Any]:
    """The operation of the hot path, which is no FastAPI route."""
    names = ["name", "version"] if versioned else ["name"]
    return {
        "post": {
            "tags": ["models"],
            "summary": "Infer",
            "operationId": "infer_of_version" if versioned else "infer",
            "description": "Tensors in, tensors out: the KServe V2 protocol, in JSON or with its binary extension.",
            "parameters": [
                *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names),
                {
                    "name": "Inference-Header-Content-Length",
                    "in": "header",
                    "required": False,
                    "description": "Bytes of JSON in front of raw tensors.",
                    "schema": {"type": "integer", "minimum": 1},
                },
            ],
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": INFER_REQUEST}, "application/octet-stream": RAW},
            },
            "responses": {
                "200": {
                    "description": "The outputs.",
                    "content": {"application/json": {"schema": INFER_ANSWER}, "application/octet-stream": RAW},
                },
                **{str(status): answer for status, answer in ERRORS.items()},
            },
        }
    }


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        schema["paths"]["/v2/models/{name}/infer"] = describe_infer(versioned=False)
        schema["paths"]["/v2/models/{name}/versions/{version}/infer"] = describe_infer(versioned=True)
        app.openapi_schema = schema
    return app.openapi_schema
