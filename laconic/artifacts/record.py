"""One step of a model's history, and the key that addresses its result."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """What was done, with which settings, and what it changed.

    key: hash of the parent's key, the stage, its config, the code's version, the data and the weights. figures: what
    was counted after the step. structure: what `rebuild` needs to do the same to an empty module, and whatever else
    later steps must know of this one, JSON-ready. Seconds are not in here: they differ from run to run, and live with
    what was timed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    config: dict[str, Any]
    key: str
    figures: dict[str, float] = {}
    structure: dict[str, Any] = {}
