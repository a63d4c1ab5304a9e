"""The fidelity that is required of an artifact."""

from pydantic import BaseModel, ConfigDict

from laconic.arrays import Array

LOWEST_AGREEMENT = 0.5
"""However low the goal, half of what the original's answers say must be left."""


class Tolerance(BaseModel):
    """The least fidelity of an artifact to the original: the mean over samples, and the worst one (1 = identical).

    slack: how many times as far from 1 as by default the agreements of a task may be; 0 where none is required.
    max_divergence: the largest mean divergence, where it is bounded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float
    worst: float | None = None
    slack: float = 1.0
    max_divergence: float | None = None

    def met_by(self, fidelity: Array) -> bool:
        """Return whether the mean, and the worst sample where it is bounded, are high enough. fidelity: [samples]."""
        return bool(fidelity.mean() >= self.mean and (self.worst is None or fidelity.min() >= self.worst))

    def loosen(self, least: float) -> float:
        """Return the least value of an agreement by this tolerance, from that by the default one; at least
        LOWEST_AGREEMENT where any is required."""
        return max(1 - self.slack * (1 - least), min(LOWEST_AGREEMENT, least)) if self.slack and least else 0.0

    def describe(self) -> str:
        """Format the tolerance, as in `mean >= 0.99, worst >= 0.95`."""
        worst = "" if self.worst is None else f", worst >= {self.worst:g}"
        return f"mean >= {self.mean:g}{worst}"
