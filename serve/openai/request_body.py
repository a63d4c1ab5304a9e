"""What the bodies of requests in OpenAI's API have in common: each field is checked, and a wrong one named."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from laconic.errors import InputError
from serve.requests.public_errors import InvalidParameter

UNKNOWN, MISSING = "extra_forbidden", "missing"
"""Pydantic's kinds of errors."""


class RequestPart(BaseModel):
    """An object in a request. `null` stands for a field that is not given."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class RequestBody(RequestPart):
    """A whole request. model: the name of the model that is asked."""

    model: str

    @classmethod
    def read(cls, content: Any) -> Self:
        """Read a request. Raises InvalidParameter with the name of the field that does not fit, InputError for what is
        no object."""
        if not isinstance(content, dict):
            raise InputError(f"the request must be an object, not {type(content).__name__}")
        try:
            request = cls.model_validate(content)
        except ValidationError as error:
            raise cls._explain(error) from None
        request.refuse_unsupported()
        return request

    @classmethod
    def _explain(cls, error: ValidationError) -> InvalidParameter:
        """Explain the first problem; of a field that takes several types, that of the last."""
        problems = error.errors(include_url=False, include_context=False)
        problem = [each for each in problems if each["loc"][:1] == problems[0]["loc"][:1]][-1]
        name = str(problem["loc"][0])[:40]
        if problem["type"] == UNKNOWN and len(problem["loc"]) == 1:
            known = ", ".join(sorted(cls.model_fields))
            return InvalidParameter(name, f"unknown parameter {name!r}; this server knows {known}")
        if problem["type"] == MISSING and len(problem["loc"]) == 1:
            return InvalidParameter(name, f"{name!r} is missing")
        if problem["type"] == UNKNOWN:
            return InvalidParameter(name, f"{name!r} does not fit: unknown field {str(problem['loc'][-1])[:40]!r}")
        return InvalidParameter(name, f"{name!r} does not fit: {problem['msg']}")

    def refuse_unsupported(self) -> None:
        """Raise InvalidParameter for what this server does not do."""
