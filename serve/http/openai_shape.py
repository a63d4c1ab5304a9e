"""Errors in the shape of OpenAI's API."""

from laconic.errors import InputError
from serve.asgi.wire import Answer, as_told, retry_headers, to_json

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""The type of an error, by its status."""
CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class InvalidParameter(InputError):
    """A parameter of a request does not fit. parameter: its name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def to_openai_answer(error: BaseException) -> Answer:
    """What a client is told about an error."""
    told = as_told(error)
    kind = KINDS.get(told.status, "invalid_request_error" if told.status < 500 else "server_error")
    parameter = told.parameter if isinstance(told, InvalidParameter) else None
    described = {"message": str(told), "type": kind, "param": parameter, "code": CODES.get(told.status)}
    return Answer(to_json({"error": described}), told.status, headers=retry_headers(told))
