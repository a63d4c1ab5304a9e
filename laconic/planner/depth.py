"""Deep models from shallow ones: memory in each part of a step grows in a straight line with the number of layers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from laconic.models.repeated_layers import find_layer_lists

ENDS = 2
"""Layers from each end of the stack that are looked at one by one. What lies between is like one of them."""
LAYER = re.compile(r"(\d+)/(\d+)(.*)")


def place(position: tuple[str, str], ends: int = ENDS) -> str | None:
    """The name of a part of a step, (phase, layer), that is the same for any depth; None for the layers between.

    Within one such part the peak is a straight line over the depth: the part that holds the peak of the whole step may
    be another in a deep model than in a shallow one (an 8 B model was 13.7 % off when the step was taken whole).
    """
    phase, layer = position
    match = LAYER.fullmatch(layer)
    if match is None:
        return f"{phase} {layer}"
    index, count, rest = int(match[1]), int(match[2]), match[3]
    if index < ends:
        return f"{phase} {index} from the start{rest}"
    if count - 1 - index < ends:
        return f"{phase} {count - 1 - index} from the end{rest}"
    return None


def shallow(ends: int = ENDS) -> tuple[int, int]:
    """Layers of the models that are simulated in the place of a deeper one: the ends, and none or one between them."""
    return 2 * ends, 2 * ends + 1


def extended(values: tuple[float, float], depth: int, ends: int = ENDS) -> float:
    """The value at `depth`, on the line through the values at the two shallow depths."""
    a, b = shallow(ends)
    return values[0] + (values[1] - values[0]) * (depth - a) / (b - a)


@contextmanager
def cut(module: nn.Module, depth: int) -> Iterator[None]:
    """The module with only the first layers of its one stack, while the body runs."""
    (stack,) = find_layer_lists(module)
    whole = dict(stack._modules)
    stack._modules = dict(list(whole.items())[:depth])
    try:
        yield
    finally:
        stack._modules = whole


def deep(module: nn.Module, ends: int = ENDS) -> int | None:
    """How many layers the module's stack has, where it has one, of layers all alike, that is worth a detour."""
    found = find_layer_lists(module)
    if len(found) != 1:
        return None
    layers = list(found[0].children())
    shapes = {tuple((name, tuple(each.shape)) for name, each in layer.named_parameters()) for layer in layers}
    return len(layers) if len(shapes) == 1 and len(layers) > max(shallow(ends)) + 1 else None
