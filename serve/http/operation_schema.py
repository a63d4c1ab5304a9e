"""The OpenAPI operations of a model, which are no FastAPI routes: what exactly this model takes and gives."""

from collections.abc import Sequence
from typing import Any

from laconic.arrays import Array
from laconic.tensor import TensorSpec, describe_array, describe_number
from serve.asgi.body import parse
from serve.asgi.wire import to_json
from serve.model_repository.model import Model
from serve.protocol.infer_request import describe_tensor

BINARY = {"type": "string", "format": "binary"}
RAW = {"schema": BINARY}
LONGEST_EXAMPLE = 2000
"""Characters. A longer example request is left out."""
EXAMPLE_LENGTH = 4
"""Tokens of an example request."""
PARAMETERS = {"type": "object"}
TIMEOUT = {
    "name": "Request-Timeout",
    "in": "header",
    "required": False,
    "description": "Seconds that the request may wait in the queue.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 999_999_999},
}
HEADER_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "Bytes of JSON in front of raw tensors.",
    "schema": {"type": "integer", "minimum": 1},
}


def describe_infer(model: Model, version: str = "") -> dict[str, Any]:
    """The operation of V2 inference. version: what the path has of it, for the name of the operation."""
    schema = describe_request(model)
    example = to_json(make_example(model))
    if len(example) <= LONGEST_EXAMPLE:
        schema["example"] = parse(example)
    return {
        "tags": [model.name],
        "summary": f"Infer with {model.name}",
        "operationId": f"infer_{model.name}{version}",
        "description": "Tensors in, tensors out: the KServe V2 protocol, in JSON or with its binary extension.",
        "parameters": [TIMEOUT, HEADER_LENGTH],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema}, "application/octet-stream": RAW},
        },
        "responses": {
            "200": {
                "description": "The outputs.",
                "content": {
                    "application/json": {"schema": describe_response(model)},
                    "application/octet-stream": RAW,
                },
            }
        },
    }


def describe_request(model: Model) -> dict[str, Any]:
    """The JSON Schema of a request: each input once, and any of the outputs."""
    names = [spec.name for spec in model.outputs]
    output = {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": names}, "parameters": PARAMETERS},
        "required": ["name"],
    }
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "parameters": PARAMETERS,
            "inputs": {
                "type": "array",
                "items": {"anyOf": [describe_input(spec) for spec in model.inputs]},
                "minItems": len(model.inputs),
                "maxItems": len(model.inputs),
            },
            "outputs": {"type": "array", "items": output, "maxItems": len(names)},
        },
        "required": ["inputs"],
    }


def describe_input(spec: TensorSpec) -> dict[str, Any]:
    """The JSON Schema of an input: its data flat, or nested as its shape."""
    schema = describe_parts(spec)
    flat = {"type": "array", "items": describe_number(spec.dtype), "minItems": 1}
    schema["properties"] |= {
        "data": {"anyOf": [flat, describe_array(spec.dtype, spec.shape, spec.bounds)]},
        "parameters": PARAMETERS,
    }
    return schema


def describe_parts(spec: TensorSpec) -> dict[str, Any]:
    """The JSON Schema of a tensor's name, datatype and shape."""
    tensor = describe_tensor(spec)
    axes = [axis if isinstance(axis, int) else describe_axis(axis, spec) for axis in spec.shape]
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [tensor["name"]]},
            "datatype": {"type": "string", "enum": [tensor["datatype"]]},
            "shape": {
                "description": f"[{', '.join(map(str, axes))}]",
                "type": "array",
                "items": {"type": "integer", "minimum": 1},
                "minItems": len(axes),
                "maxItems": len(axes),
            },
        },
        "required": ["name", "datatype", "shape"],
    }


def describe_axis(axis: str, spec: TensorSpec) -> str:
    """A free axis with its bounds, as `seq: 1 to 256`."""
    if axis not in spec.bounds:
        return axis
    low, high = spec.bounds[axis]
    return f"{axis}: {low} to {high}"


def describe_response(model: Model) -> dict[str, Any]:
    """The JSON Schema of a response."""
    outputs = []
    for spec in model.outputs:
        schema = describe_parts(spec)
        schema["properties"] |= {"data": {"type": "array", "items": describe_number(spec.dtype)}}
        outputs.append(schema)
    return {
        "type": "object",
        "properties": {
            "model_name": {"type": "string", "enum": [model.name]},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": {"anyOf": outputs}},
        },
        "required": ["model_name", "model_version", "outputs"],
    }


def make_example(model: Model) -> dict[str, Any]:
    """A request of one row."""
    arrays = model.task.typical(1, EXAMPLE_LENGTH)
    return {"inputs": [make_tensor(spec, arrays[spec.name]) for spec in model.inputs]}


def make_tensor(spec: TensorSpec, array: Array) -> dict[str, Any]:
    """An input in a request."""
    return describe_tensor(spec) | {"shape": array.shape, "data": array.ravel()}


def describe_predict(model: Model) -> dict[str, Any]:
    """The operation of the task endpoint."""
    answers = {
        "type": "object",
        "properties": {
            "model": {"type": "string", "enum": [model.name]},
            "answers": {"type": "array", "items": {}, "minItems": 1},
        },
        "required": ["model", "answers"],
    }
    return {
        "tags": [model.name],
        "summary": f"Predict with {model.name}",
        "operationId": f"predict_{model.name}",
        "description": f"Answers for raw samples, by the task {model.task.name}.",
        "parameters": [TIMEOUT],
        "requestBody": {"required": True, "content": describe_samples(model)},
        "responses": {
            "200": {
                "description": "One answer per sample, in order.",
                "content": {"application/json": {"schema": answers}},
            }
        },
    }


def describe_samples(model: Model) -> dict[str, Any]:
    """The content types of samples: JSON, a form, and files where the task takes them."""
    task = model.task
    sample = task.sample_schema()
    forms = sample.get("anyOf", [sample])
    # A list is a list of samples, so that a sample which is a list stands in one.
    alone = [form for form in forms if form.get("type") != "array"]
    field = {
        "description": task.field_description,
        "anyOf": [*alone, {"type": "array", "items": sample, "minItems": 1, "maxItems": model.settings.max_rows}],
    }
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {task.field: field},
        "required": [task.field],
        "additionalProperties": False,
    }
    example = to_json(task.example_request())
    if len(example) <= LONGEST_EXAMPLE:
        schema["example"] = parse(example)
    part = BINARY if task.upload else {"type": "string"}
    form = {"type": "object", "properties": {task.field: part}, "required": [task.field]}
    uploads = {task.upload.content_type: RAW} if task.upload else {}
    return {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}, **uploads}


def describe_embeddings(models: Sequence[Model]) -> dict[str, Any]:
    """The operation of OpenAI's embeddings API. models: those that embed."""
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    numbers = {"type": "array", "items": {"type": "number"}}
    widths = sorted({width for model in models if isinstance(width := model.outputs[0].shape[-1], int)})
    request: dict[str, Any] = {
        "type": "object",
        "properties": {
            "model": {"type": "string", "enum": [model.name for model in models]},
            "input": {
                "anyOf": [{"type": "string"}, texts, tokens, {"type": "array", "items": tokens, "minItems": 1}],
            },
            "encoding_format": {"type": "string", "enum": ["float", "base64"]},
            "user": {"type": "string"},
            **({"dimensions": {"type": "integer", "enum": widths}} if widths else {}),
        },
        "required": ["model", "input"],
        "additionalProperties": False,
        "example": {"model": models[0].name, "input": ["Hello there."]},
    }
    embedding = {
        "type": "object",
        "properties": {
            "object": {"type": "string", "enum": ["embedding"]},
            "index": {"type": "integer"},
            "embedding": {"anyOf": [numbers, {"type": "string", "contentEncoding": "base64"}]},
        },
        "required": ["object", "index", "embedding"],
    }
    answer = {
        "type": "object",
        "properties": {
            "object": {"type": "string", "enum": ["list"]},
            "data": {"type": "array", "items": embedding},
            "model": {"type": "string"},
            "usage": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "required": ["object", "data", "model", "usage"],
    }
    return {
        "tags": ["openai"],
        "summary": "Embeddings",
        "operationId": "embeddings",
        "description": "Vectors for texts or tokens, as OpenAI's clients ask for them.",
        "parameters": [TIMEOUT],
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {
            "200": {"description": "The vectors, in order.", "content": {"application/json": {"schema": answer}}}
        },
    }
