"""The OpenAPI description of the server, with the routes of each model that it serves now."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from serve.http.operation_schema import (
    REFERENCE,
    STRING,
    describe_embeddings,
    describe_generate,
    describe_infer,
    describe_predict,
    describe_rerank,
    describe_text,
    describe_transcription,
    make_object,
)
from serve.model_repository.model import Model
from serve.model_repository.repository import Repository
from serve.openai.chat_request import ChatRequest
from serve.openai.completion_request import CompletionRequest
from serve.openai.rerank_request import RerankRequest
from serve.openai.transcription_request import TranscribingTask

NULLABLE = {"type": ["string", "null"]}
ERROR = make_object({"error": STRING})
OPENAI_ERROR = make_object(
    {"error": make_object({"message": STRING, "type": STRING, "param": NULLABLE, "code": NULLABLE})}
)
TEXTS = {
    400: "The request does not fit; the text says how.",
    401: "The request has no key, or an unknown one.",
    403: "A web page of another origin sent the request.",
    404: "There is no such model or route.",
    405: "The route takes another method.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is in an unknown content coding.",
    421: "The request is for another host.",
    429: "The queue is full, or the rate of the key used up. Try again after `Retry-After` seconds.",
    431: "The headers are too large.",
    500: "The engine failed on this request.",
    503: "The server is stopping.",
    504: "The request's timeout passed while it waited.",
}


REQUESTS = (ChatRequest, CompletionRequest, RerankRequest)
"""The requests whose objects are described by name."""
SCHEMAS = {"V2": ERROR, "OpenAI": OPENAI_ERROR}
"""The bodies of errors, by the API."""


def refer_to_errors(api: str) -> dict[str, Any]:
    """Refer to the responses that are errors, by status."""
    return {str(status): {"$ref": f"#/components/responses/{api}{status}"} for status in TEXTS}


def describe_errors() -> dict[str, Any]:
    """Describe the responses that are errors, which operations refer to."""
    return {
        f"{api}{status}": {"description": text, "content": {"application/json": {"schema": schema}}}
        for api, schema in SCHEMAS.items()
        for status, text in TEXTS.items()
    }


INVALID = "422"
"""The status of FastAPI's own checks: no route of ours has any that can fail."""


def describe(app: FastAPI, repository: Repository) -> dict[str, Any]:
    """Describe FastAPI's routes, and those of the models."""
    schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    models = list(repository)
    paths = schema["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            operation["responses"].pop(INVALID, None)
            for parameter in operation.get("parameters", ()):
                if path.startswith(("/v1/models/", "/v2/models/")):
                    parameter["schema"] |= describe_parameter(parameter["name"], models)
            operation["responses"] |= refer_to_errors("OpenAI" if path.startswith("/v1/") else "V2")
    schema["components"] = {"responses": describe_errors()}
    if any(model.text_writer is not None or model.task.ranks for model in models):
        schema["components"]["schemas"] = describe_parts_of_requests()
    paths |= {path: {"post": operation} for path, operation in describe_models(models)}
    return schema


def describe_parameter(name: str, models: list[Model]) -> dict[str, Any]:
    """Describe what is known of a parameter in the path of a model: the names, and the versions."""
    known = {"name": {model.name for model in models}, "version": {model.version for model in models}}
    return {"enum": sorted(known[name])}


def describe_models(models: list[Model]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Describe the operations of models, by path. models: all versions, the newest of each last; adapters only
    write."""
    computing = [model for model in models if not model.only_writes]
    for model in computing:
        name, versioned = quote(model.name), f"_{model.version}"
        yield f"/v2/models/{name}/versions/{model.version}/infer", with_errors(describe_infer(model, versioned))
    for model in {model.name: model for model in computing}.values():
        name = quote(model.name)
        yield f"/v2/models/{name}/infer", with_errors(describe_infer(model))
        yield f"/v1/models/{name}/predict", with_errors(describe_predict(model))
    newest = {model.name: model for model in models}
    if embedding := [model for model in newest.values() if model.task.embeds]:
        yield "/v1/embeddings", with_errors(describe_embeddings(embedding), "OpenAI")
    if ranking := [model for model in newest.values() if model.task.ranks]:
        yield "/v1/rerank", with_errors(describe_rerank(ranking), "OpenAI")
    if transcribing := [model for model in newest.values() if isinstance(model.task, TranscribingTask)]:
        yield "/v1/audio/transcriptions", with_errors(describe_transcription(transcribing), "OpenAI")
    if writing := [model for model in newest.values() if model.text_writer is not None]:
        chat = {"messages": [{"role": "user", "content": "Hello."}]}
        yield (
            "/v1/chat/completions",
            with_errors(describe_text(writing, ChatRequest, chat, "Chat", "The next message of a chat."), "OpenAI"),
        )
        for model in writing:
            name = quote(model.name)
            yield f"/v2/models/{name}/generate", with_errors(describe_generate(model, is_stream=False))
            yield f"/v2/models/{name}/generate_stream", with_errors(describe_generate(model, is_stream=True))
        text = {"prompt": "Once upon a time"}
        yield (
            "/v1/completions",
            with_errors(
                describe_text(writing, CompletionRequest, text, "Continue", "The continuation of a text."), "OpenAI"
            ),
        )


def describe_parts_of_requests() -> dict[str, Any]:
    """Describe the objects within requests, by name."""
    schemas = [request.model_json_schema(ref_template=REFERENCE) for request in REQUESTS]
    return {name: part for schema in schemas for name, part in schema.get("$defs", {}).items()}


def with_errors(operation: dict[str, Any], api: str = "V2") -> dict[str, Any]:
    """Return the operation with its errors."""
    return operation | {"responses": operation["responses"] | refer_to_errors(api)}
