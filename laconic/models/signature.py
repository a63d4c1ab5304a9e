"""The signature of a module: its input and output tensors, by name, and how it is called with them."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laconic.arrays import Arrays
from laconic.errors import SourceError
from laconic.tensor import BATCH, TensorSpec, sample_inputs

Sample = Callable[[Mapping[str, int]], Arrays]
"""From the size of each free axis, by name, to inputs."""

ROWS = (2, 5)
"""Batch sizes of the two runs that find the free axes of the outputs. Every other free axis takes sizes of its own, the
second more than twice the first: after a stride, seven and eight give the same size."""


def bind(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the positional and keyword arguments of the module's forward: by name where an optional one is omitted."""
    parameters = list(inspect.signature(module.forward).parameters)
    known = all(name in parameters for name in tensors)
    if not known or list(tensors) == parameters[: len(tensors)]:
        return tuple(tensors.values()), {}
    return (), {name: tensors[name] for name in parameters if name in tensors}


def call(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Call a module; returns its outputs by name: the keys of a mapping, else `output`, or `output_0`, `output_1`."""
    args, kwargs = bind(module, tensors)
    return name_outputs(module(*args, **kwargs))


def name_outputs(answer: Any) -> dict[str, Tensor]:
    """Return what a module returned, by name: the keys of a mapping, else `output`, or `output_0`, `output_1`."""
    return dict(_flatten("output", answer))


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward of one module instance; class, structure and parameter names stay. Returns the undo."""
    before = vars(module).get("forward")

    def undo() -> None:
        del module.forward
        if before is not None:
            module.forward = before

    module.forward = forward
    return undo


def _flatten(name: str, answer: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(answer, Tensor):
        yield name, answer
    elif isinstance(answer, Mapping):
        for key, value in answer.items():
            yield from _flatten(str(key), value)
    elif isinstance(answer, (list, tuple)):
        for index, value in enumerate(answer):
            yield from _flatten(name if len(answer) == 1 else f"{name}_{index}", value)
    elif answer is not None:
        raise SourceError(f"the module's output {name!r} is a {type(answer).__name__}; expected tensors")


def order_inputs(module: nn.Module, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Sort the inputs in the order of the parameters of the module's forward, where it has these names."""
    parameters = list(inspect.signature(module.forward).parameters)
    if all(spec.name in parameters for spec in inputs):
        return tuple(sorted(inputs, key=lambda spec: parameters.index(spec.name)))
    return inputs


def probe(
    run: Callable[[Arrays], Arrays],
    inputs: tuple[TensorSpec, ...],
    sample: Sample | None = None,
    *,
    sizes: Sequence[Mapping[str, int]] = (),
) -> tuple[TensorSpec, ...]:
    """Find the output specs by running a model at two sizes of each free axis.

    sample: makes inputs of these sizes, by default random ones of the specs. sizes: of the free axes in both runs, by
    default those of `probe_sizes`. An output's axis that has the size of a free axis in both runs is that axis; one
    that changes otherwise gets a name of its own.
    """
    first, others = sizes or [probe_sizes(inputs, number) for number in range(len(ROWS))]
    answers, repeats = (run(sample(each) if sample else sample_inputs(inputs, each)) for each in (first, others))
    bounds = {name: limits for spec in inputs for name, limits in spec.bounds.items()}
    free = {(first[axis], others[axis]): axis for axis in reversed([*first])}
    specs = []
    for name, answer in answers.items():
        shape = tuple(
            pair[0] if pair[0] == pair[1] else free.get(pair, f"{name}_{axis}")
            for axis, pair in enumerate(zip(answer.shape, repeats[name].shape, strict=True))
        )
        kept = {axis: bounds[axis] for axis in shape if isinstance(axis, str) and axis in bounds}
        specs.append(TensorSpec(name=name, dtype=answer.dtype.name, shape=shape, bounds=kept))
    return tuple(specs)


def probe_module(
    module: nn.Module,
    inputs: tuple[TensorSpec, ...],
    names: tuple[str, ...] = (),
    sample: Sample | None = None,
    *,
    advice: str = "Give the inputs that its forward takes",
) -> tuple[TensorSpec, ...]:
    """Find the output specs of a module. names: of the outputs, instead of the module's own. sample: makes inputs of
    given sizes of the free axes, as the model takes them. advice: what to do where it does not run.

    Raises SourceError where the module does not run on inputs of these specs.
    """

    def run(arrays: Arrays) -> Arrays:
        try:
            with torch.inference_mode():
                answers = call(module, {name: torch.from_numpy(array) for name, array in arrays.items()})
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError) as error:
            shapes = {name: list(array.shape) for name, array in arrays.items()}
            reason = str(error).splitlines()[0].rstrip(".")
            raise SourceError(
                f"the module does not run on inputs of the shapes {shapes}: {reason}. {advice}"
            ) from error
        called = [*names, *list(answers)[len(names) :]]
        return {name: answer.numpy() for name, answer in zip(called, answers.values(), strict=True)}

    return probe(run, inputs, sample)


def probe_sizes(inputs: tuple[TensorSpec, ...], number: int, *, least: int = 3) -> dict[str, int]:
    """Choose sizes of the free axes for run `number`: within the bounds, each axis of its own size where the bounds
    allow."""
    sizes: dict[str, int] = {}
    for spec in inputs:
        for axis in spec.shape:
            if isinstance(axis, str) and axis not in sizes:
                low, high = spec.bounds.get(axis, (1, np.iinfo(np.int64).max))
                # The shortest side of an image may leave a map of 1 x 1, whose axes are then taken as fixed.
                first = max(low, ROWS[0]) if axis == BATCH else 2 * low + 4 * len(sizes) + least - 2
                second = ROWS[1] + low - 1 if axis == BATCH else 2 * first + 1
                sizes[axis] = min((first, second)[number], high)
    return sizes
