"""The draft model of an artifact: a smaller model whose tokens the artifact's own model checks."""

from pydantic import BaseModel, ConfigDict

from laconic.runtimes.runtime import Compute

DRAFT = "draft.onnx"


class Draft(BaseModel):
    """A draft model, in an artifact because texts that are written alone came faster with it where it was built.

    model: the name of its file. compute: its arithmetic. beats_paged: whether they also came faster than from paged
    attention, so that it writes them all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    compute: Compute
    beats_paged: bool = False
