"""A step of a model on its way from the original to the HTTP response."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from laconic.arrays import Arrays
from laconic.artifacts.parity_ledger import Divergence
from laconic.runtimes.runtime import Session

Explain = Callable[[Sequence[Arrays]], Divergence]
"""Finds where a step diverges from the one before it, given the inputs of each sample."""

FIDELITY, EXACTNESS, IDENTICAL = "fidelity", "exactness", "identical"
"""Figures: the task's measure, mean and worst; 1 minus the largest error, relative to the largest output; the share of
the samples whose outputs are the same to the bit."""


@dataclass(frozen=True)
class ModelStep:
    """One form of the model.

    name: of the step. ran: the model, and what runs it. open: opens it; None for a step that is left out, and `skipped`
    says why. before: the names of the steps that `required` is meant against. required, required_of_original: the least
    value of each figure, against the step before and against the original. explain: finds where it diverges.
    """

    name: str
    ran: str
    open: Callable[[], AbstractContextManager[Session]] | None = None
    skipped: str = ""
    before: tuple[str, ...] = ()
    required: Mapping[str, float] = field(default_factory=dict)
    required_of_original: Mapping[str, float] = field(default_factory=dict)
    explain: Explain | None = None


@dataclass(frozen=True)
class Serving:
    """How an artifact is served, given by the package that serves.

    lay_out: wraps a session, so that it is given its batches as the server lays them out. open: starts a server of the
    artifact, and a session that sends it requests over HTTP.
    """

    lay_out: Callable[[Session], Session]
    open: Callable[[], AbstractContextManager[Session]]
