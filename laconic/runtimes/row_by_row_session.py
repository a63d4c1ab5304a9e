"""A session of a model that takes a single row."""

from collections.abc import Iterable, Mapping, Sequence

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
        return (
            answers[0] if rows == 1 else {name: np.concatenate([each[name] for each in answers]) for name in answers[0]}
        )

    def kernels(self) -> list[Kernel]:
        return self.session.kernels()

    def close(self) -> None:
        self.session.close()


def open_row_by_row(session: Session, shapes: Iterable[Sequence[object]]) -> Session:
    """Return the session, or one that runs batches row by row where the model takes a single row.

    shapes: of the model's inputs; an integer is a fixed size.
    """
    firsts = [shape[0] if len(shape) else None for shape in shapes]
    return RowByRowSession(session) if firsts and all(first == 1 for first in firsts) else session
