"""What clients learn of an error."""

import logging

from laconic.errors import InputError, LaconicError

log = logging.getLogger("laconic.serve")


class ContextOverflow(InputError):
    """A prompt and its answer are longer than the model's context."""


class InvalidParameter(InputError):
    """A parameter of a request does not fit. parameter: its name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def to_public_error(error: BaseException) -> LaconicError:
    """Return the error that clients are shown. One that nobody raised on purpose is logged, and its text, which may
    hold anything, is left out."""
    if isinstance(error, LaconicError):
        return error
    log.error("a request failed", exc_info=error)
    return LaconicError("the server failed on this request; its log says why")
