"""The verdict of an artifact: its parity and drift checks, with the figures found and required."""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

ENGINE = "engine"
"""The subject of the parity check of the engine against the graph run node by node."""


class Comparison(BaseModel):
    """One comparison of two models' outputs on the same samples.

    figures: each figure by name; a fidelity of 1 means identical outputs. intervals: 95 % confidence interval of a
    figure. required: the lowest value allowed for a figure.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: str
    against: str
    samples: int
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]] = {}
    required: dict[str, float] = {}

    @model_validator(mode="after")
    def _required_are_figures(self) -> Self:
        if missing := self.required.keys() - self.figures.keys():
            raise ValueError(f"{', '.join(sorted(missing))} is required, and not among the figures")
        return self

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
        """Whether every figure reaches its required value."""
        return not self.failures


class Verdict(BaseModel):
    """Whether the artifact's outputs match the original's.

    parity: checks of steps that must not change outputs, with tight tolerances: the captured graph against the module,
    the engine against the graph run node by node. drift: the artifact against the original model, in the task's
    figures, on held-out test samples: first on all of them, then on each kind of sample where the rows name kinds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parity: tuple[Comparison, ...]
    drift: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Whether there was at least one comparison, and all of them passed."""
        return not self.failures

    @property
    def by_reference(self) -> bool:
        """Whether the outputs are those of reference execution, since the engine was not on the machine."""
        return bool(self.drift) and all(each.subject != ENGINE for each in self.parity)

    @property
    def out_of_domain(self) -> list[str]:
        """A sentence for each kind of sample on which the mean fidelity is below what is required on all samples."""
        whole, kinds = self.drift[:1], self.drift[1:]
        least = max((each.required.get("fidelity", 0.0) for each in whole), default=0.0)
        return [
            f"out-of-domain: {each.subject}: fidelity is {each.figures['fidelity']:.6g}, required on all is {least:.6g}"
            for each in kinds
            if each.figures.get("fidelity", least) < least
        ]

    @property
    def failures(self) -> list[str]:
        """A sentence for each figure that is too low, or one saying that nothing was compared."""
        comparisons = (*self.parity, *self.drift)
        if not comparisons:
            return ["nothing was compared"]
        return [
            f"{comparison.subject} against {comparison.against}: {failure}"
            for comparison in comparisons
            for failure in comparison.failures
        ]
