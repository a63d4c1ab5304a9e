"""Every error that Laconic raises on purpose, with its exit code and its HTTP status.

LaconicError                    1  500   anything that a user can act upon
├── UsageError                  2  400   the request itself is wrong
│   ├── RecipeError                      the recipe does not read, or does not make sense
│   ├── SourceError                      the source is missing, damaged or of another kind
│   │   └── UntrustedSource              loading it would execute code, and nobody said --trust
│   ├── DataError                        a file of samples does not read, or a row does not fit
│   ├── InputError                       a tensor does not fit the signature
│   ├── ArtifactError                    the artifact is missing or not readable
│   │   ├── CorruptArtifact              a file is not the one that was written
│   │   ├── UnknownFormat                the artifact is of a format that this version does not know
│   │   └── UnprovenArtifact             its verdict failed or is missing
│   └── MissingPackage                   a package that this needs is not installed
├── CaptureError                1  500   the model cannot be turned into a graph
├── UnsupportedPrecision        1  500   the target has no kernel for the requested precision
├── RuntimeFailure              1  500   an engine refused a model or an input
├── TrainingFailure             1  500   training cannot go on: the loss is not a number
│   └── OutOfMemory                      a step needs more memory than there is
├── PruningError                   1  500   a smaller model does not compute what the larger one does without the cut parts
├── GoalMissed                  3  500   the goal or the tolerance was not met; the best result is kept
├── UnknownModel                2  404   no model of that name is served
├── Overloaded                  1  429   the queue is full
├── NotReady                    1  503   the model is loading or stopping
└── DeadlineExceeded            1  504   the answer would have come too late

A message says what happened, what was expected, and what to try.
"""


class LaconicError(Exception):
    """Anything that a user can act upon."""

    exit_code = 1
    status = 500


class UsageError(LaconicError):
    """The request itself is wrong."""

    exit_code = 2
    status = 400


class RecipeError(UsageError):
    """The recipe does not read, or does not make sense."""


class SourceError(UsageError):
    """The source is missing, damaged or of another kind than expected."""


class UntrustedSource(SourceError):
    """Loading the source would execute code that it carries."""


class DataError(UsageError):
    """A file of samples does not read, or one of its rows does not fit."""


class InputError(UsageError):
    """A tensor does not fit the signature."""


class ArtifactError(UsageError):
    """The artifact is missing or not readable."""


class CorruptArtifact(ArtifactError):
    """A file of the artifact is not the one that was written."""


class UnknownFormat(ArtifactError):
    """The artifact is of a format that this version does not know."""


class UnprovenArtifact(ArtifactError):
    """The artifact's verdict failed or is missing."""


class MissingPackage(UsageError):
    """A package that this needs is not installed."""


class CaptureError(LaconicError):
    """The model cannot be turned into a graph."""


class UnsupportedPrecision(LaconicError):
    """The target has no kernel for the requested precision."""


class RuntimeFailure(LaconicError):
    """An engine refused a model or an input."""


class TrainingFailure(LaconicError):
    """Training cannot go on."""


class OutOfMemory(TrainingFailure):
    """A step of training needs more memory than there is."""


class PruningError(LaconicError):
    """A smaller model does not compute what the larger one does without what was cut."""


class GoalMissed(LaconicError):
    """The goal or the tolerance was not met; the best result so far is kept."""

    exit_code = 3


class UnknownModel(LaconicError):
    """No model of that name is served."""

    exit_code = 2
    status = 404


class Overloaded(LaconicError):
    """The queue is full."""

    status = 429


class NotReady(LaconicError):
    """The model is loading or stopping."""

    status = 503


class DeadlineExceeded(LaconicError):
    """The answer would have come too late."""

    status = 504
