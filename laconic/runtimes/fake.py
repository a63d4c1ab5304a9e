"""A fake engine for tests, Laconic's own and those of projects that build on it.

Its model file is JSON: {"input": "x", "output": "y", "factor": 2.0}, and the output is the input times the factor.
"seconds" makes each run last that long; a row that contains the value "poison" makes the whole run fail, and one that
contains the value "stuck" makes it never return.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from laconic.arrays import Array, Arrays
from laconic.config import explain
from laconic.errors import RuntimeFailure
from laconic.files import read_json
from laconic.runtimes.runtime import Compute, Runtime, Session


class FakeModel(BaseModel):
    """The content of a fake model file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: str = "x"
    output: str = "y"
    factor: float = 2.0
    seconds: float = 0.0
    poison: float | None = None
    stuck: float | None = None


class FakeSession(Session):
    """A loaded fake model. `batches` records the size of each batch that was run, for tests."""

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.batches: list[int] = []

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        if self.model.input not in inputs:
            raise RuntimeFailure(f"the fake engine takes {self.model.input!r}, not {sorted(inputs)}")
        x = inputs[self.model.input]
        self.batches.append(len(x))
        if self.model.seconds:  # to sleep for 0 s lets other threads run, too
            time.sleep(self.model.seconds)
        if self.model.poison is not None and (x == self.model.poison).any():
            raise RuntimeFailure(f"the fake engine was fed its poison, {self.model.poison}")
        while self.model.stuck is not None and (x == self.model.stuck).any():
            time.sleep(1)
        with np.errstate(all="ignore"):
            return {self.model.output: (x * self.model.factor).astype(x.dtype)}


class Fake(Runtime):
    """The fake engine."""

    name = "fake"
    package = "laconic"

    def version(self) -> str:
        return "1"

    def computes(self) -> tuple[Compute, ...]:
        return ("float32",)

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float32") -> FakeSession:
        try:
            return FakeSession(FakeModel.model_validate(read_json(model)))
        except ValidationError as error:
            raise RuntimeFailure(explain(error, f"{model} is not a model of the fake engine")) from None
        except (ValueError, OSError) as error:
            raise RuntimeFailure(f"{model} is not a model of the fake engine: {error}") from error
