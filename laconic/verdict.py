"""What was compared with what, and how it came out."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from laconic.tensor import Arrays


class Comparison(BaseModel):
    """One comparison of two models on the same samples.

    figures: each figure by name, 1 = the same answers. intervals: 95 % interval of a figure. required: the lowest
    value allowed for a figure.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: str
    against: str
    samples: int
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]] = {}
    required: dict[str, float] = {}

    @property
    def failures(self) -> list[str]:
        """A sentence for each figure that is too low."""
        return [
            f"{name} is {self.figures[name]:.6g}, required {least:.6g}"
            for name, least in self.required.items()
            if not self.figures[name] >= least
        ]

    @property
    def passed(self) -> bool:
        """Whether every figure is high enough."""
        return not self.failures


class Verdict(BaseModel):
    """Whether the artifact gives the same answers.

    parity: the artifact against its own checkpoint, on the way that was meant to change nothing: the captured graph
    against the module, and the engine against the graph run node by node. Tight.
    drift: the artifact against the original model, on samples that no choice has seen, in the task's figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parity: tuple[Comparison, ...]
    drift: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Whether there was a comparison, and every one came out well."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        """A sentence for each figure that is too low, or for want of any comparison."""
        comparisons = (*self.parity, *self.drift)
        if not comparisons:
            return ["nothing was compared"]
        return [
            f"{comparison.subject} against {comparison.against}: {failure}"
            for comparison in comparisons
            for failure in comparison.failures
        ]


@dataclass(frozen=True)
class Evidence:
    """The answers that a verdict is found from, each [samples, ...] by output.

    capture_error: the captured graph's largest error against the module, relative to the largest output; None where
    the source was a graph. original: the source's answers to the samples set aside for judging; artifact: the engine's
    to the same; labels: theirs, where there are any. For a few of the samples, plain: the answers of the artifact's
    graph run node by node; alone: the engine's, one sample at a time; together: the engine's, in one batch. made_up:
    whether the samples are the task's own inventions, no samples having been given.
    """

    capture_error: float | None
    original: Arrays
    artifact: Arrays
    labels: list[Any] | None
    plain: Arrays
    alone: Arrays
    together: Arrays
    made_up: bool = False
