"""A layer's turn in a pass: what it was called with, and how to call it so again for some rows of the batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from laconic.errors import RecipeError
from laconic.layerwise.rng_state import Dice

HIDDEN = "hidden_states"
"""The name by which transformers call what flows from layer to layer."""


@dataclass(eq=False)
class Turn:
    """rows: of the batch. args, kwargs: what the layer was called with beside the hidden states, which came first or by
    name. dice: what it drew, by part of the batch."""

    layer: nn.Module
    rows: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: bool
    dice: list[Dice] = field(default_factory=list)

    def __call__(self, weights: dict[str, Tensor], hidden: Tensor, part: slice | None) -> tuple[Tensor, Any]:
        """The hidden states after the layer, [rows of the part, ...], and its output as it is.

        part: of the batch, from which `hidden` is; None means all of it.
        """
        args, kwargs = self.args, self.kwargs
        if part is not None:
            args, kwargs = self.cut(args, part), self.cut(kwargs, part)
        given = {**kwargs, HIDDEN: hidden} if self.named else kwargs
        output = functional_call(self.layer, weights, args if self.named else (hidden, *args), given)
        value, *others = output if isinstance(output, tuple) else (output,)
        if any(True for _ in tensors(others)):
            raise RecipeError(
                f"layerwise: a layer of class {type(self.layer).__name__} gives more tensors than its hidden states, "
                f"and their gradients would be lost. Ask for no attentions, or take checkpoint in its place"
            )
        return value, output

    def cut(self, value: Any, part: slice) -> Any:
        """Some rows of whatever has rows."""

        def rows(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or tensor.shape[0] == 1:
                return tensor
            if tensor.shape[0] != self.rows:
                raise RecipeError(
                    f"layerwise: layers of class {type(self.layer).__name__} take a tensor of shape "
                    f"{list(tensor.shape)} whose first axis is not the {self.rows} rows of the batch, so a batch "
                    f"cannot be taken in parts. Set rows: null"
                )
            return tensor[part]

        return mapped(rows, value)


def turn_of(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Turn, Tensor]:
    """A layer's turn, and the hidden states that it was called with. Raises RecipeError."""
    named = not args
    hidden = kwargs.get(HIDDEN) if named else args[0]
    name = type(layer).__name__
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.ndim == 0:
        raise RecipeError(
            f"layerwise: a layer of class {name} was called without hidden states as its first argument or as "
            f"{HIDDEN}. Take checkpoint in its place"
        )
    others = {key: value for key, value in kwargs.items() if key != HIDDEN} if named else kwargs
    turn = Turn(layer, hidden.shape[0], args[1:], others, named)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors((turn.args, turn.kwargs))):
        raise RecipeError(
            f"layerwise: layers of class {name} take a tensor beside their hidden states through which a gradient "
            f"flows (an encoder's output, a learned bias). Take checkpoint in its place"
        )
    if torch.is_grad_enabled() and any(hasattr(value, "get_seq_length") for value in (*turn.args, *others.values())):
        raise RecipeError(
            f"layerwise: layers of class {name} were called with a cache of keys and values, which a second run would "
            f"fill twice. Call the model with use_cache=False"
        )
    return turn, hidden


def mapped(call: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nest of tuples, lists and dicts with `call` done to each tensor in it."""
    if isinstance(value, Tensor):
        return call(value)
    if isinstance(value, dict):
        return {key: mapped(call, each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(call, each) for each in value)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a nest of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)
