"""The OpenAPI operations of a model, which are no FastAPI routes: what exactly this model takes and gives."""

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.tensor import TensorSpec, describe_array, describe_number
from serve.asgi.body import parse
from serve.asgi.wire import to_json
from serve.model_repository.model import Model
from serve.openai.completion_request import CompletionRequest
from serve.openai.generate_request import PARAMETERS as PARAMETERS_OF_TEXT
from serve.openai.rerank_request import RerankRequest
from serve.openai.text_request import TextRequest
from serve.openai.transcription_request import TranscriptionRequest
from serve.protocol.infer_request import describe_tensor

Schema = dict[str, Any]
"""A JSON Schema, or another part of an OpenAPI document."""

STRING, NUMBER, INTEGER = ({"type": kind} for kind in ("string", "number", "integer"))
BINARY = {"type": "string", "format": "binary"}
RAW = {"schema": BINARY}
LONGEST_EXAMPLE = 2000
"""Characters. A longer example request is left out."""
EXAMPLE_LENGTH = 4
"""Tokens of an example request."""
PARAMETERS = {"type": "object"}
REFERENCE = "#/components/schemas/{model}"
"""How schemas refer to one another."""
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


def describe_infer(model: Model, version: str = "") -> Schema:
    """Describe V2 inference with a model. version: what the path has of it, for the name of the operation."""
    arrays = model.task.typical(1, EXAMPLE_LENGTH)
    example = [
        describe_tensor(spec) | {"shape": arrays[spec.name].shape, "data": arrays[spec.name].ravel()}
        for spec in model.inputs
    ]
    request = add_example(describe_request(model), {"inputs": example})
    return describe_operation(
        model.name,
        f"Infer with {model.name}",
        f"infer_{model.name}{version}",
        "Tensors in, tensors out: the KServe V2 protocol, in JSON or with its binary extension.",
        {"application/json": {"schema": request}, "application/octet-stream": RAW},
        "The outputs.",
        {"application/json": {"schema": describe_response(model)}, "application/octet-stream": RAW},
        HEADER_LENGTH,
    )


def describe_predict(model: Model) -> Schema:
    """Describe the task endpoint of a model."""
    answers = {"model": make_choice([model.name]), "answers": make_array({}, minItems=1)}
    return describe_operation(
        model.name,
        f"Predict with {model.name}",
        f"predict_{model.name}",
        f"Answers for raw samples, by the task {model.task.name}.",
        describe_samples(model),
        "One answer per sample, in order.",
        {"application/json": {"schema": make_object(answers)}},
    )


def describe_embeddings(models: Sequence[Model]) -> Schema:
    """Describe OpenAI's embeddings API. models: those that embed."""
    tokens = make_array({"type": "integer", "minimum": 0}, minItems=1)
    widths = sorted({width for model in models if isinstance(width := model.outputs[0].shape[-1], int)})
    fields = {
        "model": make_choice([model.name for model in models]),
        "input": {"anyOf": [STRING, make_array(STRING, minItems=1), tokens, make_array(tokens, minItems=1)]},
        "encoding_format": make_choice(["float", "base64"]),
        "user": STRING,
        **({"dimensions": {"type": "integer", "enum": widths}} if widths else {}),
    }
    request = make_object(fields, ("model", "input"), additionalProperties=False) | {
        "example": {"model": models[0].name, "input": ["Hello there."]}
    }
    vector = {"anyOf": [make_array(NUMBER), {"type": "string", "contentEncoding": "base64"}]}
    embedding = make_object({"object": make_choice(["embedding"]), "index": INTEGER, "embedding": vector})
    usage = {"type": "object", "additionalProperties": INTEGER}
    answer = make_object(
        {"object": make_choice(["list"]), "data": make_array(embedding), "model": STRING, "usage": usage}
    )
    return describe_operation(
        "openai",
        "Embeddings",
        "embeddings",
        "Vectors for texts or tokens, as OpenAI's clients ask for them.",
        {"application/json": {"schema": request}},
        "The vectors, in order.",
        {"application/json": {"schema": answer}},
    )


def describe_text(
    models: Sequence[Model], request: type[TextRequest], prompt: Schema, summary: str, description: str
) -> Schema:
    """Describe a route of OpenAI's API for text. models: those that write. prompt: an example."""
    schema = request.model_json_schema(ref_template=REFERENCE)
    schema.pop("$defs", None)
    schema["properties"]["model"] = make_choice([model.name for model in models])
    schema["example"] = {"model": models[0].name, **prompt, "max_tokens": 32}
    answer = {"type": "object"}
    return describe_operation(
        "openai",
        summary,
        request.__name__,
        description,
        {"application/json": {"schema": schema}},
        "The answer; with `stream`, its chunks as server-sent events.",
        {"application/json": {"schema": answer}, "text/event-stream": {}},
    )


def describe_rerank(models: Sequence[Model]) -> Schema:
    """Describe the ranking of documents. models: those that rank."""
    schema = RerankRequest.model_json_schema(ref_template=REFERENCE)
    schema.pop("$defs", None)
    schema["properties"]["model"] = make_choice([model.name for model in models])
    schema["example"] = {"model": models[0].name, "query": "Where do cats sleep?", "documents": ["On a warm mat."]}
    result = make_object({"index": INTEGER, "relevance_score": NUMBER}, additionalProperties=True)
    fields = {"object": make_choice(["list"]), "model": STRING, "results": make_array(result), "usage": PARAMETERS}
    return describe_operation(
        "openai",
        "Rerank",
        "rerank",
        "Documents by how well they answer a query.",
        {"application/json": {"schema": schema}},
        "The results, best first.",
        {"application/json": {"schema": make_object(fields)}},
    )


def describe_transcription(models: Sequence[Model]) -> Schema:
    """Describe what is said in a recording. models: those that write it down."""
    schema = TranscriptionRequest.model_json_schema()
    schema["properties"] |= {"model": make_choice([model.name for model in models]), "file": BINARY}
    return describe_operation(
        "openai",
        "Transcribe",
        "transcribe",
        "What is said in a recording of any length, which is read in windows, or divided where it is quiet.",
        {"multipart/form-data": {"schema": schema}},
        "The text, with the times of its segments where the format has them.",
        {"application/json": {"schema": make_object({"text": STRING}, additionalProperties=True)}, "text/plain": {}},
    )


def describe_generate(model: Model, *, is_stream: bool) -> Schema:
    """Describe the generate extension of the V2 protocol for a model. is_stream: its answer in events."""
    known = CompletionRequest.model_json_schema(ref_template=REFERENCE)["properties"]
    parameters = make_object({name: known[name] for name in PARAMETERS_OF_TEXT}, [], additionalProperties=False)
    fields = {"id": STRING, "text_input": STRING, "parameters": parameters}
    request = make_object(fields, ["text_input"], additionalProperties=False) | {
        "example": {"text_input": "Once upon a time", "parameters": {"max_tokens": 32}}
    }
    names = {"model_name": make_choice([model.name]), "model_version": STRING, "text_output": STRING}
    return describe_operation(
        model.name,
        f"{'Stream' if is_stream else 'Generate'} with {model.name}",
        f"generate{'_stream' if is_stream else ''}_{model.name}",
        "The continuation of a text: the generate extension of the V2 protocol.",
        {"application/json": {"schema": request}},
        "The text; in a stream, a part of it in each event.",
        {"text/event-stream": {}} if is_stream else {"application/json": {"schema": make_object(names)}},
    )


def describe_operation(
    tag: str,
    summary: str,
    identifier: str,
    description: str,
    request: Schema,
    result: str,
    response: Schema,
    *headers: Schema,
) -> Schema:
    """Describe an operation. request, response: by content type. result: what a response holds, as a sentence. headers:
    of a request, besides its timeout."""
    return {
        "tags": [tag],
        "summary": summary,
        "operationId": identifier,
        "description": description,
        "parameters": [TIMEOUT, *headers],
        "requestBody": {"required": True, "content": request},
        "responses": {"200": {"description": result, "content": response}},
    }


def make_object(properties: Schema, required: Sequence[str] | None = None, **keywords: Any) -> Schema:
    """Make the schema of an object. required: all of its properties where None."""
    names = list(properties if required is None else required)
    return {"type": "object", "properties": properties, "required": names, **keywords}


def make_array(items: Schema, **keywords: Any) -> Schema:
    """Make the schema of a list."""
    return {"type": "array", "items": items, **keywords}


def make_choice(values: Sequence[str]) -> Schema:
    """Make the schema of one of several strings."""
    return {"type": "string", "enum": list(values)}


def add_example(schema: Schema, request: Mapping[str, Any]) -> Schema:
    """Add an example to the schema of a request, unless it is too long."""
    example = to_json(request)
    return schema | ({"example": parse(example)} if len(example) <= LONGEST_EXAMPLE else {})


def describe_request(model: Model) -> Schema:
    """Make the schema of a request: each input once, and any of the outputs."""
    names, count = [spec.name for spec in model.outputs], len(model.inputs)
    inputs = {"anyOf": [describe_input(spec) for spec in model.inputs]}
    output = make_object({"name": make_choice(names), "parameters": PARAMETERS}, ["name"])
    fields = {
        "id": STRING,
        "parameters": PARAMETERS,
        "inputs": make_array(inputs, minItems=count, maxItems=count),
        "outputs": make_array(output, maxItems=len(names)),
    }
    return make_object(fields, ["inputs"])


def describe_input(spec: TensorSpec) -> Schema:
    """Make the schema of an input: its data flat, or nested as its shape."""
    flat = make_array(describe_number(spec.dtype), minItems=1)
    data = {"anyOf": [flat, describe_array(spec.dtype, spec.shape, spec.bounds)]}
    return describe_parts(spec, {"data": data, "parameters": PARAMETERS})


def describe_response(model: Model) -> Schema:
    """Make the schema of a response."""
    outputs = [describe_parts(spec, {"data": make_array(describe_number(spec.dtype))}) for spec in model.outputs]
    fields = {
        "model_name": make_choice([model.name]),
        "model_version": STRING,
        "id": STRING,
        "outputs": make_array({"anyOf": outputs}),
    }
    return make_object(fields, ["model_name", "model_version", "outputs"])


def describe_parts(spec: TensorSpec, optional: Schema) -> Schema:
    """Make the schema of a tensor with name, datatype and shape. optional: further properties."""
    tensor, rank = describe_tensor(spec), len(spec.shape)
    axes = [axis if isinstance(axis, int) else describe_axis(axis, spec) for axis in spec.shape]
    shape = {
        "description": f"[{', '.join(map(str, axes))}]",
        **make_array({"type": "integer", "minimum": 1}, minItems=rank, maxItems=rank),
    }
    parts = {"name": make_choice([tensor["name"]]), "datatype": make_choice([tensor["datatype"]]), "shape": shape}
    return make_object(parts | optional, list(parts))


def describe_axis(axis: str, spec: TensorSpec) -> str:
    """Format a free axis with its bounds, as `seq: 1 to 256`."""
    if axis not in spec.bounds:
        return axis
    low, high = spec.bounds[axis]
    return f"{axis}: {low} to {high}"


def describe_samples(model: Model) -> Schema:
    """Describe the content types of samples: JSON, a form, and files where the task takes them."""
    task = model.task
    sample = task.sample_schema()
    # A list is a list of samples, so that a sample which is a list stands in one.
    alone = [form for form in sample.get("anyOf", [sample]) if form.get("type") != "array"]
    field = {
        "description": task.field_description,
        "anyOf": [*alone, make_array(sample, minItems=1, maxItems=model.settings.max_rows)],
    }
    schema = add_example(make_object({task.field: field}, additionalProperties=False), task.example_request())
    form = make_object({task.field: BINARY if task.upload else STRING})
    uploads = {task.upload.content_type: RAW} if task.upload else {}
    return {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}, **uploads}
