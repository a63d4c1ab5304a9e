"""A record in a model's history: one stage, and the key that addresses its result in the cache."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A stage that was applied, its settings, and its effect on the model.

    key: hash of the parent's key, the stage, its config, the code's version, the data and the weights. figures:
    fidelity and sizes after the stage. structure: what `rebuild` needs to apply the same structural change to a module
    without weights, and what later stages must know, JSON-ready. Durations are kept with the measurements, since they
    differ from run to run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    config: dict[str, Any]
    key: str
    figures: dict[str, float] = {}
    structure: dict[str, Any] = {}
