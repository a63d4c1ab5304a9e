"""The interface of a task."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from laconic.errors import CorruptArtifact, InputError
from laconic.metrics import Scorer
from laconic.tensor import Array, Arrays, TensorSpec

PREPROCESS = "preprocess.json"
TOKENIZER = "tokenizer.json"
LABELS = "labels.json"
PAIR = ("text1", "text2", "score")
"""The columns of a file of scored pairs."""


class Tolerance(BaseModel):
    """How faithful an artifact must be to the original, in the task's fidelity (1 = the same answers)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float
    worst: float | None = None

    def met_by(self, fidelity: Array) -> bool:
        """Whether the mean, and the worst sample where it counts, are high enough."""
        return bool(fidelity.mean() >= self.mean and (self.worst is None or fidelity.min() >= self.worst))

    def describe(self) -> str:
        """As people write it, `mean >= 0.99, worst >= 0.95`."""
        worst = "" if self.worst is None else f", worst >= {self.worst:g}"
        return f"mean >= {self.mean:g}{worst}"


class Task(ABC):
    """What a model is for.

    A sample is what `parse` gives: text, an image, arrays. `encode` makes one batch of tensors from samples, and
    `decode` makes one JSON answer per sample from the outputs.
    """

    name: ClassVar[str]
    tolerance: ClassVar[Tolerance]
    field: ClassVar[str]
    """The key under which people give a sample, in a file of samples and over HTTP."""
    metric: ClassVar[str]
    """The name of the figure that `scorer` gives."""
    takes_pairs: ClassVar[bool] = False
    """Whether a row of a file may be a scored pair: two samples, and a number that says how alike they are."""

    inputs: tuple[TensorSpec, ...]
    padding: dict[str, int]
    """What fills a free axis of each input up to the longest sample; empty where samples must be of one size."""

    @classmethod
    @abstractmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        """Read what `assets` wrote. Raises CorruptArtifact for a file that is missing or does not read."""

    @abstractmethod
    def assets(self) -> dict[str, bytes]:
        """The files that the task needs in the artifact, by name."""

    @abstractmethod
    def parse(self, value: Any) -> Any:
        """A sample from what people have: a row's field, JSON, bytes. Raises InputError."""

    def parse_label(self, value: Any) -> Any:
        """A label from what people have. Raises InputError or DataError for one that `scorer` cannot use."""
        return value

    @abstractmethod
    def encode(self, samples: Sequence[Any]) -> Arrays:
        """One batch of tensors, padded where lengths differ, the first axis being the samples."""

    @abstractmethod
    def decode(self, outputs: Arrays) -> list[Any]:
        """One answer per sample: JSON-ready but for arrays, which whoever writes the JSON prints at their own width."""

    @abstractmethod
    def examples(self, count: int, seed: int = 0) -> list[Any]:
        """Samples made up, varied, to trace, warm up and time with."""

    @abstractmethod
    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        """How faithful each answer is to its reference, [samples] float64, 1 = the same."""

    def length(self, sample: Any) -> int:
        """What a sample costs, for sorting samples into batches; equal for all unless they vary."""
        return 1

    def fragments(self, samples: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
        """Samples cut out of others, much smaller than they; none where samples have no parts.

        What a file holds is seldom as short as what a user types, and short samples have the largest activations.
        """
        return []

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        """A batch to time with: `batch` samples, the free axes `length` long where the bounds allow."""
        rng = np.random.default_rng(seed)
        sizes = {"batch": batch}
        for spec in self.inputs:
            for axis in spec.shape[1:]:
                if isinstance(axis, str):
                    low, high = spec.bounds.get(axis, (1, length))
                    sizes[axis] = min(max(length, low), high)
        return {spec.name: spec.sample(rng, sizes) for spec in self.inputs}

    def figures(self, reference: Arrays, candidate: Arrays) -> dict[str, float]:
        """Further label-free figures over all samples, by name."""
        return {}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        """The metric of these answers against labels, as a function of sample indices; higher is better."""
        raise InputError(f"task {self.name!r} has no metric against labels")


def read_asset(folder: Path, name: str) -> Any:
    """The JSON in a file of the artifact. Raises CorruptArtifact."""
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptArtifact(f"{folder / name} is missing. Compress the model again") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptArtifact(f"{folder / name} does not read: {error}. Compress the model again") from error


def to_json(value: Any) -> bytes:
    """JSON with sorted keys and a final newline: the same value gives the same bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def first(arrays: Arrays) -> Array:
    """The first output, which is the one that counts."""
    return next(iter(arrays.values()))
