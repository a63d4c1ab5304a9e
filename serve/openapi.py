"""The OpenAPI description: the parts that FastAPI cannot derive are written by hand."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from laconic.tasks.task import Task
from serve.body import parse
from serve.wire import to_json

ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR}}}
    for status, text in {
        400: "The request does not fit; the text says how.",
        401: "The request has no key, or an unknown one.",
        403: "A web page of another origin sent the request.",
        404: "There is no such model or route.",
        405: "The route takes another method.",
        413: "The body is too large.",
        421: "The request is for another host.",
        429: "The queue is full, or the rate of the key used up. Try again after `Retry-After` seconds.",
        500: "The engine failed on this request.",
        503: "The server is stopping.",
        504: "The request's timeout passed while it waited.",
    }.items()
}

BINARY = {"type": "string", "format": "binary"}
LONGEST_EXAMPLE = 2000
"""Characters. A longer example request is left out of the description."""

NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
TIMEOUT = {
    "name": "Request-Timeout",
    "in": "header",
    "required": False,
    "description": "Seconds that the request may wait in the queue.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
PREDICT_ANSWER: dict[str, dict[str, Any]] = {
    "200": {
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
RAW = {"schema": BINARY}


def describe_predict_body(tasks: Iterable[Task]) -> dict[str, Any]:
    """The request body of the task endpoint: what the tasks of the served models take."""
    by_field = {task.field: task for task in tasks}
    samples: dict[str, Any] = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "properties": {field: {"description": task.field_description} for field, task in by_field.items()},
    }
    examples = [to_json(task.example_request()) for task in by_field.values()]
    short = next((example for example in examples if len(example) <= LONGEST_EXAMPLE), None)
    if short is not None:
        samples["example"] = parse(short)
    form = {field: BINARY if task.upload else {"type": "string"} for field, task in by_field.items()}
    uploads = {task.upload.content_type for task in by_field.values() if task.upload}
    content = {
        "application/json": {"schema": samples},
        "multipart/form-data": {"schema": {"type": "object", "properties": form}},
        **dict.fromkeys(sorted(uploads), RAW),
    }
    return {"requestBody": {"required": True, "content": content}}


def describe_infer(*, versioned: bool) -> dict[str, Any]:
    """The operation of the hot path, which is no FastAPI route."""
    version = [{**NAME, "name": "version"}] if versioned else []
    return {
        "post": {
            "tags": ["models"],
            "summary": "Infer",
            "operationId": "infer_of_version" if versioned else "infer",
            "description": "Tensors in, tensors out: the KServe V2 protocol, in JSON or with its binary extension.",
            "parameters": [
                NAME,
                *version,
                TIMEOUT,
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


def describe_predict(tasks: Iterable[Task]) -> dict[str, Any]:
    """The operation of the task endpoint, which is no FastAPI route either."""
    return {
        "post": {
            "tags": ["models"],
            "summary": "Predict",
            "operationId": "predict",
            "description": "Answers for raw samples, as the model's task takes them: texts, images, arrays.",
            "parameters": [NAME, TIMEOUT],
            **describe_predict_body(tasks),
            "responses": {**PREDICT_ANSWER, **{str(status): answer for status, answer in ERRORS.items()}},
        }
    }


def describe(app: FastAPI, tasks: Iterable[Task]) -> dict[str, Any]:
    """The OpenAPI description of the server. tasks: those of its models."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        schema["paths"]["/v1/models/{name}/predict"] = describe_predict(tasks)
        schema["paths"]["/v2/models/{name}/infer"] = describe_infer(versioned=False)
        schema["paths"]["/v2/models/{name}/versions/{version}/infer"] = describe_infer(versioned=True)
        app.openapi_schema = schema
    return app.openapi_schema
