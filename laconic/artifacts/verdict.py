"""What was compared with what, and how it came out."""

from pydantic import BaseModel, ConfigDict

ENGINE = "engine"
"""The subject of the comparison of the engine with the graph run node by node."""


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
