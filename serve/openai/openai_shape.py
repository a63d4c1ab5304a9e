"""Errors in the shape of OpenAI's API."""

from typing import Any

from laconic.errors import LaconicError
from serve.asgi.wire import Answer, retry_headers, to_json
from serve.requests.public_errors import ContextOverflow, InvalidParameter, to_public_error

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""The type of an error, by its status."""
CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
OVERFLOW = "context_length_exceeded"


def to_openai_answer(error: BaseException) -> Answer:
    """Make the answer that tells a client about an error."""
    public = to_public_error(error)
    return Answer(to_json(describe_openai_error(public)), public.status, headers=retry_headers(public))


def describe_openai_error(public: LaconicError) -> dict[str, Any]:
    """Describe an error to a client: `{"error": {...}}`."""
    kind = KINDS.get(public.status, "invalid_request_error" if public.status < 500 else "server_error")
    parameter = public.parameter if isinstance(public, InvalidParameter) else None
    code = OVERFLOW if isinstance(public, ContextOverflow) else CODES.get(public.status)
    return {"error": {"message": str(public), "type": kind, "param": parameter, "code": code}}
