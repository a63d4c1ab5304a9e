"""Every expected error, with its exit code and its HTTP status.

LaconicError                    1  500   base class: an error that the user can act on
├── UsageError                  2  400   the request is wrong
│   ├── RecipeError                      the recipe is unreadable or inconsistent
│   ├── SourceError                      the source is missing, damaged or of another kind
│   │   └── UntrustedSource              loading the source would execute code, and --trust was not given
│   ├── UntrustedCode                    a recipe names code by its address, and --trust was not given
│   ├── DataError                        a data file is unreadable, or a row does not fit the task
│   ├── InputError                       a tensor does not match the signature
│   ├── FormatRefused                    a format of weights cannot hold them, or is not read
│   ├── ArtifactError                    the artifact is missing or unreadable
│   │   ├── CorruptArtifact              a file differs from the one that was written
│   │   ├── UnknownFormat                the artifact has a format that this version does not support
│   │   ├── UnprovenArtifact             the verdict failed or is missing
│   │   └── UnsignedArtifact             the signature is missing, or is not of this key and these files
│   └── MissingPackage                   a required package is not installed
├── CaptureError                1  500   the model cannot be captured as a graph
├── UnsupportedPrecision        1  500   the target has no kernel for the requested precision
├── RuntimeFailure              1  500   an engine refused a model or an input
├── TrainingFailure             1  500   training cannot continue: the loss is not finite
│   └── OutOfMemory                      a training step needs more memory than there is
├── PruningError                1  500   the pruned model differs from the original with the pruned parts masked
├── GoalMissed                  3  500   the goal or the tolerance was not met; the best result is kept
├── UnknownModel                2  404   no model of that name is served
├── Overloaded                  1  429   the request queue is full
├── NotReady                    1  503   the model is loading or stopping
└── DeadlineExceeded            1  504   the request could not be answered before its deadline

A message states what happened, what was expected, and what to try.
"""

import difflib
from collections.abc import Collection, Iterable

INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a program or a generator on purpose. Any other BaseException is a fault as an Exception is: PyO3 raises the
panic of a library in Rust, such as `tokenizers`, as a BaseException."""


class LaconicError(Exception):
    """Base class of the errors that a user can act on."""

    exit_code = 1
    status = 500


class UsageError(LaconicError):
    """The request is wrong."""

    exit_code = 2
    status = 400


class RecipeError(UsageError):
    """The recipe is unreadable or inconsistent."""


class SourceError(UsageError):
    """The source is missing, damaged or of another kind than expected."""


class UntrustedSource(SourceError):
    """Loading the source would execute code that it carries."""


class UntrustedCode(UsageError):
    """A recipe names code by its address."""


class DataError(UsageError):
    """A data file is unreadable, or one of its rows does not fit the task."""


class InputError(UsageError):
    """A tensor does not match the signature."""


class FormatRefused(UsageError):
    """A format of quantized weights cannot hold what was to be written, or is not read."""


class ArtifactError(UsageError):
    """The artifact is missing or unreadable."""


class CorruptArtifact(ArtifactError):
    """A file of the artifact differs from the one that was written."""


class UnknownFormat(ArtifactError):
    """The artifact has a format that this version does not support."""


class UnprovenArtifact(ArtifactError):
    """The artifact's verdict failed or is missing."""


class UnsignedArtifact(ArtifactError):
    """The artifact's signature is missing, or is not one of this key over these files."""


class MissingPackage(UsageError):
    """A required package is not installed."""


class CaptureError(LaconicError):
    """The model cannot be captured as a graph."""


class UnsupportedPrecision(LaconicError):
    """The target has no kernel for the requested precision.

    layers: the nodes that it lacks kernels for, where it has them for others.
    """

    def __init__(self, message: str, layers: Collection[str] = ()) -> None:
        super().__init__(message)
        self.layers = layers


class RuntimeFailure(LaconicError):
    """An engine refused a model or an input."""


class TrainingFailure(LaconicError):
    """Training cannot continue."""


class OutOfMemory(TrainingFailure):
    """A training step needs more memory than there is."""


class PruningError(LaconicError):
    """A pruned model does not compute what the original computes with the pruned parts masked."""


class GoalMissed(LaconicError):
    """The goal or the tolerance was not met; the best result is kept."""

    exit_code = 3


class UnknownModel(LaconicError):
    """No model of that name is served."""

    exit_code = 2
    status = 404


class Overloaded(LaconicError):
    """The request queue is full. retry_after: seconds."""

    status = 429
    retry_after = 1


class NotReady(LaconicError):
    """The model is loading or stopping. retry_after: seconds."""

    status = 503
    retry_after = 1


class DeadlineExceeded(LaconicError):
    """The request could not be answered before its deadline."""

    status = 504


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line, which is never empty and can be written in UTF-8.

    The message of an expected error stands alone; any other is preceded by the name of its type.
    """
    text = " ".join(str(error).split())
    if not text or not isinstance(error, LaconicError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text.encode(errors="backslashreplace").decode()


def list_causes(error: BaseException | None) -> list[BaseException]:
    """List an exception and what caused it, each once: an exception can be among its own causes."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__
    return causes


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest known name, or lists all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
