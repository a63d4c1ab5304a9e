"""A list of layers that runs as one pass, whichever way the model's own loop goes through it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from laconic.errors import RecipeError
from laconic.layerwise.layer_call import turn_of
from laconic.layerwise.layerwise_pass import Means, Passage, run
from laconic.layerwise.rng_state import Precision
from laconic.offload.weight_provider import Resident


@dataclass(eq=False)
class Way:
    """What the stacks of a model share. on: within a forward pass of training. begun, done: passes in this one."""

    means: Means
    on: bool = False
    begun: int = 0
    done: int = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Round a forward pass. Raises RecipeError where the model did not go through its layers one after another."""
        self.on, self.begun, self.done = True, 0, 0
        try:
            yield
        finally:
            self.on = False
        if torch.is_grad_enabled() and (self.done == 0 or self.done != self.begun):
            raise RecipeError(
                "layerwise: the model does not call each of its layers once, in order, in a loop over their list. Take "
                "checkpoint in its place"
            )


class Stack(nn.Module):
    """What a list of layers becomes. Parameters keep their names: the list's class is exchanged, and nothing in it."""

    way: Way

    def __iter__(self) -> Iterator[Any]:
        layers = list(self.children())
        plain = not self.way.on or (not torch.is_grad_enabled() and isinstance(self.way.means.supply, Resident))
        return iter(layers) if plain else ride(self.way, layers)

    def __getitem__(self, index: int | slice) -> Any:
        found = super().__getitem__(index)  # type: ignore[misc]
        if isinstance(index, slice):
            found.way = self.way
        return found


def stack(layers: nn.Module, way: Way) -> Callable[[], None]:
    """Turn a list of layers into a stack; gives what turns it back."""
    plain = type(layers)
    layers.__class__ = type(f"{plain.__name__}Stack", (Stack, plain), {})
    layers.way = way  # type: ignore[assignment]

    def undo() -> None:
        layers.__class__ = plain
        del layers.way

    return undo


def ride(way: Way, layers: list[nn.Module]) -> Iterator["Seat"]:
    """The layers one after another; the last one's output is joined to the first one's input."""
    way.begun += 1
    trip = Trip(way, layers)
    for number, layer in enumerate(layers):
        yield Seat(layer, trip)
        if trip.count != number + 1:
            return


class Seat:
    """A layer within a pass: looks like it, and is called in its place."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._layer, self._call = layer, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._layer, args, kwargs)


class Trip:
    """One way through the layers. What is done between them cannot be taken back, so nothing may be."""

    def __init__(self, way: Way, layers: list[nn.Module]) -> None:
        self.way, self.layers, self.count = way, layers, 0
        self._passage = Passage(way.means, len(layers)) if torch.is_grad_enabled() else None
        self._first: Tensor | None = None
        self._before: Tensor | None = None

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer's output. Raises RecipeError."""
        turn, hidden = turn_of(layer, args, kwargs)
        if self.count and hidden is not self._before:
            raise RecipeError(
                f"layerwise: between two layers of class {type(layer).__name__} the model does more than to hand the "
                f"hidden states on, and that cannot be taken back. Take checkpoint in its place"
            )
        self._first = hidden if self._first is None else self._first
        self.count += 1
        top = self.count == len(self.layers)
        then = None if top else self.layers[self.count]
        if self._passage is None:
            _, output = run(self.way.means, turn, hidden, then, Precision.now(self.way.means.device))
            self._before = hidden_of(output)
        else:
            _, output = self._passage.up(turn, hidden, then)
            self._before = hidden_of(output)
            if top:
                output = self._join(output)
        if top:
            self.way.means.supply.close()
            self.way.done += 1
            self._first = self._before = None
        return output

    def _join(self, output: Any) -> Any:
        """The top's output, through which a gradient flows back to the bottom's input."""
        anchor = torch.zeros((), device=self.way.means.device, requires_grad=True)
        joined = Joined.apply(self._passage, [hidden_of(output)], self._first, anchor)  # type: ignore[no-untyped-call]
        # The gradient that arrives may be somebody else's too; a copy may be written over.
        joined.register_hook(lambda gradient: gradient.clone(memory_format=torch.contiguous_format))
        return (joined, *output[1:]) if isinstance(output, tuple) else joined


class Joined(torch.autograd.Function):
    """A pass as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, top: list[Tensor], first: Tensor, anchor: Tensor) -> Tensor:
        """top: the output, in a list because it is not an input of the node. anchor: makes it one of the graph where
        the layers' input is not."""
        ctx.passage = passage
        return top.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None, None]:
        passage, ctx.passage = ctx.passage, None
        return None, None, passage.down(gradient, ctx.needs_input_grad[2]), None


def hidden_of(output: Any) -> Tensor:
    """What flows on to the next layer."""
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value
