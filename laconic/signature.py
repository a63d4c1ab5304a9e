"""How a module is called: which tensors go in, which come out, and by which names."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laconic.errors import SourceError
from laconic.tensor import BATCH, Array, TensorSpec

PROBES = (2, 3)
"""Sizes of the free axes in the two runs that find out which axes of the outputs are free; each further axis takes the
next sizes, so that no two axes are of one size by chance."""


def specs_from_arrays(arrays: Mapping[str, Array]) -> tuple[TensorSpec, ...]:
    """The signature that a file of arrays suggests: the first axis is the batch, the others are fixed.

    Raises SourceError for an array without axes, or of a dtype that no signature knows.
    """
    specs = []
    for name, array in arrays.items():
        if array.ndim == 0 or array.dtype.kind not in "biuf":
            raise SourceError(
                f"array {name!r} is {array.dtype} with {array.ndim} axes; an input is a number array whose first axis "
                f"counts the samples"
            )
        specs.append(TensorSpec(name=name, dtype=array.dtype.name, shape=(BATCH, *array.shape[1:])))
    return tuple(specs)


def bind(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The positional and the keyword arguments for the module's forward: by name where it knows the names."""
    parameters = inspect.signature(module.forward).parameters
    if tensors and all(name in parameters for name in tensors):
        return (), {name: tensors[name] for name in parameters if name in tensors}
    return tuple(tensors.values()), {}


def call(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's outputs by name, in their order: the keys of a mapping, else `output`, or `output_0`, `output_1`."""
    args, kwargs = bind(module, tensors)
    answers = list(_flatten("output", module(*args, **kwargs)))
    return dict(answers)


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


def order(module: nn.Module, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The inputs in the order of the module's forward, where it knows their names."""
    parameters = list(inspect.signature(module.forward).parameters)
    if all(spec.name in parameters for spec in inputs):
        return tuple(sorted(inputs, key=lambda spec: parameters.index(spec.name)))
    return inputs


def probe(module: nn.Module, inputs: tuple[TensorSpec, ...], names: tuple[str, ...] = ()) -> tuple[TensorSpec, ...]:
    """The outputs' specs, found by running the module at two sizes of the free axes.

    names: what to call the outputs, where the module's own names say little. An output's axis that has the size of a
    free axis in both runs is that axis; one that changes otherwise gets a name of its own.
    Raises SourceError where the module does not run on inputs of these specs.
    """
    runs = []
    for number in range(len(PROBES)):
        sizes = probe_sizes(inputs, number)
        answers = _run(module, inputs, sizes)
        runs.append((sizes, answers))
    (sizes, answers), (others, repeats) = runs
    bounds = {name: limits for spec in inputs for name, limits in spec.bounds.items()}
    specs = []
    for index, (name, answer) in enumerate(answers.items()):
        called = names[index] if index < len(names) else name
        free = {(sizes[axis], others[axis]): axis for axis in reversed(sizes)}
        shape: list[int | str] = []
        for axis, pair in enumerate(zip(answer.shape, repeats[name].shape, strict=True)):
            shape.append(free.get(pair, f"{called}_{axis}") if pair[0] != pair[1] else pair[0])
        kept = {axis: bounds[axis] for axis in shape if isinstance(axis, str) and axis in bounds}
        specs.append(TensorSpec(name=called, dtype=answer.dtype.name, shape=tuple(shape), bounds=kept))
    return tuple(specs)


def probe_sizes(inputs: tuple[TensorSpec, ...], number: int) -> dict[str, int]:
    """Sizes of the free axes for run `number`: within the bounds, each axis of its own size where the bounds allow."""
    sizes: dict[str, int] = {}
    for spec in inputs:
        for axis in spec.shape:
            if isinstance(axis, str) and axis not in sizes:
                low, high = spec.bounds.get(axis, (1, np.iinfo(np.int64).max))
                wanted = PROBES[number] if axis == BATCH else 4 * len(sizes) + 3 + number
                sizes[axis] = min(low + number if low > wanted else wanted, high)
    return sizes


def _run(module: nn.Module, inputs: tuple[TensorSpec, ...], sizes: dict[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    arrays = {spec.name: spec.sample(rng, sizes) for spec in inputs}
    try:
        with torch.inference_mode():
            answers = call(module, {name: torch.from_numpy(array) for name, array in arrays.items()})
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        raise SourceError(
            f"the module does not run on inputs of the shapes {shapes}: {str(error).splitlines()[0]}. "
            f"Give the inputs that its forward takes"
        ) from error
    return {name: answer.numpy() for name, answer in answers.items()}
