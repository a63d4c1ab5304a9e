"""Plain arrays in, plain arrays out: the task of every model that no other task fits."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from laconic.arrays import Array, Arrays, first
from laconic.errors import InputError
from laconic.metrics import Scorer, cosine, make_mean_scorer, make_r2_scorer, measure_closeness
from laconic.tasks.agreement import MOST_NUMBERS, Agreement, compare_classes, compare_numbers, compare_scores
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.task import Task
from laconic.tasks.tolerance import Tolerance
from laconic.tasks.training_needs import HealingLoss
from laconic.tensor import TensorSpec, check_inputs, describe_array, read_numbers


class Tensors(Task):
    """A sample is a dict of arrays, one per input, without the batch axis.

    Fidelity is the cosine with the original's answer, the smallest over the outputs. Of an output of few numbers, which
    may have units of their own, it is their closeness in standard deviations of the original's, 0.995 for a tenth of
    one, the mean over the numbers; of whole numbers and truth values the share that is the same. Integer labels are
    classes (the metric is accuracy of the first output's argmax); anything else is a target (the metric is R2).
    """

    name = "tensors"
    tolerance = Tolerance(mean=0.99, worst=0.9)
    field = "inputs"
    field_description = "The arrays of one sample by input, without the batch axis, or a list of such."
    metric = "accuracy, or R2"
    accepts = frozenset({"arrays"})
    objective = "targets"

    def __init__(self, inputs: tuple[TensorSpec, ...]) -> None:
        self.inputs = inputs
        self.padding = {}

    @classmethod
    def from_signature(cls, inputs: tuple[TensorSpec, ...]) -> Self:
        return cls(inputs)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        return cls(inputs)

    def assets(self) -> dict[str, bytes]:
        return {}

    def sample_schema(self) -> dict[str, Any]:
        arrays = {spec.name: describe_array(spec.dtype, spec.shape[1:], spec.bounds) for spec in self.inputs}
        return {"type": "object", "properties": arrays, "required": [*arrays], "additionalProperties": False}

    def parse(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            if len(self.inputs) != 1:
                names = [spec.name for spec in self.inputs]
                raise InputError(f"a sample must be an object with the arrays {names}, not {type(value).__name__}")
            value = {self.inputs[0].name: value}
        sample = {name: self._array(name, array) for name, array in self.drop_constants(value).items()}
        check_inputs(self.inputs, {name: array[None] for name, array in sample.items()})
        return sample

    def parse_label(self, value: Any, sample: Any) -> Any:
        try:
            kind = np.asarray(value).dtype.kind
        except ValueError:
            kind = "O"
        if kind not in "iuf":
            raise InputError(f"a label must be a number, or an array of numbers, not {value!r}")
        return value

    def _array(self, name: str, value: Any) -> Array:
        dtypes = {spec.name: spec.dtype for spec in self.inputs}
        if name not in dtypes:
            return np.empty(())  # whatever it holds, its name is refused
        if isinstance(value, np.ndarray):
            return value
        return read_numbers(value, np.dtype(dtypes[name]), f"input {name!r}")

    def encode(self, samples: Sequence[Any]) -> Arrays:
        batch = {}
        for spec in self.inputs:
            shapes = {sample[spec.name].shape for sample in samples}
            if len(shapes) > 1:
                raise InputError(f"input {spec.name!r} must be of one shape in a batch, not {sorted(shapes)}")
            batch[spec.name] = np.stack([sample[spec.name] for sample in samples])
        return batch

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        rows = len(first(outputs))
        return [{name: array[row] for name, array in outputs.items()} for row in range(rows)]

    def sample_inputs(self, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
        if not self.sample_rows:
            return super().sample_inputs(sizes, seed)
        return {spec.name: spec.fit(self.sample_rows[spec.name], sizes) for spec in self.inputs}

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        """Return a sample as often as there are rows, where one is known: random numbers may be no lengths or ids."""
        if not self.typical_sample:
            return super().typical(batch, length, seed)
        return {name: np.repeat(array, batch, axis=0) for name, array in self.typical_sample.items()}

    def example_request(self) -> dict[str, Any]:
        return {
            self.field: {
                name: array.round(2) if array.dtype.kind == "f" else array
                for name, array in self.examples(1)[0].items()
            }
        }

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        batch = self.typical(count, 16, seed)
        return [{name: array[row] for name, array in batch.items()} for row in range(count)]

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """Return the loss of the outputs alone, as nothing is known of the layers."""
        return {"outputs": 1.0}

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        return np.asarray(np.min([likeness(reference[name], candidate[name]) for name in reference], axis=0))

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        for name, array in reference.items():
            other = candidate[name]
            if array.dtype.kind != "f":
                yield from compare_classes(array.ravel(), other.ravel(), partial(describe_value, name))
            elif array[:1].size == 1:
                yield from compare_scores(array.ravel(), other.ravel(), f"output {name!r}")
            else:
                yield from compare_numbers(array, other, f"output {name!r}")
        logits = first(reference)
        if labels is not None and are_logits(logits, np.asarray(labels)):
            chosen = first(candidate).argmax(axis=-1)
            yield from compare_classes(logits.argmax(axis=-1), chosen, partial(describe_value, "class"))

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        answers, targets = first(outputs), np.asarray(labels)
        if are_logits(answers, targets):
            return make_mean_scorer((answers.argmax(axis=-1) == targets).astype(np.float64))
        answers, targets = answers.reshape(len(targets), -1), targets.reshape(len(targets), -1)
        if answers.shape != targets.shape:
            raise InputError(f"a label holds {targets.shape[1]} numbers, an answer {answers.shape[1]}")
        return make_r2_scorer(answers.astype(np.float64), targets.astype(np.float64))


def describe_value(name: str, value: int) -> str:
    """Return the words for one value of an output, or one class."""
    return f"{name} {value}"


def are_logits(answers: Array, labels: Array) -> bool:
    """Return whether answers are the logits of classes, and labels the numbers of the right ones."""
    return labels.dtype.kind in "iu" and labels.ndim == 1 and answers.ndim == 2 and answers.shape[1] > 1


def likeness(reference: Array, candidate: Array) -> Array:
    """Return the cosine of each sample's answers; of few numbers their closeness, of what is no float the share that is
    the same."""
    if reference.dtype.kind != "f":
        return np.asarray((reference == candidate).reshape(len(reference), -1).mean(axis=1))
    if reference[:1].size > MOST_NUMBERS:
        return cosine(reference, candidate)
    rows = (each.reshape(len(each), -1) for each in (reference, candidate))
    return np.asarray(measure_closeness(*rows).mean(axis=1))
