"""The parity ledger: each step of a model, compared with the step before it and with the original."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from laconic.artifacts.verdict import Comparison


class Divergence(BaseModel):
    """What is known of the cause of a miss.

    says: a sentence for people. layer: the module path of the first layer that diverges; tensor: the one that it
    computes; error: its relative error; allowed: the largest one that is explained. All four are None where no layer
    can be named.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    says: str
    layer: str | None = None
    tensor: str | None = None
    error: float | None = None
    allowed: float | None = None


class ParityRow(BaseModel):
    """A step of the ledger.

    step: its name. ran: the model, and what ran it. comparisons: with the step before it, and with the original where
    that is another one; empty for the original and for a step that was not run. skipped: why the step was left out.
    refused: why it did not run, which is a miss. divergence: where a missed step begins to compute something else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: str
    ran: str
    comparisons: tuple[Comparison, ...] = ()
    skipped: str = ""
    refused: str = ""
    divergence: Divergence | None = None

    @property
    def passed(self) -> bool:
        """Whether the step was left out, or ran and every figure reaches its required value."""
        return not self.refused and all(comparison.passed for comparison in self.comparisons)


class ParityLedger(BaseModel):
    """The rows of an artifact.

    artifact: its name. samples: their number; data: what they are. bounded: whether the loss of fidelity must keep
    within what the verdict required. On made-up samples it must only if the artifact was made with such, since values
    beyond the calibrated ranges are clipped.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    artifact: str
    samples: int
    data: str
    bounded: bool
    rows: tuple[ParityRow, ...]

    @property
    def missed(self) -> list[str]:
        """The steps that did not pass."""
        return [row.step for row in self.rows if not row.passed]

    def plain(self) -> dict[str, Any]:
        """Return the ledger, JSON-ready, with whether each row and each comparison passed. A figure that is no number
        is null."""
        content: dict[str, Any] = json.loads(self.model_dump_json())
        for row, source in zip(content["rows"], self.rows, strict=True):
            row["passed"] = None if source.skipped else source.passed
            for comparison, each in zip(row["comparisons"], source.comparisons, strict=True):
                comparison["passed"] = each.passed
        return content | {"passed": not self.missed}
