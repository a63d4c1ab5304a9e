"""A session of a model that takes a single row."""

from collections.abc import Mapping

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.runtimes.runtime import Kernel, Session


class RowByRowSession(Session):
    """A session that runs a batch row by row, for a model that takes a single row."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        rows = len(next(iter(inputs.values())))
        answers = [self.session.run({name: array[[row]] for name, array in inputs.items()}) for row in range(rows)]
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}

    def kernels(self) -> list[Kernel]:
        return self.session.kernels()

    def close(self) -> None:
        self.session.close()
