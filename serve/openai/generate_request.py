"""Requests of the generate extension of the V2 protocol, as continuations of a text in OpenAI's API."""

from typing import Any

from laconic.errors import InputError
from serve.openai.completion_request import CompletionRequest

FIELDS = ("id", "text_input", "parameters")
"""The fields of a request."""
PARAMETERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "seed",
    "echo",
)
"""The parameters of a request, as those of a completion in OpenAI's API."""


class GenerateRequest(CompletionRequest):
    """A text that is to be continued. id: as the answer has it."""

    id: str | None = None


def read_generate_request(content: Any, *, model: str, is_stream: bool) -> GenerateRequest:
    """Read a request. content: of its body. Raises InputError."""
    if not isinstance(content, dict) or set(content) - set(FIELDS):
        raise InputError(f"the request must be an object of {', '.join(FIELDS)}, and nothing else")
    text, parameters = content.get("text_input"), content.get("parameters") or {}
    if not isinstance(text, str):
        raise InputError("'text_input' must be there, and a text")
    if not isinstance(parameters, dict):
        raise InputError(f"'parameters' is an object, not {type(parameters).__name__}")
    if unknown := sorted(set(parameters) - set(PARAMETERS)):
        raise InputError(f"unknown parameter {unknown[0][:40]!r}; this server knows {', '.join(PARAMETERS)}")
    head = {"model": model, "prompt": text, "id": content.get("id"), "stream": is_stream}
    return GenerateRequest.read(head | parameters)
