"""The outputs that a verdict is derived from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from laconic.arrays import Arrays
from laconic.quantization.graph import EXACTNESS
from laconic.tasks.answer_comparison import Labels

Describe = Callable[[int], str]
"""Takes the place of a sample, and says where it comes from."""


def describe_test_sample(index: int) -> str:
    """Say which test sample it is, where no file is known."""
    return f"test sample {index + 1}"


class GraphDeviation(NamedTuple):
    """How far a float graph is from the model that it was made from.

    error: the largest, relative to the largest output. node: of the file from which on it differs; empty where that is
    not known. exactness: 1 minus the largest error that is allowed.
    """

    error: float
    node: str = ""
    exactness: float = EXACTNESS


@dataclass(frozen=True)
class Evidence:
    """The outputs that a verdict is derived from, each [samples, ...] by name.

    deviation: of the float graph from the module or the file that it was made from; None if it is the source itself.
    original: the source's outputs for the test samples; artifact: the engine's outputs for them; labels: of the test
    samples, if there are any. For a few of the samples, plain: outputs of the artifact's graph run node by node; alone:
    of the engine, one sample at a time; together: of the engine, in one batch. golden_agreement: the lowest of an
    output of the graph run node by node with the engine's golden one. basis: what the test samples are, where they are
    no unseen ones. kinds: of the test samples, by the rows that name one; empty where none does. per_row: adjacent test
    samples that are one row of a file. reference: whether the engine is not on this machine, so that all of the
    artifact's outputs are those of its graph run node by node. original_name: what the artifact is compared with, for
    readers. describe: says where a test sample comes from.
    """

    deviation: GraphDeviation | None
    original: Arrays
    artifact: Arrays
    labels: Labels
    plain: Arrays
    alone: Arrays
    together: Arrays
    golden_agreement: float = 1.0
    basis: str = ""
    kinds: tuple[str, ...] = ()
    per_row: int = 1
    reference: bool = False
    original_name: str = "original"
    describe: Describe = describe_test_sample
